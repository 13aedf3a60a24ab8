#pragma once
// Tensors and inputs on the GPU for tests.
#include <cuda_runtime.h>

#include <vector>

#include "conformance/random_layer.hpp"
#include "moe4/backend.hpp"

namespace moe4::testing {

inline void check_cuda(cudaError_t error) {
    if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

inline bool has_gpu() {
    for (const BackendInfo& backend : backends()) {
        if (backend.name == "cuda") return static_cast<bool>(backend.available);
    }
    return false;
}

class DeviceMemory {
public:
    explicit DeviceMemory(std::size_t bytes) : bytes_(bytes) {
        check_cuda(cudaMalloc(&data_, bytes == 0 ? 1 : bytes));
        poison();
    }
    template <class T>
    explicit DeviceMemory(const std::vector<T>& values) : DeviceMemory(values.size() * sizeof(T)) {
        upload(values);
    }
    ~DeviceMemory() { cudaFree(data_); }
    DeviceMemory(const DeviceMemory&) = delete;
    DeviceMemory& operator=(const DeviceMemory&) = delete;

    /// Over when it returns: the stream of a graph does not wait for cudaMemset's.
    void poison() {
        check_cuda(cudaMemset(data_, 0xFF, bytes_));
        check_cuda(cudaDeviceSynchronize());
    }
    template <class T>
    void upload(const std::vector<T>& values) {
        check_cuda(cudaMemcpy(data_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
    }
    template <class T>
    std::vector<T> download() const {
        std::vector<T> values(bytes_ / sizeof(T));
        check_cuda(cudaMemcpy(values.data(), data_, values.size() * sizeof(T), cudaMemcpyDeviceToHost));
        return values;
    }
    MutableTensorView view(DType dtype, Shape shape) const {
        return {data_, dtype, shape, {DeviceType::cuda, 0}};
    }
    Workspace workspace() const { return {data_, bytes_}; }
    void* data() const { return data_; }

private:
    void* data_ = nullptr;
    std::size_t bytes_;
};

/// An Input and the output and scratch of a run on the GPU.
class DeviceRun {
public:
    DeviceRun(const Layer& layer, const Input& input)
        : layer_(layer),
          num_tokens_(input.num_tokens),
          top_k_(input.top_k),
          hidden_(input.hidden),
          ids_(input.ids),
          weights_(input.weights),
          output_(static_cast<std::size_t>(input.num_tokens * hidden_size()) * 4),
          workspace_(layer.plan().workspace_bytes) {}

    void load(const Input& input) {
        hidden_.upload(input.hidden);
        ids_.upload(input.ids);
        weights_.upload(input.weights);
    }
    void enqueue(cudaStream_t stream) const {
        layer_.run(
            hidden_.view(DType::bf16, {num_tokens_, hidden_size()}),
            {ids_.view(DType::i32, {num_tokens_, top_k_}), weights_.view(DType::f32, {num_tokens_, top_k_})},
            output_.view(DType::f32, {num_tokens_, hidden_size()}), workspace_.workspace(), {stream});
    }
    std::vector<float> run() {
        output_.poison();
        workspace_.poison();
        enqueue(nullptr);
        return output();
    }
    void poison() { output_.poison(); }
    std::vector<float> output() const {
        check_cuda(cudaDeviceSynchronize());
        return output_.download<float>();
    }

private:
    std::int64_t hidden_size() const { return layer_.plan().problem.config.hidden_size; }
    const Layer& layer_;
    std::int64_t num_tokens_;
    int top_k_;
    DeviceMemory hidden_, ids_, weights_, output_, workspace_;
};

}  // namespace moe4::testing
