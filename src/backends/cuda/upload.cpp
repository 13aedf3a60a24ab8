#include "backends/cuda/upload.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "moe/parallel.hpp"

namespace moe4::cuda {

namespace {

constexpr int kUploaders = 8;
constexpr std::int64_t kBufferBytes = 2 << 20;
constexpr std::int64_t kPinnedBytes = 2 * kBufferBytes;  // of an uploader
constexpr std::int64_t kPieceBytes = Uploader::kPieceBytes;

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

/// To [pieces, rows, kPieceBytes].
void gather_columns(const std::uint8_t* from, std::int64_t rows, std::int64_t used, std::int64_t stride,
                    std::uint8_t* to) {
    for (std::int64_t row = 0; row < rows; ++row, from += stride, to += kPieceBytes) {
        const std::int64_t whole = used / kPieceBytes;
        for (std::int64_t i = 0; i < whole; ++i)
            std::memcpy(to + i * rows * kPieceBytes, from + i * kPieceBytes, kPieceBytes);
        if (used % kPieceBytes != 0)
            gather_rows(from + whole * kPieceBytes, 1, used % kPieceBytes, stride,
                        to + whole * rows * kPieceBytes, kPieceBytes);
    }
}

}  // namespace

Uploader::Uploader(std::uint8_t* pinned, std::int64_t buffer_bytes)
    : buffer_bytes_(buffer_bytes), stream_(make_stream(cudaStreamNonBlocking)) {
    for (Buffer& buffer : buffers_) {
        buffer = {.data = pinned, .free = make_event(cudaEventDisableTiming)};
        pinned += buffer_bytes;
    }
}

const Uploader::Buffer& Uploader::next_buffer() {
    const Buffer& buffer = buffers_[next_];
    next_ = 1 - next_;
    check(cudaEventSynchronize(buffer.free.get()), "copying weights to the device");
    return buffer;
}

void Uploader::send(const Buffer& buffer, std::uint8_t* to, std::int64_t bytes, std::int64_t count,
                    std::int64_t pitch) {
    const auto width = static_cast<std::size_t>(bytes);
    check(cudaMemcpy2DAsync(to, static_cast<std::size_t>(pitch), buffer.data, width, width,
                            static_cast<std::size_t>(count), cudaMemcpyHostToDevice, stream_.get()),
          "copying weights to the device");
    check(cudaEventRecord(buffer.free.get(), stream_.get()), "copying weights to the device");
}

void Uploader::copy_rows(const std::uint8_t* from, std::int64_t rows, std::int64_t used, std::int64_t stride,
                         std::uint8_t* to, std::int64_t pitch) {
    const std::int64_t cols_at_once = std::min(pitch, buffer_bytes_);
    const std::int64_t rows_at_once = buffer_bytes_ / cols_at_once;
    for (std::int64_t row = 0; row < rows; row += rows_at_once) {
        const std::int64_t count = std::min(rows_at_once, rows - row);
        for (std::int64_t col = 0; col < pitch; col += cols_at_once) {
            const std::int64_t cols = std::min(cols_at_once, pitch - col);
            const Buffer& buffer = next_buffer();
            gather_rows(from + row * stride + col, count, std::min(cols, used - col), stride, buffer.data,
                        cols);
            send(buffer, to + row * pitch + col, count * cols, 1, count * cols);
        }
    }
}

void Uploader::copy_columns(const std::uint8_t* from, std::int64_t rows, std::int64_t used,
                            std::int64_t stride, std::uint8_t* to, std::int64_t column_pitch) {
    const std::int64_t used_at_once = std::min(used, buffer_bytes_ / kPieceBytes * kPieceBytes);
    for (std::int64_t col = 0; col < used; col += used_at_once) {
        const std::int64_t cols = std::min(used_at_once, used - col);
        const std::int64_t pieces = (cols + kPieceBytes - 1) / kPieceBytes;
        const std::int64_t rows_at_once = buffer_bytes_ / (pieces * kPieceBytes);
        for (std::int64_t row = 0; row < rows; row += rows_at_once) {
            const std::int64_t count = std::min(rows_at_once, rows - row);
            const Buffer& buffer = next_buffer();
            gather_columns(from + row * stride + col, count, cols, stride, buffer.data);
            send(buffer, to + col / kPieceBytes * column_pitch + row * kPieceBytes, count * kPieceBytes,
                 pieces, column_pitch);
        }
    }
}

void Uploader::finish() { check(cudaStreamSynchronize(stream_.get()), "copying weights to the device"); }

void UploadPool::start() {
    if (!uploaders_.empty()) return;
    const DeviceScope device(device_);
    void* pinned = nullptr;
    check(cudaMallocHost(&pinned, kUploaders * kPinnedBytes), "allocating pinned memory");
    pinned_.reset(static_cast<std::uint8_t*>(pinned));
    std::deque<Uploader> uploaders;
    for (int i = 0; i < kUploaders; ++i)
        uploaders.emplace_back(pinned_.get() + i * kPinnedBytes, kBufferBytes);
    uploaders_ = std::move(uploaders);
}

void UploadPool::run(const ParallelFor& parallel_for, int count,
                     const std::function<void(Uploader&, int)>& copy) {
    const std::scoped_lock lock(mutex_);
    start();
    std::atomic<int> next{0};
    moe::parallel(parallel_for, kUploaders, [&](int index) {
        const DeviceScope device(device_);
        Uploader& uploader = uploaders_[static_cast<std::size_t>(index)];
        try {
            for (int i = next++; i < count; i = next++) copy(uploader, i);
        } catch (...) {
            next = count;
            uploader.finish();
            throw;
        }
        uploader.finish();
    });
}

}  // namespace moe4::cuda
