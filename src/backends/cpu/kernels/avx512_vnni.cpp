// w4a4 with vpdpbusd. Weight rows are lanes: a code is the unsigned byte 12 + 2 e2m1, looked up by vpermb; an
// activation the signed byte 2 e2m1. A block's dot product starts at -12 times the sum of its activations, so
// it ends as the exact integer, and one fused multiply-add with s_x * s_w adds it to the row's sum.
// Up to 8 rows decode the weights in registers, more share a decoded piece of the tile in L1.
#include "backends/cpu/kernels/avx512_vector.hpp"
#include "backends/cpu/packed_layout.hpp"

namespace moe4::cpu::avx512_vnni {
namespace {

constexpr int kGroupRows = 8;         // two halves of a tile times 8 rows are 16 of 32 registers
constexpr int kDecodedBlocks = 32;    // 20 KB of L1
constexpr int kMaxGroups = 64;        // that share a decoded piece: bounds the scratch
constexpr int kPrefetchAhead = 4096;  // bytes of packed weights
constexpr int kBias = 12;

/// One block of one row. The codes are doubled, in the order that the nibbles of the packed weights have:
/// columns 0 2 4 6, 1 3 5 7, 8 10 12 14, 9 11 13 15.
struct EncodedBlock {
    std::int8_t code[kNvfp4BlockSize];
    std::int32_t start;  // -kBias * (sum of code)
    float scale;         // s_x * kScaleFactor
};

/// What brings the product of two doubled codes, of s_x and of e4m3 read as a half (2^-8 of it) to its value.
constexpr float kScaleFactor = 256.0F / 4.0F;

/// A block of 16 weight rows in registers.
struct DecodedRows {
    __m512i code[4];  // biased; lane = row, 4 columns
    __m512 scale;     // 2^-8 s_w
};
using DecodedBlock = DecodedRows[2];

/// The sums of up to 8 rows times the 32 rows of a tile.
struct GroupSums {
    __m512 half[2][kGroupRows];
};

struct Scratch {
    DecodedBlock decoded[kDecodedBlocks];
    GroupSums sums[kMaxGroups];
};

std::int64_t num_blocks(std::int64_t cols) { return cols / kNvfp4BlockSize; }
std::int64_t num_chunks(std::int64_t cols) { return (cols + kPackedChunkCols - 1) / kPackedChunkCols; }

std::size_t row_bytes(std::int64_t cols) {
    return static_cast<std::size_t>(num_blocks(cols)) * sizeof(EncodedBlock);
}

std::size_t panel_bytes(std::int64_t num_rows, std::int64_t cols) {
    return static_cast<std::size_t>(num_rows) * row_bytes(cols);
}

/// Panel: groups of 8 rows (the last one of fewer), within a group block by block, within a block row by row.
struct Group {
    std::int64_t first_row;
    std::int64_t num_rows;
};

Group group_of(std::int64_t group, std::int64_t num_rows) {
    const std::int64_t first = group * kGroupRows;
    return {first, num_rows - first < kGroupRows ? num_rows - first : kGroupRows};
}

/// Where block b of the group's row r lies in a panel.
std::int64_t block_index(const Group& group, std::int64_t cols, std::int64_t b, std::int64_t r) {
    return group.first_row * num_blocks(cols) + b * group.num_rows + r;
}

EncodedBlock encode_block(__m512 x, float input_scale) {
    const QuantizedBlock block = quantize_block(x, input_scale);
    const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    EncodedBlock out;
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out.code),
                     _mm_shuffle_epi8(_mm512_cvtepi32_epi8(block.doubled), order));
    out.start = -kBias * _mm512_reduce_add_epi32(block.doubled);
    out.scale = block.scale * kScaleFactor;
    return out;
}

void encode_rows(const EncodeTask& task) {
    for (std::int64_t r = task.first; r < task.last; ++r) {
        const std::int64_t source = task.index != nullptr ? task.index[r] : r;
        const std::uint16_t* values = task.values + source * task.cols;
        auto* row =
            reinterpret_cast<EncodedBlock*>(task.rows + static_cast<std::size_t>(r) * row_bytes(task.cols));
        for (std::int64_t block = 0; block < num_blocks(task.cols); ++block) {
            const auto* x = reinterpret_cast<const __m256i*>(values + block * kNvfp4BlockSize);
            row[block] = encode_block(bf16_to_float(_mm256_loadu_si256(x)), task.input_scale[r]);
        }
    }
}

