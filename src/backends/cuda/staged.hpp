#pragma once
#include <algorithm>

#include "backends/cuda/runtime.hpp"
#include "moe4/tensor.hpp"

namespace moe4::cuda {

/// A copy on the device of a tensor in host memory.
class Staged {
public:
    explicit Staged(const TensorView& host)
        : bytes_(host.num_bytes()), buffer_(std::max<std::size_t>(bytes_, 1), "a copy of a host tensor") {}

    const void* upload(const TensorView& host) const {
        check(cudaMemcpy(buffer_.data(), host.data, bytes_, cudaMemcpyHostToDevice), "copying to the device");
        return buffer_.data();
    }
    void download(const MutableTensorView& host) const {
        check(cudaMemcpy(host.data, buffer_.data(), bytes_, cudaMemcpyDeviceToHost),
              "copying from the device");
    }
    void* data() const { return buffer_.data(); }

private:
    std::size_t bytes_;
    DeviceBuffer buffer_;
};

}  // namespace moe4::cuda
