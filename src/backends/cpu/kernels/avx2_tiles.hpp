#pragma once
// Where the AVX2 kernels find a chunk of a tile: in the packed layout, or in the checkpoint as it lies, whose
// rows are then brought into that order in L1. Anonymous as avx2_vector.hpp says.
#include "backends/cpu/kernels/avx2_vector.hpp"
#include "backends/cpu/packed_layout.hpp"

namespace moe4::cpu::avx2 {
namespace {

inline std::int64_t smaller(std::int64_t a, std::int64_t b) { return a < b ? a : b; }

struct PackedTiles {
    const PackedChunk* chunks;
    std::int64_t num_chunks;  // of a tile

    PackedTiles(const std::uint8_t* packed, std::int64_t cols)
        : chunks(reinterpret_cast<const PackedChunk*>(packed)),
          num_chunks((cols + kPackedChunkCols - 1) / kPackedChunkCols) {}
    explicit PackedTiles(const GateUpTask& task)
        : PackedTiles(task.expert->packed_gate_up, task.hidden_size) {}
    explicit PackedTiles(const DownTask& task)
        : PackedTiles(task.expert->packed_down, task.intermediate_size) {}

    const PackedChunk& chunk(std::int64_t tile, std::int64_t i, PackedChunk& /*scratch*/) const {
        return chunks[tile * num_chunks + i];
    }

    /// A block's worth of bytes, in the order of their addresses. Into L2: what comes next should not
    /// displace from L1 what is in use.
    [[gnu::always_inline]] static void fetch_ahead(const PackedChunk& chunk, std::int64_t block) {
        constexpr std::int64_t kAhead = 4 * sizeof(PackedChunk);
        constexpr std::int64_t kBlockBytes = sizeof(PackedChunk) / kPackedChunkBlocks;
        const char* first = reinterpret_cast<const char*>(&chunk) + kAhead + block * kBlockBytes;
        for (std::int64_t byte = 0; byte < kBlockBytes; byte += 64) _mm_prefetch(first + byte, _MM_HINT_T1);
    }
};

/// rows[r] lane c -> rows[c] lane r.
[[gnu::always_inline]] inline void transpose(__m256i (&rows)[8]) {
    __m256i a[8];  // pairs of rows: lanes 0 1 | 2 3 of every 128 bits
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        a[i] = _mm256_unpacklo_epi32(rows[i], rows[i + 1]);
        a[i + 1] = _mm256_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    __m256i b[8];  // b[4 j + c]: rows 4 j .. 4 j + 3, lane c of every 128 bits
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        b[i] = _mm256_unpacklo_epi64(a[i], a[i + 2]);
        b[i + 1] = _mm256_unpackhi_epi64(a[i], a[i + 2]);
        b[i + 2] = _mm256_unpacklo_epi64(a[i + 1], a[i + 3]);
        b[i + 3] = _mm256_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
        rows[c] = _mm256_permute2x128_si256(b[c], b[4 + c], 0x20);
        rows[4 + c] = _mm256_permute2x128_si256(b[c], b[4 + c], 0x31);
    }
}

struct InPlaceTiles {
    Nvfp4View matrix[2];       // of the two halves
    std::int64_t tile_rows;    // from one tile to the next
    std::int64_t second_half;  // where its rows start behind the first half's

    InPlaceTiles(const Nvfp4View& gate, const Nvfp4View& up)
        : matrix{gate, up}, tile_rows(kPackedHalfRows), second_half(0) {}
    explicit InPlaceTiles(const Nvfp4View& down)
        : matrix{down, down}, tile_rows(kPackedTileRows), second_half(kPackedHalfRows) {}
    explicit InPlaceTiles(const GateUpTask& task) : InPlaceTiles(task.expert->gate, task.expert->up) {}
    explicit InPlaceTiles(const DownTask& task) : InPlaceTiles(task.expert->down) {}

    const PackedChunk& chunk(std::int64_t tile, std::int64_t i, PackedChunk& scratch) const {
        fetch_ahead(tile, i);
        for (int half = 0; half < 2; ++half) {
            const std::int64_t row = tile * tile_rows + half * second_half;
            const std::int64_t num_blocks =
                smaller(kPackedChunkBlocks, matrix[half].cols / kBlock - i * kPackedChunkBlocks);
            if (row >= matrix[half].rows || num_blocks < kPackedChunkBlocks)
                __builtin_memset(&scratch.half[half], 0, sizeof(PackedHalf));
            if (row >= matrix[half].rows) continue;
            for (int lane = 0; lane < kPackedHalfRows; lane += kLanes)
                pack_rows(matrix[half], row + lane, i * kPackedChunkBlocks, num_blocks, scratch.half[half],
                          lane);
        }
        return scratch;
    }

