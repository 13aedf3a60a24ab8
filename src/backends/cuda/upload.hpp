#pragma once
// Copies weights from pageable host memory to the device through pinned buffers, so that the CPU's copy and
// the link's overlap, from several threads: one copies to pinned memory slower than the link takes it.
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>

#include "backends/cuda/runtime.hpp"
#include "moe4/backend.hpp"

namespace moe4::cuda {

/// A stream and two pinned buffers: one is filled while the other is copied.
class Uploader {
public:
    static constexpr std::int64_t kPieceBytes = 16;

    /// Borrows `pinned`, 2 * buffer_bytes of it. On the current device.
    Uploader(std::uint8_t* pinned, std::int64_t buffer_bytes);

    /// rows of `used` bytes, `stride` apart on the host, `pitch` apart on the device; bytes between them
    /// become 0.
    void copy_rows(const std::uint8_t* from, std::int64_t rows, std::int64_t used, std::int64_t stride,
                   std::uint8_t* to, std::int64_t pitch);
    /// rows of `used` bytes in pieces: piece i of all rows goes to to + i * column_pitch; bytes behind
    /// `used` become 0.
    void copy_columns(const std::uint8_t* from, std::int64_t rows, std::int64_t used, std::int64_t stride,
                      std::uint8_t* to, std::int64_t column_pitch);
    void finish();

private:
    struct Buffer {
        std::uint8_t* data = nullptr;
        EventHandle free;
    };
    const Buffer& next_buffer();
    /// `count` times `bytes`, one behind the other in the buffer, `pitch` apart on the device.
    void send(const Buffer&, std::uint8_t* to, std::int64_t bytes, std::int64_t count, std::int64_t pitch);

    std::int64_t buffer_bytes_;
    Buffer buffers_[2];
    int next_ = 0;
    StreamHandle stream_;
};

/// The uploaders of a device, made when they are first needed and kept: pinning memory takes longer than
/// copying as much.
class UploadPool {
public:
    explicit UploadPool(int device) : device_(device) {}

    /// copy(uploader, i) for i in [0, count), one thread an uploader; no copy is under way on return, nor
    /// when it throws: machine, or what `copy` throws. One caller at a time, others wait.
    void run(const ParallelFor&, int count, const std::function<void(Uploader&, int)>& copy);

private:
    void start();

    struct Unpin {
        void operator()(std::uint8_t* data) const { cudaFreeHost(data); }
    };
    int device_;
    std::mutex mutex_;
    std::unique_ptr<std::uint8_t, Unpin> pinned_;
    std::deque<Uploader> uploaders_;
};

}  // namespace moe4::cuda
