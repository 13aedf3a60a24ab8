#pragma once
// Tiles of the checkpoint as it lies: each piece is rearranged into packed chunks in L1 before it is used,
// while the next tile is fetched in the order of its addresses. Anonymous as avx512_vector.hpp says.
#include "backends/cpu/kernels/avx512_vector.hpp"
#include "backends/cpu/packed_layout.hpp"

namespace moe4::cpu {
namespace {

/// rows[r] lane c -> rows[c] lane r.
[[gnu::always_inline]] inline void transpose(__m512i (&rows)[16]) {
    __m512i a[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {  // pairs of rows: lanes 0 1 | 2 3 of every 128 bits
        a[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        a[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    __m512i b[16];  // b[4 j + c]: rows 4 j .. 4 j + 3, lane c of every 128 bits
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
        b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
        b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
        b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {  // a 4 x 4 transpose of 128 bits each
        const __m512i low01 = _mm512_shuffle_i32x4(b[c], b[4 + c], 0x44);
        const __m512i high01 = _mm512_shuffle_i32x4(b[c], b[4 + c], 0xEE);
        const __m512i low23 = _mm512_shuffle_i32x4(b[8 + c], b[12 + c], 0x44);
        const __m512i high23 = _mm512_shuffle_i32x4(b[8 + c], b[12 + c], 0xEE);
        rows[c] = _mm512_shuffle_i32x4(low01, low23, 0x88);
        rows[4 + c] = _mm512_shuffle_i32x4(low01, low23, 0xDD);
        rows[8 + c] = _mm512_shuffle_i32x4(high01, high23, 0x88);
        rows[12 + c] = _mm512_shuffle_i32x4(high01, high23, 0xDD);
    }
}

/// rows[r] byte b (of 8) -> byte 16 b + r of the 128 bytes of out.
[[gnu::always_inline]] inline void transpose_bytes(const __m128i (&rows)[16], __m512i (&out)[2]) {
    __m512i eight[2];  // 128 bits: rows 2 j and 2 j + 1, their bytes alternating
    for (std::int64_t i = 0; i < 2; ++i) {
        const __m128i* r = rows + 8 * i;
        eight[i] = _mm512_castsi128_si512(_mm_unpacklo_epi8(r[0], r[1]));
        eight[i] = _mm512_inserti32x4(eight[i], _mm_unpacklo_epi8(r[2], r[3]), 1);
        eight[i] = _mm512_inserti32x4(eight[i], _mm_unpacklo_epi8(r[4], r[5]), 2);
        eight[i] = _mm512_inserti32x4(eight[i], _mm_unpacklo_epi8(r[6], r[7]), 3);
    }
    const __m512i step = _mm512_set_epi16(59, 51, 43, 35, 27, 19, 11, 3, 58, 50, 42, 34, 26, 18, 10, 2,  //
                                          57, 49, 41, 33, 25, 17, 9, 1, 56, 48, 40, 32, 24, 16, 8, 0);
    out[0] = _mm512_permutex2var_epi16(eight[0], step, eight[1]);
    out[1] = _mm512_permutex2var_epi16(eight[0], _mm512_add_epi16(step, _mm512_set1_epi16(4)), eight[1]);
}

struct InPlaceTiles {
    Nvfp4View matrix[2];  // of the two halves
    std::int64_t cols;
    std::int64_t tile_rows;
    std::int64_t second_half;  // where its rows start behind the first half's

    static constexpr std::int64_t kLinesToFetch = 0;  // while others are multiplied: all are as it is decoded
    static constexpr std::int64_t kPairCols = std::int64_t{2} * kPackedChunkCols;  // 64 bytes of codes a row

    /// Writes an even number of chunks.
    const PackedChunk* chunks(std::int64_t row, std::int64_t first, std::int64_t count,
                              PackedChunk* scratch) const {
        for (std::int64_t chunk = 0; chunk < count; chunk += 2) {
            for (int half = 0; half < 2; ++half) {
                const std::int64_t half_row = row + half * second_half;
                const std::int64_t col = (first + chunk) * kPackedChunkCols;
                pack_pair(matrix[half], half_row, col, scratch[chunk].half[half],
                          scratch[chunk + 1].half[half]);
            }
        }
        return scratch;
    }

    /// 16 rows x 128 columns; zeros beyond the matrix.
    static void pack_pair(const Nvfp4View& m, std::int64_t row, std::int64_t col, PackedHalf& left,
                          PackedHalf& right) {
        const std::int64_t num_cols = m.cols - col < kPairCols ? m.cols - col : kPairCols;
        if (row >= m.rows) {  // sizes are multiples of 16: all rows or none
            left = right = {};
            return;
        }
        const auto codes_mask = static_cast<__mmask64>(~std::uint64_t{0} >> (64 - num_cols / 2));
        const std::uint8_t* codes = m.packed + row * m.packed_stride + col / 2;
        __m512i lines[kPackedHalfRows];
#pragma GCC unroll 16
        for (int r = 0; r < kPackedHalfRows; ++r) {
            lines[r] = _mm512_maskz_loadu_epi8(codes_mask, codes + r * m.packed_stride);
        }
        transpose(lines);
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) {
            _mm512_store_si512(left.codes[i], lines[i]);
            _mm512_store_si512(right.codes[i], lines[8 + i]);
        }

        const auto scales_mask = static_cast<__mmask16>((1U << (num_cols / kNvfp4BlockSize)) - 1U);
        const std::uint8_t* scales = m.block_scale + row * m.scale_stride + col / kNvfp4BlockSize;
        __m128i eights[kPackedHalfRows];
#pragma GCC unroll 16
        for (int r = 0; r < kPackedHalfRows; ++r) {
            eights[r] = _mm_maskz_loadu_epi8(scales_mask, scales + r * m.scale_stride);
        }
        __m512i transposed[2];
        transpose_bytes(eights, transposed);
        _mm512_store_si512(left.scale, transposed[0]);
        _mm512_store_si512(right.scale, transposed[1]);
    }

    /// As many bytes of the next tile as a block of this one has, but in the order of their addresses.
    [[gnu::always_inline]] void fetch_ahead(std::int64_t row, std::int64_t block,
                                            std::int64_t tiles_at_once) const {
        for (int half = 0; half < 2; ++half) {
            const Nvfp4View& m = matrix[half];
            const std::int64_t next = row + half * second_half + tiles_at_once * tile_rows;
            constexpr std::int64_t kCodeBytes = std::int64_t{kPackedHalfRows} * kNvfp4BlockSize / 2;
            prefetch(m.packed + next * m.packed_stride + block * kCodeBytes, kCodeBytes / 64);
            constexpr std::int64_t kBlocksPerLine = 64 / kPackedHalfRows;
            if (block % kBlocksPerLine == 0)
                prefetch(m.block_scale + next * m.scale_stride + block * kPackedHalfRows, 1);
        }
    }
};

inline InPlaceTiles gate_up_tiles(const Nvfp4View& gate, const Nvfp4View& up) {
    return {{gate, up}, gate.cols, kPackedHalfRows, 0};
}
inline InPlaceTiles down_tiles(const Nvfp4View& down) {
    return {{down, down}, down.cols, kPackedTileRows, kPackedHalfRows};
}
inline void set_tiles(InPlaceTiles& tiles, const GateUpTask& task) {
    tiles = gate_up_tiles(task.expert->gate, task.expert->up);
}
inline void set_tiles(InPlaceTiles& tiles, const DownTask& task) { tiles = down_tiles(task.expert->down); }

}  // namespace
}  // namespace moe4::cpu
