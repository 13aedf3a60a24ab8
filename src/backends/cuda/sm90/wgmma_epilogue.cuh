#pragma once
// What happens to the sums of a wgmma tile.
//
// down: a lane's rows lie next to each other, so a token's sums leave as one vector. gate_up: the 16 values
// of h that share a quantisation block are spread over a warp; they pass through shared memory, from where
// each thread takes a whole block and encodes it as x was encoded (encode.cuh).
#include <utility>

#include "backends/cuda/activations.cuh"
#include "backends/cuda/encode.cuh"
#include "backends/cuda/ptx/wgmma.cuh"
#include "backends/cuda/sm90/pipeline.cuh"
#include "backends/cuda/sm90/wgmma_shape.hpp"

namespace moe4::cuda::sm90 {

/// Where a warp that multiplies stands.
struct Consumer {
    int warpgroup, warp;  // of the block, of the warpgroup
    Lane lane;
    __device__ explicit Consumer(int thread)
        : warpgroup(thread / 128), warp(thread / 32 % 4), lane(thread % 32) {}
};

/// An item in shared memory, and what its sums are multiplied by: A G of gate and of up, or {of down, 0},
/// with the decoder's power of two.
struct TilePlan {
    std::uint32_t address;  // the item, A2 and 1 / A2; behind that, at 32, the factors of each token

    /// Before anybody is told of the item.
    __device__ void post(const Item& item) const {
        const auto bits = [](auto x) { return static_cast<std::uint32_t>(x); };
        store_shared_vector(address, {bits(item.segment.expert), bits(item.segment.first_row),
                                      bits(item.segment.num_rows), bits(item.segment_index)});
        store_shared_vector(address + 16, {bits(item.tile), bits(item.half), 0, 0});
    }
    __device__ Item item() const {
        const uint4 a = load_shared_vector(address);
        const auto at = [](std::uint32_t x) { return static_cast<std::int32_t>(x); };
        return {{at(a.x), at(a.y), at(a.z), 0}, at(a.w), tile(), half()};
    }
    __device__ int first_row() const { return static_cast<int>(load_shared_word(address + 4)); }
    __device__ int num_rows() const { return static_cast<int>(load_shared_word(address + 8)); }
    __device__ int tile() const { return static_cast<int>(load_shared_word(address + 16)); }
    __device__ Half half() const { return static_cast<Half>(load_shared_word(address + 20)); }
    __device__ float out_scale() const { return __uint_as_float(load_shared_word(address + 24)); }
    __device__ float out_reciprocal() const { return __uint_as_float(load_shared_word(address + 28)); }
    /// Of tokens n * 8 + 2t and the next.
    __device__ float4 factors(int n, const Lane& lane) const {
        const uint4 bits = load_shared_vector(address + 32 + (n * 8 + 2 * lane.t) * 8);
        return {__uint_as_float(bits.x), __uint_as_float(bits.y), __uint_as_float(bits.z),
                __uint_as_float(bits.w)};
    }

    /// By a warp.
    template <bool kGateUp, class Format>
    __device__ void write_factors(const GroupedGemm& gemm, const Segment& segment, int lane) const {
        const ExpertFactors<kGateUp> factors(gemm, segment.expert);
        for (int token = lane; token < segment.num_rows; token += 32) {
            const int row = segment.first_row + token;
            const float first = factors.of_row(gemm, 0, segment.expert, row) * Format::kUndo;
            const float second =
                kGateUp ? factors.of_row(gemm, 1, segment.expert, row) * Format::kUndo : 0.0F;
            store_shared_pair(address + 32 + token * 8, first, second);
        }
        if (lane == 0) store_shared_pair(address + 24, factors.out_scale, factors.out_reciprocal);
    }
};

/// visit(n, factors) for every tile of eight tokens, four at a time: their factors are loaded together.
template <class Tile, class Visit>
__device__ __forceinline__ void for_each_token_tile(const TilePlan& plan, int num_rows, const Lane& lane,
                                                    const Visit& visit) {
    constexpr int kAhead = 4;
    static_assert(Tile::kTokenTiles % kAhead == 0);
#pragma unroll
    for (int first = 0; first < Tile::kTokenTiles; first += kAhead) {
        if (first * 8 >= num_rows) break;
        float4 factors[kAhead];
#pragma unroll
        for (int n = 0; n < kAhead; ++n) factors[n] = plan.factors(first + n, lane);
#pragma unroll
        for (int n = 0; n < kAhead; ++n) visit(first + n, factors[n]);
    }
}

template <class Tile>
__device__ __forceinline__ void store_down(const GroupedGemm& gemm, const TilePlan& plan, int num_rows,
                                           const typename Tile::Sums& sums, const Consumer& me) {
    constexpr int kRows = 2 * Tile::kMTiles;  // of a lane
    const int first = plan.tile() * Tile::kRows + Tile::lane_group(me) * kRows;
    if (first >= gemm.out_size) return;
    float* const out =
        static_cast<float*>(gemm.out) + (plan.first_row() + 2 * me.lane.t) * gemm.out_stride + first;
    for_each_token_tile<Tile>(plan, num_rows, me.lane, [&](int n, const float4& of_tokens) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const bool is_token = n * 8 + 2 * me.lane.t + j < num_rows;
            const float factor = j == 0 ? of_tokens.x : of_tokens.z;
            float* const to = out + (n * 8 + j) * gemm.out_stride;
            const float2 low{sums[0][n][j] * factor, sums[0][n][2 + j] * factor};
            if constexpr (Tile::kMTiles == 2) {
                const float2 high{sums[1][n][j] * factor, sums[1][n][2 + j] * factor};
                if (is_token) __stcg(reinterpret_cast<float4*>(to), {low.x, low.y, high.x, high.y});
            } else {
                if (is_token) __stcg(reinterpret_cast<float2*>(to), low);
            }
        }
    });
}

