// The weighted sum over a token's slots, in the order of the slots, one rounding at the end.
#include "backends/cuda/smxx/finalize.hpp"

#include <algorithm>

#include "backends/cuda/launch.hpp"
#include "backends/cuda/ptx/dependent_launch.cuh"
#include "backends/cuda/quantize.cuh"
#include "backends/cuda/smxx/warp_grouping.cuh"

namespace moe4::cuda {

namespace {

constexpr int kThreads = 128;
constexpr int kAhead = 8;              // loads of a thread that are in flight at once
constexpr int kMostBlocks = 132 * 16;  // more than run at once gain nothing: a thread takes more columns

/// From where a kernel before this one has put it, or this block.
__device__ std::int32_t load_slot_row(const CombineTask& task, std::int64_t slot) {
    return __isShared(task.slot_row) ? task.slot_row[slot] : __ldcg(task.slot_row + slot);
}

template <int kSlots>
struct Slots {
    std::int32_t row[kSlots];
    float weight[kSlots];

    __device__ Slots(const CombineTask& task, std::int64_t token, int first) {
#pragma unroll
        for (int j = 0; j < kSlots; ++j) {
            const std::int64_t slot = token * task.top_k + first + j;
            row[j] = first + j < task.top_k ? load_slot_row(task, slot) : -1;
            weight[j] = row[j] >= 0 ? __ldcg(task.top_k_weights + slot) : 0.0F;
        }
    }
};

template <int kSlots, int kQuads>
__device__ void add_slots(const CombineTask& task, const Slots<kSlots>& slots, const int (&quads)[kQuads],
                          float4 (&sums)[kQuads]) {
    float4 y[kQuads][kSlots];
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
#pragma unroll
        for (int j = 0; j < kSlots; ++j) {
            if (slots.row[j] >= 0 && quads[q] < task.cols / 4)
                y[q][j] =
                    __ldcg(reinterpret_cast<const float4*>(task.y + slots.row[j] * task.cols) + quads[q]);
        }
    }
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
        float4& sum = sums[q];
#pragma unroll
        for (int j = 0; j < kSlots; ++j) {
            if (slots.row[j] < 0) continue;
            sum.x = __fmaf_rn(slots.weight[j], y[q][j].x, sum.x);
            sum.y = __fmaf_rn(slots.weight[j], y[q][j].y, sum.y);
            sum.z = __fmaf_rn(slots.weight[j], y[q][j].z, sum.z);
            sum.w = __fmaf_rn(slots.weight[j], y[q][j].w, sum.w);
        }
    }
}

__device__ void store(const CombineTask& task, std::int64_t at, const float4& sum) {
    if (task.out_f32 != nullptr) {
        reinterpret_cast<float4*>(task.out_f32)[at] = sum;
    } else {
        reinterpret_cast<uint2*>(task.out_bf16)[at] = {pack_pair<false>(sum.x, sum.y),
                                                       pack_pair<false>(sum.z, sum.w)};
    }
}

/// Block (token, part of its columns); a thread sums kQuads times four columns at once, over kSlots slots.
template <int kSlots, bool kGroups>
__global__ void __launch_bounds__(kThreads) combine_kernel(CombineTask task, const GroupTask group) {
    if constexpr (kGroups) {  // every warp the same
        __shared__ std::int32_t slot_row[kWarpSlots];
        const int lane = static_cast<int>(threadIdx.x) % 32;
        slot_row[lane] = WarpGrouping(group, lane).row;
        __syncthreads();
        task.slot_row = slot_row;
    }
    constexpr int kQuads = kAhead / kSlots;
    const std::int64_t token = blockIdx.x;
    const int num_quads = static_cast<int>(task.cols / 4);
    const int step = static_cast<int>(gridDim.y) * kThreads;
    // Routing is older than the kernel that this one waits for: its loads are over when y is there.
    const Slots<kSlots> first_slots(task, token, 0);
    ptx::wait_for_previous_kernel();
    ptx::allow_next_kernel();
    if constexpr (kGroups) {
        if (blockIdx.x == 0 && blockIdx.y == 0) {
            for (std::int64_t i = threadIdx.x; i < group.num_cleared; i += kThreads) group.cleared[i] = 0;
        }
    }
    for (int first = static_cast<int>(blockIdx.y * kThreads + threadIdx.x); first < num_quads;
         first += step * kQuads) {
        int quads[kQuads];
        float4 sums[kQuads] = {};
#pragma unroll
        for (int q = 0; q < kQuads; ++q) quads[q] = first + q * step;
        add_slots(task, first_slots, quads, sums);
        for (int j = kSlots; j < task.top_k; j += kSlots)
            add_slots(task, Slots<kSlots>(task, token, j), quads, sums);
#pragma unroll
        for (int q = 0; q < kQuads; ++q) {
            if (quads[q] < num_quads) store(task, token * num_quads + quads[q], sums[q]);
        }
    }
}

template <bool kGroups>
void launch_combine(const CombineTask& task, const GroupTask& group, cudaStream_t stream) {
    const std::int64_t most_parts = (task.cols / 4 + kThreads - 1) / kThreads;
    const std::int64_t parts = std::clamp<std::int64_t>(kMostBlocks / task.num_tokens, 1, most_parts);
    const dim3 grid(static_cast<unsigned>(task.num_tokens), static_cast<unsigned>(parts));
    const auto kernel = task.top_k <= 2   ? combine_kernel<2, kGroups>
                        : task.top_k <= 4 ? combine_kernel<4, kGroups>
                                          : combine_kernel<8, kGroups>;
    launch(kernel, grid, kThreads, 0, stream, task, group);
}

}  // namespace

void combine(const CombineTask& task, cudaStream_t stream) { launch_combine<false>(task, {}, stream); }

void combine_few_tokens(const CombineTask& task, const GroupTask& group, cudaStream_t stream) {
    launch_combine<true>(task, group, stream);
}

void load_combine() {
    cudaFuncAttributes attributes{};
    for (const auto kernel : {combine_kernel<2, false>, combine_kernel<4, false>, combine_kernel<8, false>,
                              combine_kernel<2, true>, combine_kernel<4, true>, combine_kernel<8, true>})
        check(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)), "loading kernels");
}

}  // namespace moe4::cuda
