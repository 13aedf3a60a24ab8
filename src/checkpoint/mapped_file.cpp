#include "checkpoint/mapped_file.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>

namespace moe4::checkpoint {

namespace {

struct FileDescriptor {
    int value;
    ~FileDescriptor() {
        if (value >= 0) ::close(value);
    }
};

[[noreturn]] void fail(ErrorKind kind, const std::filesystem::path& path, const char* what) {
    throw Error(kind, path.string() + ": " + what);
}

}  // namespace

std::shared_ptr<const MappedFile> MappedFile::open(const std::filesystem::path& path, ErrorKind if_absent) {
    // Without O_NONBLOCK, opening a pipe that nobody writes to would wait for ever.
    const FileDescriptor file{::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
    if (file.value < 0) {
        const bool is_absent = errno == ENOENT || errno == ENOTDIR;
        const bool is_device = errno == ENXIO;  // a socket, or a device without a driver
        fail(is_absent || is_device ? if_absent : ErrorKind::machine, path, std::strerror(errno));
    }
    struct stat status{};
    if (::fstat(file.value, &status) != 0) fail(ErrorKind::machine, path, std::strerror(errno));
    if (!S_ISREG(status.st_mode)) {
        fail(if_absent, path,
             S_ISDIR(status.st_mode) ? "is a folder, expected a file" : "is not a regular file");
    }
    const auto size = static_cast<std::size_t>(status.st_size);
    const void* data = nullptr;
    if (size > 0) {  // mmap refuses a length of 0
        data = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.value, 0);
        if (data == MAP_FAILED) fail(ErrorKind::machine, path, std::strerror(errno));
    }
    const std::shared_ptr<const MappedFile> mapped(new MappedFile(static_cast<const std::byte*>(data), size));
    if (mapped->text().starts_with("version https://git-lfs")) {
        fail(ErrorKind::broken_file, path,
             "is a Git LFS pointer, expected the file itself (git lfs pull fetches it)");
    }
    return mapped;
}

void MappedFile::release(const void* bytes, std::size_t size) {
    const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
    const std::size_t before = reinterpret_cast<std::uintptr_t>(bytes) % page;  // of the page's start
    auto* const first = static_cast<std::byte*>(const_cast<void*>(bytes)) - before;
    if (size > 0) ::madvise(first, before + size, MADV_DONTNEED);
}

MappedFile::~MappedFile() {
    if (size_ > 0) ::munmap(const_cast<std::byte*>(data_), size_);
}

}  // namespace moe4::checkpoint
