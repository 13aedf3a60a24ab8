#pragma once
// A file mapped for reading.
#include <cstddef>
#include <filesystem>
#include <memory>
#include <span>
#include <string_view>

namespace moe4::checkpoint {

class MappedFile {
public:
    /// Throws invalid_argument when there is no such regular file, machine when it cannot be read.
    static std::shared_ptr<const MappedFile> open(const std::filesystem::path&);
    ~MappedFile();
    MappedFile(const MappedFile&) = delete;
    MappedFile& operator=(const MappedFile&) = delete;

    std::span<const std::byte> bytes() const { return {data_, size_}; }
    std::string_view text() const { return {reinterpret_cast<const char*>(data_), size_}; }

private:
    MappedFile(const std::byte* data, std::size_t size) : data_(data), size_(size) {}
    const std::byte* data_;
    std::size_t size_;
};

}  // namespace moe4::checkpoint
