#include "backends/cuda/runtime.hpp"

#include <array>
#include <string>

#include "moe4/error.hpp"

namespace moe4::cuda {

namespace {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

/// From the driver that is there: linking libcuda would keep the library from loading without one.
EncodeTiled encode_tiled() {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result{};
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault,
                                           &result),
          "asking the driver for tensor maps");
    if (function == nullptr)
        throw Error(ErrorKind::machine,
                    "the CUDA driver knows no tensor maps, expected version 12.0 or later");
    return reinterpret_cast<EncodeTiled>(function);
}

CUtensorMap encode(CUtensorMapDataType type, const void* data, std::span<const std::uint64_t> sizes,
                   std::span<const std::uint64_t> strides, std::span<const std::uint32_t> box,
                   Swizzle swizzle) {
    static const EncodeTiled kEncodeMap = encode_tiled();
    CUtensorMap map{};
    const std::array<cuuint32_t, 5> steps{1, 1, 1, 1, 1};
    const CUresult result =
        kEncodeMap(&map, type, static_cast<cuuint32_t>(sizes.size()), const_cast<void*>(data), sizes.data(),
                   strides.data(), box.data(), steps.data(), CU_TENSOR_MAP_INTERLEAVE_NONE,
                   swizzle == Swizzle::bytes_128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
                   CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS) {
        throw Error(ErrorKind::machine,
                    "the CUDA driver refused a tensor map (error " + std::to_string(result) + ")");
    }
    return map;
}

}  // namespace

void check(cudaError_t error, const char* doing) {
    if (error == cudaSuccess) return;
    throw Error(ErrorKind::machine, std::string(doing) + ": " + cudaGetErrorString(error));
}

DeviceScope::DeviceScope(int device) {
    check(cudaGetDevice(&previous_), "asking for the current device");
    is_other_ = device != previous_;
    if (is_other_) check(cudaSetDevice(device), "choosing the device");
}

DeviceScope::~DeviceScope() {
    if (is_other_) cudaSetDevice(previous_);  // on a device that nobody uses it would make a context
}

StreamHandle make_stream(unsigned flags) {
    cudaStream_t stream = nullptr;
    check(cudaStreamCreateWithFlags(&stream, flags), "creating a stream");
    return StreamHandle(stream);
}

EventHandle make_event(unsigned flags) {
    cudaEvent_t event = nullptr;
    check(cudaEventCreateWithFlags(&event, flags), "creating an event");
    return EventHandle(event);
}

DeviceBuffer::DeviceBuffer(std::size_t bytes, const char* what) {
    const cudaError_t error = cudaMalloc(&data_, bytes);
    if (error == cudaErrorMemoryAllocation) {
        cudaGetLastError();  // it is not sticky, and must not be the next call's
        std::size_t free_bytes = 0;
        std::size_t total_bytes = 0;
        check(cudaMemGetInfo(&free_bytes, &total_bytes), "asking for the free memory of the device");
        throw Error(ErrorKind::machine, "no device memory for " + std::string(what) + ": " +
                                            std::to_string(bytes) + " bytes are needed, " +
                                            std::to_string(free_bytes) + " of " +
                                            std::to_string(total_bytes) + " are free");
    }
    check(error, "allocating device memory");
}

DeviceBuffer::~DeviceBuffer() { cudaFree(data_); }

CUtensorMap byte_tensor_map(const void* data, std::span<const std::uint64_t> sizes,
                            std::span<const std::uint64_t> strides, std::span<const std::uint32_t> box,
                            Swizzle swizzle) {
    return encode(CU_TENSOR_MAP_DATA_TYPE_UINT8, data, sizes, strides, box, swizzle);
}

CUtensorMap row_tensor_map(const void* data, std::uint64_t cols, std::uint64_t rows, std::uint32_t box_cols,
                           std::uint32_t box_rows) {
    const std::array sizes{cols, rows};
    const std::array strides{cols * 2};
    const std::array box{box_cols, box_rows};
    return encode(CU_TENSOR_MAP_DATA_TYPE_UINT16, data, sizes, strides, box, Swizzle::bytes_128);
}

}  // namespace moe4::cuda
