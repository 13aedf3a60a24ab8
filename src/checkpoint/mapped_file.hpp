#pragma once
// A file mapped for reading.
#include <cstddef>
#include <filesystem>
#include <memory>
#include <span>
#include <string_view>

#include "moe4/error.hpp"

namespace moe4::checkpoint {

class MappedFile {
public:
    /// Throws `if_absent` when there is no such regular file, broken_file when it is a Git LFS pointer,
    /// machine when it cannot be read. Never waits for a pipe.
    static std::shared_ptr<const MappedFile> open(const std::filesystem::path&, ErrorKind if_absent);
    ~MappedFile();
    MappedFile(const MappedFile&) = delete;
    MappedFile& operator=(const MappedFile&) = delete;

    std::span<const std::byte> bytes() const { return {data_, size_}; }
    std::string_view text() const { return {reinterpret_cast<const char*>(data_), size_}; }

    /// Gives back the memory of these bytes of some mapped file; they stay readable.
    static void release(const void* bytes, std::size_t size);

private:
    MappedFile(const std::byte* data, std::size_t size) : data_(data), size_(size) {}
    const std::byte* data_;
    std::size_t size_;
};

}  // namespace moe4::checkpoint