/// Leaves h as bf16 in the place of the sums: sums[m][n][0] holds tokens n * 8 + 2t and the next of row g.
template <class Tile>
__device__ __forceinline__ void activate_sums(const GroupedGemm& gemm, const TilePlan& plan, int num_rows,
                                              typename Tile::Sums& sums, const Lane& lane) {
    with_activation(gemm.activation, [&](const auto& activation) {
        for_each_token_tile<Tile>(plan, num_rows, lane, [&](int n, const float4& f) {
#pragma unroll
            for (int m = 0; m < Tile::kMTiles; ++m) {
                float(&s)[4] = sums[m][n];
                const float h0 = activation(s[0] * f.x, s[2] * f.y);
                const float h1 = activation(s[1] * f.z, s[3] * f.w);
                s[0] = __uint_as_float(pack_pair<false>(h0, h1));
            }
        });
    });
}

/// Warpgroups that pass things on to each other: those that share quantisation blocks of h.
template <class Tile>
struct Exchange {
    static constexpr WgmmaShape kShape = Tile::kShape;
    int group, thread, warp;
    std::uint32_t buffers;

    __device__ Exchange(std::uint32_t exchange, const Consumer& me)
        : group(me.warpgroup * kShape.m_tiles / 2),
          thread((me.warpgroup * 128 + me.warp * 32 + me.lane.index) % kShape.exchange_threads()),
          warp(thread / 32),
          buffers(exchange + group * kShape.exchange_bytes()) {}

    __device__ void meet() const {
        asm volatile("bar.sync %0, %1;" ::"r"(1 + group), "r"(kShape.exchange_threads()) : "memory");
    }
};

/// Tokens first..first + exchange_tokens() to shared memory: [token][quad lane][16], in 16-byte pieces
/// swizzled by the token. Four 8x8 matrices at a time, two of m by two of n, or one by four.
template <class Tile, int first_tile>
__device__ __forceinline__ void store_part(std::uint32_t buffer, const typename Tile::Sums& h,
                                           const Consumer& me) {
    constexpr int kTokenMatrices = 4 / Tile::kMTiles;
    const int matrix = me.lane.index / 8;
    const int row = me.lane.index % 8;
    const int half = Tile::kMTiles == 2 ? matrix % 2 : me.warpgroup % 2;
    const std::uint32_t at =
        buffer + (matrix / Tile::kMTiles * 8 + row) * 128 + (((2 * me.warp + half) ^ row) << 4);
#pragma unroll
    for (int n = 0; n < Tile::kPartTiles; n += kTokenMatrices) {
        if (first_tile + n >= Tile::kTokenTiles) break;
        std::uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            words[i] = __float_as_uint(h[i % Tile::kMTiles][first_tile + n + i / Tile::kMTiles][0]);
        ptx::store_matrix_x4_transposed(at + n * 8 * 128, words);
    }
}

/// Registers have no index: one of the copies of store_part runs.
template <class Tile, int... parts>
__device__ __forceinline__ void store_part(std::uint32_t buffer, const typename Tile::Sums& h, int part,
                                           const Consumer& me, std::integer_sequence<int, parts...>) {
    ((part == parts ? store_part<Tile, parts * Tile::kPartTiles>(buffer, h, me) : void()), ...);
}

