#pragma once
// Activations as the GEMMs read them: sixteen values at a time, quantised or not, as 16-bit numbers in the
// order of k_order.hpp.
#include "backends/cuda/k_order.hpp"
#include "backends/cuda/quantize.cuh"

namespace moe4::cuda {

/// Sixteen values of a row, k = 256 chunk + 64 quad + 16 block onwards.
struct BlockPlace {
    std::int64_t chunk;
    int quad, block;
    __device__ explicit BlockPlace(std::int64_t index)
        : chunk(index / 16), quad(static_cast<int>(index) % 4), block(static_cast<int>(index) / 4 % 4) {}
    __device__ BlockPlace(std::int64_t chunk_, int quad_, int block_)
        : chunk(chunk_), quad(quad_), block(block_) {}
    __device__ std::int64_t first_k() const { return chunk * kChunk + quad * 64 + block * 16; }
    /// Where the pair (n, n + 4) of word 0 or 1 of the block lies in a permuted row, in pairs.
    __device__ std::int64_t pair(int word, int n) const {
        return (chunk * kChunk + (block * 2 + word) * 32 + n / 2 * 16 + n % 2 * 8 + quad * 2) / 2;
    }
};

/// Sixteen values of a row: pairs[word][n] is (n, n + 4) of a word's eight.
using BlockPairs = std::uint32_t[2][4];

__device__ inline std::uint32_t largest_magnitude(const BlockPairs& block) {
    std::uint32_t largest = 0;  // of the low and the high values
#pragma unroll
    for (int i = 0; i < 8; ++i) largest = __vmaxu2(largest, magnitudes_of_pair(block[i / 4][i % 4]));
    return max(largest << 16, largest & 0xFFFF0000U);
}

/// bf16 to fp16, in place. Several blocks at once: their chains of dependent operations overlap.
template <int kBlocks>
__device__ inline void quantize_blocks(BlockPairs (&blocks)[kBlocks], float global_scale, float reciprocal) {
    BlockPairs quantized[kBlocks];
    std::uint32_t largest[kBlocks];
    bool is_usual[kBlocks];
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
        largest[b] = largest_magnitude(blocks[b]);
        const BlockQuantizer quantizer = BlockQuantizer::of_usual(largest[b], global_scale, reciprocal);
        is_usual[b] = quantizer.is_usual(largest[b], global_scale);
#pragma unroll
        for (int i = 0; i < 8; ++i)
            quantized[b][i / 4][i % 4] = quantizer.usual_pair(blocks[b][i / 4][i % 4]);
    }
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
        if (!is_usual[b]) {  // what no checkpoint's scales and no ordinary tokens give: one copy of the code
            const BlockQuantizer careful = BlockQuantizer::of_any(largest[b], global_scale, reciprocal);
            std::uint32_t pairs[8];  // these alone have an index that is not known: they alone go to memory
#pragma unroll
            for (int i = 0; i < 8; ++i) pairs[i] = blocks[b][i / 4][i % 4];
#pragma unroll 1
            for (int i = 0; i < 8; ++i) pairs[i] = careful.pair(pairs[i]);
#pragma unroll
            for (int i = 0; i < 8; ++i) quantized[b][i / 4][i % 4] = pairs[i];
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) blocks[b][i / 4][i % 4] = quantized[b][i / 4][i % 4];
    }
}

/// Lane t of a quad has the pairs of its own k, and leaves with pair t of all four lanes: those lie side by
/// side.
__device__ inline void transpose_in_quad(std::uint32_t (&pairs)[4]) {
    const unsigned lane = threadIdx.x % 32;
    const unsigned quad = 0xFU << (lane & ~3U);
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
        const bool is_upper = (lane & static_cast<unsigned>(step)) != 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if ((i & step) != 0) continue;
            const std::uint32_t sent = is_upper ? pairs[i] : pairs[i + step];
            const std::uint32_t received = __shfl_xor_sync(quad, sent, step);
            (is_upper ? pairs[i] : pairs[i + step]) = received;
        }
    }
}

/// A lane's share of a quad's blocks: eight values that lie side by side, of word 0 and of word 1.
struct PermutedBlock {
    uint4 words[2];
};

/// By whole quads.
__device__ inline PermutedBlock permute_block(BlockPairs& pairs) {
    PermutedBlock block;
#pragma unroll
    for (int word = 0; word < 2; ++word) {
        transpose_in_quad(pairs[word]);
        block.words[word] = make_uint4(pairs[word][0], pairs[word][1], pairs[word][2], pairs[word][3]);
    }
    return block;
}

/// Sixteen bf16 as they lie in memory.
struct Bf16Block {
    std::uint32_t words[8];

    Bf16Block() = default;
    __device__ Bf16Block(const uint4& a, const uint4& b) : words{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w} {}

    __device__ void to_pairs(BlockPairs& pairs) const {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int first = i / 4 * 4 + i % 4 / 2;
            pairs[i / 4][i % 4] = __byte_perm(words[first], words[first + 2], i % 2 == 0 ? 0x5410 : 0x7632);
        }
    }
};

/// Quantised to fp16 with the global scale, or left as they are; `reciprocal` is 1 / global_scale.
template <bool kQuantizes, int kBlocks>
__device__ inline void encode_blocks(const Bf16Block (&blocks)[kBlocks], float global_scale, float reciprocal,
                                     BlockPairs (&encoded)[kBlocks]) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) blocks[b].to_pairs(encoded[b]);
    if constexpr (kQuantizes) quantize_blocks(encoded, global_scale, reciprocal);
}

__device__ inline void store_block(std::uint16_t* row, const BlockPlace& place, const PermutedBlock& block) {
    const int n = place.quad;  // 8 (n % 2) + 16 (n / 2) is where its eight values begin
    std::uint16_t* const to = row + place.chunk * kChunk + place.block * 64 + n % 2 * 8 + n / 2 * 16;
    *reinterpret_cast<uint4*>(to) = block.words[0];
    *reinterpret_cast<uint4*>(to + 32) = block.words[1];
}

}  // namespace moe4::cuda