void gather_rows(const GatherTask& task) {
    const std::int64_t blocks = num_blocks(task.cols);
    for (std::int64_t r = task.first; r < task.last; ++r) {
        const std::int64_t source = task.index != nullptr ? task.index[r] : r;
        const auto* row = reinterpret_cast<const EncodedBlock*>(task.rows + static_cast<std::size_t>(source) *
                                                                                row_bytes(task.cols));
        const Group group = group_of(r / kGroupRows, task.num_rows);
        auto* out = reinterpret_cast<EncodedBlock*>(task.panel) +
                    block_index(group, task.cols, 0, r - group.first_row);
        for (std::int64_t block = 0; block < blocks; ++block) out[block * group.num_rows] = row[block];
    }
}

/// Byte i looks up its low 4 bits; the 2 bits above them, of the neighbouring nibble, choose among copies.
__m512i code_table() {
    return _mm512_broadcast_i32x4(_mm_setr_epi8(kBias, kBias + 1, kBias + 2, kBias + 3, kBias + 4, kBias + 6,
                                                kBias + 8, kBias + 12, kBias, kBias - 1, kBias - 2, kBias - 3,
                                                kBias - 4, kBias - 6, kBias - 8, kBias - 12));
}

/// An e4m3 byte shifted left by 7 is 2^-8 of it as a half: exact for subnormal scales too, and vcvtph2ps
/// heeds neither FTZ nor DAZ.
__m512 decode_scales(const std::uint8_t* scales) {
    const __m256i bytes = _mm256_cvtepu8_epi16(_mm_load_si128(reinterpret_cast<const __m128i*>(scales)));
    return _mm512_cvtph_ps(_mm256_slli_epi16(bytes, 7));
}

DecodedRows decode(const PackedHalf& half, std::int64_t block, __m512i table) {
    const __m512i low = _mm512_load_si512(half.codes[2 * block]);
    const __m512i high = _mm512_load_si512(half.codes[2 * block + 1]);
    return {
        {_mm512_permutexvar_epi8(low, table), _mm512_permutexvar_epi8(_mm512_srli_epi16(low, 4), table),
         _mm512_permutexvar_epi8(high, table), _mm512_permutexvar_epi8(_mm512_srli_epi16(high, 4), table)},
        decode_scales(half.scale[block])};
}

inline void prefetch(const void* line) { _mm_prefetch(static_cast<const char*>(line), _MM_HINT_T1); }

/// Weights that are decoded where they are used.
struct PackedWeights {
    const PackedChunk* chunks;
    __m512i table;

    DecodedRows load(std::int64_t block, int half) const {
        return decode(chunks[block / kPackedChunkBlocks].half[half], block % kPackedChunkBlocks, table);
    }
    void fetch_ahead(std::int64_t block) const {
        constexpr std::int64_t kBlockBytes = sizeof(PackedChunk) / kPackedChunkBlocks;
        const char* p = reinterpret_cast<const char*>(chunks) + block * kBlockBytes + kPrefetchAhead;
        for (std::int64_t line = 0; line < kBlockBytes; line += 64) prefetch(p + line);
    }
};

/// Weights that lie decoded in L1; meanwhile the packed ones that come next are fetched.
struct DecodedWeights {
    const DecodedBlock* blocks;
    const char* next;
    int next_lines;  // a block

    DecodedRows load(std::int64_t block, int half) const { return blocks[block][half]; }
    void fetch_ahead(std::int64_t block) const {
        for (int line = 0; line < next_lines; ++line) prefetch(next + (block * next_lines + line) * 64);
    }
};

/// sum + s_x * s_w * (x . w)
[[gnu::always_inline]] inline __m512 add_block(const EncodedBlock& x, const DecodedRows& w, __m512 sum) {
    __m512i dot = _mm512_set1_epi32(x.start);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        std::int32_t four_codes;
        __builtin_memcpy(&four_codes, x.code + 4 * i, 4);
        dot = _mm512_dpbusd_epi32(dot, w.code[i], _mm512_set1_epi32(four_codes));
    }
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), _mm512_mul_ps(w.scale, _mm512_set1_ps(x.scale)), sum);
}

