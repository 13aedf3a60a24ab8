#pragma once
// The few calls of the CUDA runtime that the host code makes, checked, and owners for what they give.
#include <cuda.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>

namespace moe4::cuda {

/// Throws machine: "<doing>: <what CUDA says>".
void check(cudaError_t, const char* doing);

/// Makes a device current for a scope.
class DeviceScope {
public:
    explicit DeviceScope(int device);
    ~DeviceScope();
    DeviceScope(const DeviceScope&) = delete;
    DeviceScope& operator=(const DeviceScope&) = delete;

private:
    int previous_ = 0;
    bool is_other_ = false;
};

/// Memory of the current device. Throws machine with what was asked for and what is free.
class DeviceBuffer {
public:
    DeviceBuffer() = default;
    DeviceBuffer(std::size_t bytes, const char* what);
    ~DeviceBuffer();
    DeviceBuffer(DeviceBuffer&& other) noexcept : data_(std::exchange(other.data_, nullptr)) {}
    DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
        std::swap(data_, other.data_);
        return *this;
    }
    std::uint8_t* data() const { return static_cast<std::uint8_t*>(data_); }

private:
    void* data_ = nullptr;
};

struct DestroyHandle {
    void operator()(cudaStream_t stream) const { cudaStreamDestroy(stream); }
    void operator()(cudaEvent_t event) const { cudaEventDestroy(event); }
};
using StreamHandle = std::unique_ptr<CUstream_st, DestroyHandle>;
using EventHandle = std::unique_ptr<CUevent_st, DestroyHandle>;

/// Of the current device. `flags` as of cudaStreamCreateWithFlags and cudaEventCreateWithFlags.
StreamHandle make_stream(unsigned flags);
EventHandle make_event(unsigned flags);

/// A tensor map of bytes: sizes and box innermost first, strides (bytes, multiples of 16) of all dimensions
/// but the innermost.
enum class Swizzle : std::uint8_t { none, bytes_128 };
CUtensorMap byte_tensor_map(const void* data, std::span<const std::uint64_t> sizes,
                            std::span<const std::uint64_t> strides, std::span<const std::uint32_t> box,
                            Swizzle);
/// The same of a matrix of 16-bit elements, rows 128-byte swizzled.
CUtensorMap row_tensor_map(const void* data, std::uint64_t cols, std::uint64_t rows, std::uint32_t box_cols,
                           std::uint32_t box_rows);

}  // namespace moe4::cuda
