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

/// Several blocks at once: their chains of dependent operations overlap.
template <int kBlocks>
__device__ inline void quantize_blocks(float (&x)[kBlocks][16], const std::uint32_t (&largest)[kBlocks],
                                       float global_scale, float reciprocal) {
    float quantized[kBlocks][16];
    bool is_usual[kBlocks];
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
        const BlockQuantizer quantizer = BlockQuantizer::of_usual(largest[b], global_scale, reciprocal);
        is_usual[b] = quantizer.is_usual(largest[b], global_scale);
#pragma unroll
        for (int i = 0; i < 16; ++i) quantized[b][i] = quantizer.usual_value(x[b][i]);
    }
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
        if (!is_usual[b]) {  // what no checkpoint's scales and no ordinary tokens give: one copy of the code
            const BlockQuantizer careful = BlockQuantizer::of_any(largest[b], global_scale, reciprocal);
            float values[16];  // these alone have an index that is not known, so they alone go to memory
#pragma unroll
            for (int i = 0; i < 16; ++i) values[i] = x[b][i];
#pragma unroll 1
            for (int i = 0; i < 16; ++i) values[i] = careful.value(values[i]);
#pragma unroll
            for (int i = 0; i < 16; ++i) quantized[b][i] = values[i];
        }
#pragma unroll
        for (int i = 0; i < 16; ++i) x[b][i] = quantized[b][i];
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

/// pairs[word][n] is (n, n + 4) of a word's eight values. By whole quads.
__device__ inline PermutedBlock permute_block(std::uint32_t (&pairs)[2][4]) {
    PermutedBlock block;
#pragma unroll
    for (int word = 0; word < 2; ++word) {
        transpose_in_quad(pairs[word]);
        block.words[word] = make_uint4(pairs[word][0], pairs[word][1], pairs[word][2], pairs[word][3]);
    }
    return block;
}

__device__ inline PermutedBlock permute_quantized(const float (&x)[16]) {
    std::uint32_t pairs[2][4];
#pragma unroll
    for (int i = 0; i < 8; ++i)
        pairs[i / 4][i % 4] = pack_pair<true>(x[i / 4 * 8 + i % 4], x[i / 4 * 8 + i % 4 + 4]);
    return permute_block(pairs);
}

/// Sixteen bf16 as they lie in memory.
struct Bf16Block {
    std::uint32_t words[8];

    Bf16Block() = default;
    __device__ Bf16Block(const uint4& a, const uint4& b) : words{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w} {}

    /// The values as floats; returns the largest magnitude's bits.
    __device__ std::uint32_t unpack(float (&x)[16]) const {
        std::uint32_t largest = 0;  // of the even and the odd values
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            x[2 * i] = __uint_as_float(words[i] << 16);
            x[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000U);
            largest = __vmaxu2(largest, words[i] & 0x7FFF7FFFU);
        }
        return max(largest << 16, largest & 0xFFFF0000U);
    }
    __device__ PermutedBlock permuted() const {
        std::uint32_t pairs[2][4];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int first = i / 4 * 4 + i % 4 / 2;
            pairs[i / 4][i % 4] = __byte_perm(words[first], words[first + 2], i % 2 == 0 ? 0x5410 : 0x7632);
        }
        return permute_block(pairs);
    }
};

/// Quantised to fp16 with the global scale, or left as they are. By whole quads; `reciprocal` is 1 /
/// global_scale.
template <bool kQuantizes, int kBlocks>
__device__ inline void encode_blocks(const Bf16Block (&blocks)[kBlocks], float global_scale, float reciprocal,
                                     PermutedBlock (&encoded)[kBlocks]) {
    float x[kBlocks][16];
    std::uint32_t largest[kBlocks];
    if constexpr (kQuantizes) {
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) largest[b] = blocks[b].unpack(x[b]);
        quantize_blocks(x, largest, global_scale, reciprocal);
    }
#pragma unroll
    for (int b = 0; b < kBlocks; ++b)
        encoded[b] = kQuantizes ? permute_quantized(x[b]) : blocks[b].permuted();
}

__device__ inline void store_block(std::uint16_t* row, const BlockPlace& place, const PermutedBlock& block) {
    const int n = place.quad;  // 8 (n % 2) + 16 (n / 2) is where its eight values begin
    std::uint16_t* const to = row + place.chunk * kChunk + place.block * 64 + n % 2 * 8 + n / 2 * 16;
    *reinterpret_cast<uint4*>(to) = block.words[0];
    *reinterpret_cast<uint4*>(to + 32) = block.words[1];
}

}  // namespace moe4::cuda