/// sums[half][r] += rows of x times the weights, block by block.
template <int kRows, class Weights>
void accumulate(const Weights& weights, const EncodedBlock* x, std::int64_t count, GroupSums& sums) {
    __m512 sum[2][kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
        sum[0][r] = sums.half[0][r];
        sum[1][r] = sums.half[1][r];
    }
    for (std::int64_t block = 0; block < count; ++block, x += kRows) {
        weights.fetch_ahead(block);
        const DecodedRows w[2] = {weights.load(block, 0), weights.load(block, 1)};
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
            sum[0][r] = add_block(x[r], w[0], sum[0][r]);
            sum[1][r] = add_block(x[r], w[1], sum[1][r]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
        sums.half[0][r] = sum[0][r];
        sums.half[1][r] = sum[1][r];
    }
}

template <class Weights>
void accumulate_rows(std::int64_t num_rows, const Weights& weights, const EncodedBlock* x, std::int64_t count,
                     GroupSums& sums) {
    switch (num_rows) {
        case 1:
            return accumulate<1>(weights, x, count, sums);
        case 2:
            return accumulate<2>(weights, x, count, sums);
        case 3:
            return accumulate<3>(weights, x, count, sums);
        case 4:
            return accumulate<4>(weights, x, count, sums);
        case 5:
            return accumulate<5>(weights, x, count, sums);
        case 6:
            return accumulate<6>(weights, x, count, sums);
        case 7:
            return accumulate<7>(weights, x, count, sums);
        default:
            return accumulate<8>(weights, x, count, sums);
    }
}

/// Rows of a panel that share decoded weights.
struct Rows {
    const EncodedBlock* panel;
    std::int64_t cols;
    std::int64_t num_rows;  // of the panel
    std::int64_t first_group, last_group;
};

/// scratch.sums = the rows times all columns of a tile.
void multiply_tile(const PackedChunk* tile, const Rows& rows, Scratch& scratch) {
    const __m512i table = code_table();
    const std::int64_t blocks = num_blocks(rows.cols);
    const std::int64_t num_groups = rows.last_group - rows.first_group;
    __builtin_memset(scratch.sums, 0, static_cast<std::size_t>(num_groups) * sizeof(GroupSums));
    if (num_groups == 1) {
        const Group group = group_of(rows.first_group, rows.num_rows);
        accumulate_rows(group.num_rows, PackedWeights{tile, table},
                        rows.panel + block_index(group, rows.cols, 0, 0), blocks, scratch.sums[0]);
        return;
    }
    constexpr std::int64_t kLinesPerBlock = sizeof(PackedChunk) / kPackedChunkBlocks / 64 + 1;
    const int next_lines = static_cast<int>((kLinesPerBlock + num_groups - 1) / num_groups);
    for (std::int64_t first = 0; first < blocks; first += kDecodedBlocks) {
        const std::int64_t count = blocks - first < kDecodedBlocks ? blocks - first : kDecodedBlocks;
        const PackedChunk* chunks = tile + first / kPackedChunkBlocks;
        for (std::int64_t b = 0; b < count; ++b) {
            for (int half = 0; half < 2; ++half) {
                scratch.decoded[b][half] =
                    decode(chunks[b / kPackedChunkBlocks].half[half], b % kPackedChunkBlocks, table);
            }
        }
        const auto* next = reinterpret_cast<const char*>(chunks + kDecodedBlocks / kPackedChunkBlocks);
        for (std::int64_t g = 0; g < num_groups; ++g) {
            const Group group = group_of(rows.first_group + g, rows.num_rows);
            const EncodedBlock* x = rows.panel + block_index(group, rows.cols, first, 0);
            accumulate_rows(group.num_rows,
                            DecodedWeights{scratch.decoded, next + g * count * next_lines * 64, next_lines},
                            x, count, scratch.sums[g]);
        }
    }
}

/// Calls use(group's index in scratch.sums, group, tile's first row) for every group and tile in
/// [first, last).
template <class Use>
void for_each_tile(const std::uint8_t* packed, const std::uint8_t* panel, std::int64_t cols,
                   std::int64_t num_rows, std::int64_t first, std::int64_t last, int tile_rows,
                   Scratch& scratch, const Use& use) {
    const std::int64_t num_groups = (num_rows + kGroupRows - 1) / kGroupRows;
    for (std::int64_t begin = 0; begin < num_groups; begin += kMaxGroups) {
        const std::int64_t end = num_groups - begin < kMaxGroups ? num_groups : begin + kMaxGroups;
        for (std::int64_t row = first; row < last; row += tile_rows) {
            const auto* tile =
                reinterpret_cast<const PackedChunk*>(packed) + row / tile_rows * num_chunks(cols);
            multiply_tile(tile, {reinterpret_cast<const EncodedBlock*>(panel), cols, num_rows, begin, end},
                          scratch);
            for (std::int64_t g = begin; g < end; ++g)
                use(scratch.sums[g - begin], group_of(g, num_rows), row);
        }
    }
}

/// Intermediates [i, i + 16) of one row: one block of h.
void store_h(const GateUpTask& task, const Group& group, std::int64_t r, std::int64_t i, __m512 gate,
             __m512 up) {
    const std::int64_t row = group.first_row + r;
    const Lanes g = Lanes::set(task.gate_scale[row]) * Lanes{gate};
    const Lanes u = Lanes::set(task.up_scale[row]) * Lanes{up};
    const __m256i h = bf16_from_float(moe::Silu::apply(g, u).value);
    if (task.h_rows != nullptr) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(task.h_rows + row * task.intermediate_size + i), h);
        return;
    }
    reinterpret_cast<EncodedBlock*>(
        task.h_panel)[block_index(group, task.intermediate_size, i / kNvfp4BlockSize, r)] =
        encode_block(bf16_to_float(h), task.input_scale[row]);
}

