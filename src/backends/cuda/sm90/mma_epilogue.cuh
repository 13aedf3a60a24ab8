#pragma once
// What happens to the sums of an mma tile; Tile has Format and kHalfRows.
#include "backends/cuda/activations.cuh"
#include "backends/cuda/encode.cuh"
#include "backends/cuda/sm90/pipeline.cuh"

namespace moe4::cuda::sm90 {

/// The blocks that no checkpoint's scales and no ordinary tokens give.
__device__ __noinline__ inline float unusual_value(float x, std::uint32_t largest, float global_scale) {
    return BlockQuantizer::of_any(largest, global_scale, 1.0F / global_scale).value(x);
}

/// h of two tokens (columns 2t and 2t + 1) and 16 indices of one block -> quantised in place.
__device__ inline void quantize_h(float (&h)[2][2], float global_scale, float reciprocal) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        std::uint32_t largest = max(magnitude_bits(h[0][j]), magnitude_bits(h[1][j]));
#pragma unroll
        for (int step = 4; step < 32; step *= 2)
            largest = max(largest, __shfl_xor_sync(0xFFFFFFFFU, largest, step));
        const BlockQuantizer quantizer = BlockQuantizer::of_usual(largest, global_scale, reciprocal);
        if (__all_sync(0xFFFFFFFFU, quantizer.is_usual(largest, global_scale))) {
            h[0][j] = quantizer.usual_value(h[0][j]);
            h[1][j] = quantizer.usual_value(h[1][j]);
        } else {
            h[0][j] = unusual_value(h[0][j], largest, global_scale);
            h[1][j] = unusual_value(h[1][j], largest, global_scale);
        }
    }
}

/// Stores eight indices (one a quad) of two tokens, `place` being where index lane.g % 4 of them lies. Quads
/// g and g + 4 hold values that lie next to each other in a permuted row: they swap one, and each stores a
/// pair.
template <bool kF16>
__device__ void store_h(const GroupedGemm& gemm, const Segment& segment, int place, int token,
                        const float (&h)[2], const Lane& lane, bool is_inside) {
    const bool is_low = lane.g < 4;
    const float other = __shfl_xor_sync(0xFFFFFFFFU, is_low ? h[1] : h[0], 16);
    const int mine = token + (is_low ? 0 : 1);
    const std::uint32_t pair = is_low ? pack_pair<kF16>(h[0], other) : pack_pair<kF16>(other, h[1]);
    if (mine >= segment.num_rows || !is_inside) return;
    auto* row = static_cast<std::uint16_t*>(gemm.out) + (segment.first_row + mine) * gemm.out_stride;
    *reinterpret_cast<std::uint32_t*>(row + place) = pair;
}

/// `first` is a multiple of 16.
template <class Tile, int kTiles>
__device__ __forceinline__ void store_gate_up(const GroupedGemm& gemm, const Segment& segment, int first,
                                              const ExpertFactors<true>& factors,
                                              const float (&sums)[2][kTiles][4], const Lane& lane) {
    constexpr float kUndo = Tile::Format::kUndo;
    const int place = permuted_position(first) + permuted_position(lane.g % 4);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
        if (n * 8 >= segment.num_rows) break;
        const int token = n * 8 + 2 * lane.t;
        float h[2][2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int row = segment.first_row + min(token + j, segment.num_rows - 1);
            const float gate = factors.of_row(gemm, 0, segment.expert, row);
            const float up = factors.of_row(gemm, 1, segment.expert, row);
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                const float value =
                    activate(gemm.activation, sums[m][n][j] * kUndo * gate, sums[m][n][2 + j] * kUndo * up);
                h[m][j] = __bfloat162float(__float2bfloat16_rn(value));
            }
        }
        const bool quantizes = Tile::Format::kF16 && gemm.out_scale != nullptr;
        if (quantizes) quantize_h(h, factors.out_scale, factors.out_reciprocal);
#pragma unroll
        for (int m = 0; m < 2; ++m) {  // eight indices further is the next word: 32 places
            const bool is_inside = first + m * 8 < gemm.out_size;
            if (quantizes)
                store_h<true>(gemm, segment, place + m * 32, token, h[m], lane, is_inside);
            else
                store_h<false>(gemm, segment, place + m * 32, token, h[m], lane, is_inside);
        }
    }
}

template <class Tile, int kTiles>
__device__ __forceinline__ void store_down(const GroupedGemm& gemm, const Segment& segment, int first,
                                           const ExpertFactors<false>& factors,
                                           const float (&sums)[2][kTiles][4], const Lane& lane) {
    constexpr float kUndo = Tile::Format::kUndo;
    const int i = first + lane.g;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
        if (n * 8 >= segment.num_rows) break;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int token = n * 8 + 2 * lane.t + j;
            if (token >= segment.num_rows) continue;
            const int row = segment.first_row + token;
            const float factor = factors.of_row(gemm, 0, segment.expert, row);
            float* out = static_cast<float*>(gemm.out) + row * gemm.out_stride + i;
#pragma unroll
            for (int m = 0; m < 2; ++m) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int offset = half * Tile::kHalfRows + m * 8;
                    if (i + offset < gemm.out_size) out[offset] = sums[m][n][2 * half + j] * kUndo * factor;
                }
            }
        }
    }
}

}  // namespace moe4::cuda::sm90
