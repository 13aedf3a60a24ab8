// The weighted sum over a token's slots, in the order of the slots, one rounding at the end.
#include "backends/cuda/launch.cuh"
#include "backends/cuda/ptx/dependent_launch.cuh"
#include "backends/cuda/quantize.cuh"
#include "backends/cuda/smxx/arrange.hpp"

namespace moe4::cuda {

namespace {

constexpr int kThreads = 128;
constexpr int kAhead = 8;  // slots whose loads are in flight at once

struct Slots {
    std::int32_t row[kAhead];
    float weight[kAhead];

    __device__ Slots(const CombineTask& task, std::int64_t token, int first) {
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
            const std::int64_t slot = token * task.top_k + first + j;
            row[j] = first + j < task.top_k ? __ldcg(task.slot_row + slot) : -1;
            weight[j] = row[j] >= 0 ? task.top_k_weights[slot] : 0.0F;
        }
    }
};

__device__ void add_slots(const CombineTask& task, const Slots& slots, std::int64_t quad, float4& sum) {
    float4 y[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
        if (slots.row[j] >= 0)
            y[j] = __ldcg(reinterpret_cast<const float4*>(task.y + slots.row[j] * task.cols) + quad);
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
        if (slots.row[j] < 0) continue;
        sum.x = __fmaf_rn(slots.weight[j], y[j].x, sum.x);
        sum.y = __fmaf_rn(slots.weight[j], y[j].y, sum.y);
        sum.z = __fmaf_rn(slots.weight[j], y[j].z, sum.z);
        sum.w = __fmaf_rn(slots.weight[j], y[j].w, sum.w);
    }
}

/// A thread sums four columns of one token.
__global__ void __launch_bounds__(kThreads) combine_kernel(const CombineTask task) {
    const std::int64_t quads = task.cols / 4;
    const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
    const std::int64_t token = i / quads;
    const bool is_inside = token < task.num_tokens;
    // Routing is older than the kernel that this one waits for: its loads are over when y is there.
    const Slots first(task, is_inside ? token : 0, 0);
    ptx::wait_for_previous_kernel();
    ptx::allow_next_kernel();
    if (!is_inside) return;
    float4 sum{0.0F, 0.0F, 0.0F, 0.0F};
    add_slots(task, first, i % quads, sum);
    for (int j = kAhead; j < task.top_k; j += kAhead) add_slots(task, {task, token, j}, i % quads, sum);
    if (task.out_f32 != nullptr) {
        reinterpret_cast<float4*>(task.out_f32)[i] = sum;
    } else {
        reinterpret_cast<uint2*>(task.out_bf16)[i] = {pack_pair<false>(sum.x, sum.y),
                                                      pack_pair<false>(sum.z, sum.w)};
    }
}

}  // namespace

void combine(const CombineTask& task, cudaStream_t stream) {
    const std::int64_t blocks = (task.num_tokens * task.cols / 4 + kThreads - 1) / kThreads;
    launch(combine_kernel, dim3(static_cast<unsigned>(blocks)), kThreads, 0, stream, task);
}

}  // namespace moe4::cuda
