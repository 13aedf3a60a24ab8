#pragma once
// What the warps of both GEMMs need: rings, items, shared memory, factors. And what happens to the sums of an
// mma tile; Tile has Format and kHalfRows.
#include "backends/cuda/activations.cuh"
#include "backends/cuda/decode.cuh"
#include "backends/cuda/encode.cuh"
#include "backends/cuda/grouped_gemm.hpp"
#include "backends/cuda/ptx/bulk_copy.cuh"
#include "backends/cuda/ptx/dependent_launch.cuh"
#include "backends/cuda/ptx/mbarrier.cuh"

namespace moe4::cuda::sm90 {

/// Which stage of the ring comes next, and the parity of its barrier's phase.
struct RingPosition {
    int stage = 0;
    std::uint32_t parity = 0;
    __device__ void advance(int num_stages) {
        if (++stage < num_stages) return;
        stage = 0;
        parity ^= 1;
    }
};

__device__ inline Segment load_segment(const Segment* at) {
    const int4 bits = __ldcg(reinterpret_cast<const int4*>(at));  // not L1: an earlier layer's may lie there
    return {bits.x, bits.y, bits.z, bits.w};
}

/// Returns when so many of a segment's tiles are finished.
__device__ inline void await_tiles(const std::int32_t* finished, int num_tiles) {
    int now = 0;
    do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(finished) : "memory");
    while (now < num_tiles);
}

__device__ inline std::uint32_t load_shared_word(std::uint32_t address) {
    std::uint32_t word;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
    return word;
}
__device__ inline void load_shared_vector(std::uint32_t (&out)[4], std::uint32_t address) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(address)
                 : "memory");
}
__device__ inline void load_shared_vector(std::uint32_t (&out)[2], std::uint32_t address) {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(out[0]), "=r"(out[1]) : "r"(address) : "memory");
}

__device__ inline uint4 load_shared_vector(std::uint32_t address) {
    std::uint32_t v[4];
    load_shared_vector(v, address);
    return {v[0], v[1], v[2], v[3]};
}

__device__ inline void store_shared_pair(std::uint32_t address, float x, float y) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}

__device__ inline void store_shared_vector(std::uint32_t address, const uint4& v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z),
                 "r"(v.w)
                 : "memory");
}

/// Where a consumer warp's lane stands: the quad's number and the lane in it.
struct Lane {
    int index, g, t;
    __device__ explicit Lane(int lane) : index(lane), g(lane / 4), t(lane % 4) {}
};

/// What an expert's sums are multiplied by, loaded before the sums are made.
template <bool kGateUp>
struct ExpertFactors {
    float factor[2];
    float out_scale, out_reciprocal;  // A2 and 1 / A2, where h is quantised

    __device__ ExpertFactors(const GroupedGemm& gemm, int expert)
        : factor{gemm.factor[0][expert], kGateUp ? gemm.factor[1][expert] : 0.0F},
          out_scale(kGateUp && gemm.out_scale != nullptr ? gemm.out_scale[expert] : 0.0F),
          out_reciprocal(1.0F / out_scale) {}

    /// A * G, in double where A belongs to the row.
    __device__ float of_row(const GroupedGemm& gemm, int which, int expert, int row) const {
        if (gemm.row_scale == nullptr) return factor[which];
        const int at = gemm.scale_row == nullptr ? row : __ldcg(gemm.scale_row + row);
        const double row_scale = __ldcg(gemm.row_scale + at);
        return static_cast<float>(row_scale * gemm.global_scale[which][expert]);
    }
};

/// The blocks that no checkpoint's scales and no ordinary tokens give.
__device__ __noinline__ inline float unusual_value(float x, std::uint32_t largest, float global_scale) {
    return BlockQuantizer(largest, global_scale, 1.0F / global_scale).value(x);
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
