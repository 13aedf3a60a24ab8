#pragma once
// Copies rows from pageable host memory to the device through pinned buffers, so that the CPU's copy and the
// link's overlap. One a thread.
#include <cstdint>

#include "backends/cuda/runtime.hpp"

namespace moe4::cuda {

class Uploader {
public:
    /// Of rows of at most `largest_pitch` bytes.
    explicit Uploader(std::int64_t largest_pitch);
    ~Uploader();
    Uploader(const Uploader&) = delete;
    Uploader& operator=(const Uploader&) = delete;

    /// rows of `used` bytes, `stride` apart on the host, `pitch` apart on the device; bytes between them
    /// become 0.
    void copy_rows(const std::uint8_t* from, std::int64_t rows, std::int64_t used, std::int64_t stride,
                   std::uint8_t* to, std::int64_t pitch);
    void finish();

private:
    struct Buffer {
        std::uint8_t* data = nullptr;
        cudaEvent_t free = nullptr;
    };
    std::int64_t buffer_bytes_;
    Buffer buffers_[2];
    int next_ = 0;
    cudaStream_t stream_ = nullptr;
};

}  // namespace moe4::cuda