    /// A chunk that lies in L1.
    static void fetch_ahead(const PackedChunk&, std::int64_t) {}

    /// As many bytes of the next tile as chunk i of this one has, but in the order of their addresses.
    /// Inline: gcc takes a function that only prefetches for one without effects and drops its calls.
    [[gnu::always_inline]] void fetch_ahead(std::int64_t tile, std::int64_t i) const {
        constexpr std::int64_t kCodeBytes = std::int64_t{kPackedHalfRows} * kPackedChunkCols / 2;
        constexpr std::int64_t kScaleBytes = std::int64_t{kPackedHalfRows} * kPackedChunkBlocks;
        for (int half = 0; half < 2; ++half) {
            const Nvfp4View& m = matrix[half];
            const std::int64_t next = (tile + 1) * tile_rows + half * second_half;
            const std::uint8_t* codes = m.packed + next * m.packed_stride + i * kCodeBytes;
            const std::uint8_t* scales = m.block_scale + next * m.scale_stride + i * kScaleBytes;
            for (std::int64_t line = 0; line < kCodeBytes; line += 64)
                _mm_prefetch(reinterpret_cast<const char*>(codes + line), _MM_HINT_T1);
            _mm_prefetch(reinterpret_cast<const char*>(scales), _MM_HINT_T1);
        }
    }

    /// `num_blocks` blocks of 8 rows into lanes [lane, lane + 8).
    static void pack_rows(const Nvfp4View& m, std::int64_t row, std::int64_t block, std::int64_t num_blocks,
                          PackedHalf& half, int lane) {
        const std::uint8_t* codes = m.packed + row * m.packed_stride + block * kBlock / 2;
        const std::uint8_t* scales = m.block_scale + row * m.scale_stride + block;
        if (num_blocks == kPackedChunkBlocks) {
            pack_scales(scales, m.scale_stride, half, lane);
            __m256i rows[kLanes];
#pragma GCC unroll 8
            for (std::int64_t r = 0; r < kLanes; ++r) {
                rows[r] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + r * m.packed_stride));
            }
            transpose(rows);
#pragma GCC unroll 8
            for (int i = 0; i < kLanes; ++i)
                _mm256_store_si256(reinterpret_cast<__m256i*>(half.codes[i][lane]), rows[i]);
            return;
        }
        for (std::int64_t r = 0; r < kLanes; ++r) {
            for (std::int64_t b = 0; b < num_blocks; ++b)
                half.scale[b][lane + r] = scales[r * m.scale_stride + b];
            for (std::int64_t i = 0; i < 2 * num_blocks; ++i)
                __builtin_memcpy(half.codes[i][lane + r], codes + r * m.packed_stride + 4 * i, 4);
        }
    }

    /// 4 scales of each of 8 rows.
    static void pack_scales(const std::uint8_t* scales, std::int64_t stride, PackedHalf& half, int lane) {
        const auto row = [&](std::int64_t r) {
            std::int32_t four;
            __builtin_memcpy(&four, scales + r * stride, sizeof(four));
            return four;
        };
        const __m256i rows =
            _mm256_setr_epi32(row(0), row(1), row(2), row(3), row(4), row(5), row(6), row(7));
        const __m256i by_block = _mm256_shuffle_epi8(
            rows,
            _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15)));
        const __m256i blocks =
            _mm256_permutevar8x32_epi32(by_block, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
        for (int pair = 0; pair < 2; ++pair) {
            const __m128i two =
                pair == 0 ? _mm256_castsi256_si128(blocks) : _mm256_extracti128_si256(blocks, 1);
            _mm_storel_epi64(reinterpret_cast<__m128i*>(&half.scale[2 * pair][lane]), two);
            _mm_storeh_pd(reinterpret_cast<double*>(&half.scale[2 * pair + 1][lane]), _mm_castsi128_pd(two));
        }
    }
};

}  // namespace
}  // namespace moe4::cpu::avx2