/// Encodes kCount parts from `part` on, which lie in the two buffers, and stores them. The rows of a warp's
/// tokens are its own, so pairs of fp16 go through them once more, to the order of k_order.hpp; with bf16
/// that costs more than shuffles, for want of registers.
template <class Tile, int kCount>
__device__ __forceinline__ void encode_parts(const GroupedGemm& gemm, const TilePlan& plan, int num_rows,
                                             const Exchange<Tile>& exchange, int part) {
    constexpr WgmmaShape kShape = Tile::kShape;
    const int thread = exchange.thread;
    const int quad = thread % 4;
    const int row = thread / 4 % 8;  // of the warp's
    const int warp_token = exchange.warp * 8;
    const int first_index = Tile::first_index(plan.tile()) + exchange.group * 16;
    const auto piece = [&](int i, int its_row, int its_quad, int word) {
        return exchange.buffers + i * kShape.part_bytes() + (warp_token + its_row) * 128 +
               ((2 * its_quad + word ^ its_row) << 4);
    };
    const auto last_row = [&](int i) {
        return num_rows - 1 - (part + i) * kShape.exchange_tokens() - warp_token;
    };
    Bf16Block blocks[kCount];
    BlockPairs encoded[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        // Behind the last token it again, or ones: what lies there may not be usual, and takes the slow path.
        const bool has_tokens = last_row(i) >= 0;
        const std::uint32_t fill = has_tokens ? 0 : 0x3F80'3F80;
        const uint4 fills{fill, fill, fill, fill};
        blocks[i] = Bf16Block(fills, fills);
        if (has_tokens && first_index + 64 * quad < gemm.out_size) {
            const int its_row = min(row, last_row(i));
            blocks[i] = Bf16Block(load_shared_vector(piece(i, its_row, quad, 0)),
                                  load_shared_vector(piece(i, its_row, quad, 1)));
        }
    }
    if (Tile::Format::kF16 && gemm.out_scale != nullptr)
        encode_blocks<true>(blocks, plan.out_scale(), plan.out_reciprocal(), encoded);
    else
        encode_blocks<false>(blocks, 1.0F, 1.0F, encoded);
    if constexpr (Tile::Format::kF16) {
        __syncwarp();
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
#pragma unroll
            for (int word = 0; word < 2; ++word)
                ptx::store_matrix_x4(piece(i, thread % 8, thread / 8 % 4, word), encoded[i][word]);
        }
        __syncwarp();
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        const int token = (part + i) * kShape.exchange_tokens() + warp_token + row;
        auto* to = static_cast<std::uint16_t*>(gemm.out) + (plan.first_row() + token) * gemm.out_stride;
        PermutedBlock block;
        if constexpr (Tile::Format::kF16)
            block = {
                {load_shared_vector(piece(i, row, quad, 0)), load_shared_vector(piece(i, row, quad, 1))}};
        else
            block = permute_block(encoded[i]);
        if (row <= last_row(i))
            store_block(to, BlockPlace(first_index / kChunk, quad, first_index % 64 / 16), block);
    }
}

template <class Tile>
__device__ __forceinline__ void store_gate_up(const GroupedGemm& gemm, const TilePlan& plan, int num_rows,
                                              typename Tile::Sums& sums, std::uint32_t exchange,
                                              const Consumer& me) {
    constexpr WgmmaShape kShape = Tile::kShape;
    constexpr int kBlocks = kShape.exchange_parts();
    constexpr auto kAllParts = std::make_integer_sequence<int, Tile::kParts>{};
    activate_sums<Tile>(gemm, plan, num_rows, sums, me.lane);
    const Exchange<Tile> group(exchange, me);
    const int num_parts = (num_rows + kShape.exchange_tokens() - 1) / kShape.exchange_tokens();
#pragma unroll 1
    for (int part = 0; part < num_parts; part += kBlocks) {
        group.meet();  // the buffers have been read
#pragma unroll
        for (int i = 0; i < kBlocks; ++i)
            store_part<Tile>(group.buffers + i * kShape.part_bytes(), sums, part + i, me, kAllParts);
        group.meet();
        if (part + kBlocks <= num_parts)
            encode_parts<Tile, kBlocks>(gemm, plan, num_rows, group, part);
        else
            encode_parts<Tile, 1>(gemm, plan, num_rows, group, part);
    }
}

}  // namespace moe4::cuda::sm90
