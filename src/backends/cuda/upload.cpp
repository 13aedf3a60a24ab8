#include "backends/cuda/upload.hpp"

#include <algorithm>
#include <cstring>

namespace moe4::cuda {

namespace {

constexpr std::int64_t kBufferBytes = 1 << 20;  // pinning more takes longer than it gains

void gather_rows(const std::uint8_t* from, std::int64_t rows, std::int64_t used, std::int64_t stride,
                 std::uint8_t* to, std::int64_t pitch) {
    if (used == stride && used == pitch) {
        std::memcpy(to, from, static_cast<std::size_t>(rows * used));
        return;
    }
    for (std::int64_t row = 0; row < rows; ++row) {
        std::memcpy(to + row * pitch, from + row * stride, static_cast<std::size_t>(used));
        std::memset(to + row * pitch + used, 0, static_cast<std::size_t>(pitch - used));
    }
}

}  // namespace

Uploader::Uploader(std::int64_t largest_pitch) : buffer_bytes_(std::max(kBufferBytes, largest_pitch)) {
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "creating a stream");
    for (Buffer& buffer : buffers_) {
        check(cudaMallocHost(reinterpret_cast<void**>(&buffer.data), static_cast<std::size_t>(buffer_bytes_)),
              "allocating pinned memory");
        check(cudaEventCreateWithFlags(&buffer.free, cudaEventDisableTiming), "creating an event");
    }
}

Uploader::~Uploader() {
    cudaStreamSynchronize(stream_);
    for (const Buffer& buffer : buffers_) {
        cudaFreeHost(buffer.data);
        if (buffer.free != nullptr) cudaEventDestroy(buffer.free);
    }
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
}

void Uploader::copy_rows(const std::uint8_t* from, std::int64_t rows, std::int64_t used, std::int64_t stride,
                         std::uint8_t* to, std::int64_t pitch) {
    const std::int64_t rows_at_once = buffer_bytes_ / pitch;
    for (std::int64_t row = 0; row < rows; row += rows_at_once) {
        const std::int64_t count = std::min(rows_at_once, rows - row);
        const Buffer& buffer = buffers_[next_];
        next_ = 1 - next_;
        check(cudaEventSynchronize(buffer.free), "copying weights to the device");
        gather_rows(from + row * stride, count, used, stride, buffer.data, pitch);
        check(cudaMemcpyAsync(to + row * pitch, buffer.data, static_cast<std::size_t>(count * pitch),
                              cudaMemcpyHostToDevice, stream_),
              "copying weights to the device");
        check(cudaEventRecord(buffer.free, stream_), "copying weights to the device");
    }
}

void Uploader::finish() { check(cudaStreamSynchronize(stream_), "copying weights to the device"); }

}  // namespace moe4::cuda
