#pragma once
// What mma_gemm does besides where there are few tokens: each block groups their slots and encodes them for
// itself, while its first weights are on their way. What other blocks did would be known 2 us later.
#include "backends/cuda/sm90/mma_shape.hpp"
#include "backends/cuda/sm90/pipeline.cuh"
#include "backends/cuda/smxx/encode_token.cuh"
#include "backends/cuda/smxx/warp_grouping.cuh"

namespace moe4::cuda::sm90 {

/// By a warp. Returns how many segments there are.
__device__ inline int group_slots(const GroupTask& task, Segment* segments, FewTokens& few, int lane) {
    const WarpGrouping grouping(task, lane);
    if (grouping.leads)
        segments[grouping.segment] = {grouping.expert, grouping.first_row, grouping.num_rows, 0};
    if (grouping.is_row) few.row_token[grouping.row] = static_cast<std::uint8_t>(lane / task.top_k);
    return grouping.num_segments;
}

/// By kThreads threads: x of all tokens, `pitch` elements apart.
template <bool kQuantizes, int kThreads>
__device__ void encode_tokens(const EncodeTask& task, std::uint16_t* x, int pitch) {
    const float scale = kQuantizes ? task.expert_scale[0] : 1.0F;
    const int blocks_of_token = static_cast<int>(permuted_size(task.cols) / 16);
    const int num_blocks = static_cast<int>(task.num_tokens) * blocks_of_token;
    const auto load = [&](int i) {
        if (i >= num_blocks) return Bf16Block{};
        return load_block(task, i / blocks_of_token, BlockPlace(i % blocks_of_token));
    };
    Bf16Block next = load(static_cast<int>(threadIdx.x));
    for (int i = static_cast<int>(threadIdx.x); i < num_blocks; i += kThreads) {
        const Bf16Block block = next;
        next = load(i + kThreads);  // behind the first weights it would wait long
        store_block(x + i / blocks_of_token * pitch, BlockPlace(i % blocks_of_token),
                    encode<kQuantizes>(block, scale));
    }
}

/// By a warp: what lies behind the last index in a segment's rows of h.
__device__ inline void zero_padding(const GroupedGemm& gate_up, const Segment& segment, int lane) {
    for (int row = 0; row < segment.num_rows; ++row) {
        auto* h = static_cast<std::uint16_t*>(gate_up.out) + (segment.first_row + row) * gate_up.out_stride;
        for (int k = gate_up.out_size + lane; k < gate_up.out_stride; k += 32) h[permuted_position(k)] = 0;
    }
}

}  // namespace moe4::cuda::sm90