void gate_up(const GateUpTask& task) {
    for_each_tile(task.expert->packed_gate_up, task.panel, task.hidden_size, task.num_rows, task.first,
                  task.last, kPackedHalfRows, *reinterpret_cast<Scratch*>(task.scratch),
                  [&](const GroupSums& sums, const Group& group, std::int64_t i) {
                      for (std::int64_t r = 0; r < group.num_rows; ++r)
                          store_h(task, group, r, i, sums.half[0][r], sums.half[1][r]);
                  });
}

void down(const DownTask& task) {
    for_each_tile(task.expert->packed_down, task.panel, task.intermediate_size, task.num_rows, task.first,
                  task.last, kPackedTileRows, *reinterpret_cast<Scratch*>(task.scratch),
                  [&](const GroupSums& sums, const Group& group, std::int64_t c) {
                      for (std::int64_t r = 0; r < group.num_rows; ++r) {
                          const std::int64_t row = group.first_row + r;
                          const __m512 scale = _mm512_set1_ps(task.scale[row]);
                          float* y = task.y + row * task.y_stride + (c - task.first);
                          _mm512_store_ps(y, _mm512_mul_ps(scale, sums.half[0][r]));
                          _mm512_store_ps(y + kLanes, _mm512_mul_ps(scale, sums.half[1][r]));
                      }
                  });
}

std::size_t scratch_bytes(std::int64_t, std::int64_t, std::int64_t) { return sizeof(Scratch); }

}  // namespace

extern const Kernel kW4a4;
const Kernel kW4a4 = {.name = "avx512_vnni_w4a4",
                      .needs = kAvx512 | kAvx512Vbmi | kAvx512Vnni,
                      .precision = Precision::w4a4,
                      .layout = &kPackedLayout,
                      .min_rows = 1,
                      .encodes_h = true,
                      .encoded_bytes = row_bytes,
                      .encode_rows = encode_rows,
                      .rows_per_group = kGroupRows,
                      .panel_bytes = panel_bytes,
                      .gather_rows = gather_rows,
                      .gate_up_tile = kPackedHalfRows,
                      .down_tile = kPackedTileRows,
                      .scratch_bytes = scratch_bytes,
                      .gate_up = gate_up,
                      .down = down,
                      .combine = combine,
                      .peak = "vpdpbusd",
                      .peak_share_amd = 0.67,
                      .peak_share_intel = 0.57};

}  // namespace moe4::cpu::avx512_vnni
