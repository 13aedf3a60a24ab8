// The weighted sum over a token's slots, in the order of the slots, one rounding at the end.
#include "backends/cuda/launch.cuh"
#include "backends/cuda/ptx/dependent_launch.cuh"
#include "backends/cuda/quantize.cuh"
#include "backends/cuda/smxx/arrange.hpp"

namespace moe4::cuda {

namespace {

constexpr int kThreads = 128;

/// A thread sums four columns of one token.
__global__ void __launch_bounds__(kThreads) combine_kernel(const CombineTask task) {
    ptx::wait_for_previous_kernel();
    ptx::allow_next_kernel();
    const std::int64_t quads = task.cols / 4;
    for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < task.num_tokens * quads;
         i += std::int64_t{gridDim.x} * kThreads) {
        const std::int64_t token = i / quads;
        float4 sum{0.0F, 0.0F, 0.0F, 0.0F};
#pragma unroll 4
        for (int j = 0; j < task.top_k; ++j) {
            const std::int32_t row = task.slot_row[token * task.top_k + j];
            if (row < 0) continue;
            const float weight = task.top_k_weights[token * task.top_k + j];
            const float4 y = reinterpret_cast<const float4*>(task.y + row * task.cols)[i % quads];
            sum.x = __fmaf_rn(weight, y.x, sum.x);
            sum.y = __fmaf_rn(weight, y.y, sum.y);
            sum.z = __fmaf_rn(weight, y.z, sum.z);
            sum.w = __fmaf_rn(weight, y.w, sum.w);
        }
        if (task.out_f32 != nullptr) {
            reinterpret_cast<float4*>(task.out_f32)[i] = sum;
        } else {
            reinterpret_cast<uint2*>(task.out_bf16)[i] = {pack_pair<false>(sum.x, sum.y),
                                                          pack_pair<false>(sum.z, sum.w)};
        }
    }
}

}  // namespace

void combine(const CombineTask& task, cudaStream_t stream) {
    const std::int64_t blocks = (task.num_tokens * task.cols / 4 + kThreads - 1) / kThreads;
    launch(combine_kernel, dim3(static_cast<unsigned>(blocks < 65536 ? blocks : 65536)), kThreads, 0, stream,
           task);
}

}  // namespace moe4::cuda
