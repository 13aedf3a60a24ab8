// AVX2: eight weight rows in the lanes of a register, and integer dot products of blocks in both modes.
// Weight codes become the unsigned bytes 2 * e2m1 + 12, activations are signed bytes: vpmaddubsw multiplies
// and adds them, a block's sum of 8 products a lane staying below 2^15. What the bias adds is known when
// activations are encoded.
//   w4a4   The bytes are 2 * e2m1: one exact scaling and one fused multiply-add a block, as the contract has
//          it (QuantizedBlock says how). 11 vector operations for 8 rows x 16 columns.
//   w4a16  The bytes are digits of fixed-point activations (FixedBlock), each a dot product of its own; then
//          one conversion and one fused multiply-add a block. 21 operations, 32 where the lowest digit is not
//          zero; multiply-adds of floats take 16, but decoding to floats takes 3 a column, which one row
//          shares with nobody.
// The sums lie in L1, since the codes of 16 weight rows fill the registers: each activation is then loaded
// once for 16 weight rows, and the 9 or 12 loads of a row are less than the two load ports take while the
// four vector ports do its 22 or 42 operations. With the sums in registers codes were loaded for every row,
// and the load ports were the bound.
// A group of rows that is alone decodes weights in registers; more share a piece of a tile decoded into L1.
#include "backends/cpu/kernels/avx2_tiles.hpp"

namespace moe4::cpu::avx2 {
namespace {

constexpr int kGroups = kPackedTileRows / kLanes;  // of 8 weight rows in a tile
constexpr int kPanelGroupRows = 32;
constexpr std::int64_t kPieceChunks = 4;  // decoded together, within L1
constexpr std::int64_t kPieceBlocks = kPieceChunks * kPackedChunkBlocks;

inline std::int64_t num_blocks(std::int64_t cols) { return cols / kBlock; }

/// What 8 rows of weights hold of 16 columns: bytes 2 * e2m1 + 12, four columns of a row in each lane.
struct WeightBlock {
    __m256i codes[4];
    __m256 scale;  // 2^-8 e4m3
};

/// 2^-8 of 8 e4m3 values: a byte shifted left by 7 is that as a half. Unlike a multiplication the conversion
/// is as fast for subnormal numbers.
__m256 decode_scales(const std::uint8_t* scales) {
    const __m128i halves = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(scales)));
    return _mm256_cvtph_ps(_mm_slli_epi16(halves, 7));
}

/// Block `block` of a chunk, weight rows 8 group .. 8 group + 7.
[[gnu::always_inline]] inline WeightBlock decode_block(const PackedChunk& chunk, std::int64_t block,
                                                       int group) {
    const PackedHalf& half = chunk.half[group * kLanes / kPackedHalfRows];
    const int row = group * kLanes % kPackedHalfRows;
    const __m256i table =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    const __m256i nibble = _mm256_set1_epi8(15);
    WeightBlock out;
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
        const __m256i codes =
            _mm256_load_si256(reinterpret_cast<const __m256i*>(half.codes[2 * block + i][row]));
        out.codes[2 * i] = _mm256_shuffle_epi8(table, _mm256_and_si256(codes, nibble));
        out.codes[2 * i + 1] =
            _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(codes, 4), nibble));
    }
    out.scale = decode_scales(&half.scale[block][row]);
    return out;
}

/// Weights that are decoded where they are used; meanwhile those that come next are fetched.
template <class Tiles>
struct PackedWeights {
    const PackedChunk& chunk;
    [[gnu::always_inline]] WeightBlock load(std::int64_t block, int group) const {
        return decode_block(chunk, block, group);
    }
    [[gnu::always_inline]] void fetch_ahead(std::int64_t block) const { Tiles::fetch_ahead(chunk, block); }
};

/// Weights that lie decoded in L1.
struct DecodedWeights {
    const WeightBlock (*blocks)[kGroups];
    /// Through registers: gcc copies the struct through memory in halves, which stalls.
    [[gnu::always_inline]] WeightBlock load(std::int64_t block, int group) const {
        const WeightBlock& w = blocks[block][group];
        return {.codes = {_mm256_load_si256(&w.codes[0]), _mm256_load_si256(&w.codes[1]),
                          _mm256_load_si256(&w.codes[2]), _mm256_load_si256(&w.codes[3])},
                .scale = _mm256_load_ps(reinterpret_cast<const float*>(&w.scale))};
    }
    static void fetch_ahead(std::int64_t) {}
};

[[gnu::always_inline]] inline __m256i broadcast(const void* four_bytes) {
    std::int32_t value;
    __builtin_memcpy(&value, four_bytes, 4);
    return _mm256_set1_epi32(value);
}

/// Two sums of 8 products for each of 16 weight rows.
struct Dots {
    __m256i rows[2];
};
[[gnu::always_inline]] inline Dots multiply(const WeightBlock (&w)[2], const std::int8_t (&x)[kBlock]) {
    __m256i four = broadcast(x);
    Dots dots{{_mm256_maddubs_epi16(w[0].codes[0], four), _mm256_maddubs_epi16(w[1].codes[0], four)}};
#pragma GCC unroll 3
    for (int i = 1; i < 4; ++i) {
        four = broadcast(x + 4 * i);
        dots.rows[0] = _mm256_add_epi16(dots.rows[0], _mm256_maddubs_epi16(w[0].codes[i], four));
        dots.rows[1] = _mm256_add_epi16(dots.rows[1], _mm256_maddubs_epi16(w[1].codes[i], four));
    }
    return dots;
}

/// What a block adds to the sums of 16 weight rows: value * scale, rounded with the sum.
struct Terms {
    __m256 value[2], scale[2];
};
[[gnu::always_inline]] inline void add(const Terms& terms, float* sums) {
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
        const __m256 sum = _mm256_load_ps(sums + i * kLanes);
        _mm256_store_ps(sums + i * kLanes, _mm256_fmadd_ps(terms.value[i], terms.scale[i], sum));
    }
}

/// NVFP4 activations.
struct W4a4 {
    using EncodedBlock = QuantizedBlock;
    static constexpr bool kHasDots = true;

    [[gnu::always_inline]] static Terms terms(const Dots& dots, const WeightBlock (&w)[2],
                                              const EncodedBlock& x) {
        const __m256i multiplier = broadcast(x.multiplier);
        const __m256i start = broadcast(&x.start);
        const __m256 shift = _mm256_set1_ps(x.shift);
        Terms out;
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) {
            const __m256i bits = _mm256_add_epi32(_mm256_madd_epi16(dots.rows[i], multiplier), start);
            out.value[i] = _mm256_sub_ps(_mm256_castsi256_ps(bits), shift);
            out.scale[i] = w[i].scale;
        }
        return out;
    }
};

/// bf16 activations.
struct W4a16 {
    using EncodedBlock = FixedBlock;
    static constexpr bool kHasDots = false;  // but four registers of them, which would displace the weights

    [[gnu::always_inline]] static Terms terms(const WeightBlock (&w)[2], const EncodedBlock& x) {
        const __m256i ones = _mm256_set1_epi16(1);
        const __m256i start = broadcast(&x.start);
        const Dots middle = multiply(w, x.digits[0]);
        const Dots high = multiply(w, x.digits[1]);
        Terms out;
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) {
            const __m256i digits = _mm256_add_epi32(_mm256_madd_epi16(middle.rows[i], ones),
                                                    _mm256_madd_epi16(high.rows[i], _mm256_set1_epi16(256)));
            out.value[i] = _mm256_castsi256_ps(_mm256_add_epi32(start, digits));
        }
        if (x.has_low != 0) [[unlikely]] {
            const __m256i low_start = broadcast(&x.low_start);
            const Dots low = multiply(w, x.low);
#pragma GCC unroll 2
            for (int i = 0; i < 2; ++i) {
                const __m256i digit = _mm256_add_epi32(_mm256_madd_epi16(low.rows[i], ones), low_start);
                const __m256i all =
                    _mm256_add_epi32(_mm256_slli_epi32(_mm256_castps_si256(out.value[i]), 8), digit);
                out.value[i] = _mm256_mul_ps(_mm256_cvtepi32_ps(all), _mm256_set1_ps(1.0F / 256));
            }
        } else {
            for (__m256& v : out.value) v = _mm256_cvtepi32_ps(_mm256_castps_si256(v));
        }
        const __m256 scale = _mm256_set1_ps(x.scale);
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) out.scale[i] = _mm256_mul_ps(scale, w[i].scale);
        return out;
    }
};

/// Panel: groups of rows (the last one of fewer), within a group block by block, within a block row by row.
struct Group {
    std::int64_t first_row;
    std::int64_t num_rows;
};
inline Group group_of(std::int64_t row, std::int64_t num_rows) {
    const std::int64_t first = row / kPanelGroupRows * kPanelGroupRows;
    return {first, smaller(kPanelGroupRows, num_rows - first)};
}

/// Where block b of a row lies in a panel.
inline std::int64_t block_index(const Group& group, std::int64_t cols, std::int64_t b, std::int64_t row) {
    return group.first_row * num_blocks(cols) + b * group.num_rows + (row - group.first_row);
}

/// sums[r] += row r of a group times the 32 rows of a tile, block by block. The dot products of a row are
/// taken before those of the row ahead of it are added: as one chain they fill the schedulers.
template <class Mode, class Weights>
[[gnu::noinline]] void accumulate(const Weights& weights, std::int64_t count,
                                  const typename Mode::EncodedBlock* x, std::int64_t num_rows,
                                  float (*sums)[kPackedTileRows]) {
    for (std::int64_t block = 0; block < count; ++block, x += num_rows) {
        weights.fetch_ahead(block);
        for (int half = 0; half < 2; ++half) {
            const WeightBlock w[2] = {weights.load(block, 2 * half), weights.load(block, 2 * half + 1)};
            const int first = half * kPackedHalfRows;
            if constexpr (Mode::kHasDots) {
                Dots dots = multiply(w, x[0].codes);
                for (std::int64_t r = 1; r < num_rows; ++r) {
                    const Dots next = multiply(w, x[r].codes);
                    add(Mode::terms(dots, w, x[r - 1]), sums[r - 1] + first);
                    dots = next;
                }
                add(Mode::terms(dots, w, x[num_rows - 1]), sums[num_rows - 1] + first);
            } else {
                float* to = sums[0] + first;  // with an index gcc loses the addresses of weights
                for (std::int64_t r = 0; r < num_rows; ++r, to += kPackedTileRows)
                    add(Mode::terms(w, x[r]), to);
            }
        }
    }
}

struct Scratch {
    WeightBlock decoded[kPieceBlocks][kGroups];
    alignas(64) PackedChunk chunk;
    float sums[kMaxBlockRows][kPackedTileRows];
};

std::size_t scratch_bytes(std::int64_t max_rows, std::int64_t, std::int64_t) {
    return sizeof(Scratch) - sizeof(Scratch::sums) +
           static_cast<std::size_t>(max_rows) * sizeof(Scratch::sums[0]);
}

template <class Mode>
struct Rows {
    const typename Mode::EncodedBlock* panel;
    std::int64_t cols, count;

    const typename Mode::EncodedBlock* blocks(const Group& group, std::int64_t b) const {
        return panel + block_index(group, cols, b, group.first_row);
    }
};

/// scratch.sums[r] = row r of the panel times the 32 rows of the tile
template <class Mode, class Tiles>
void multiply_tile(const Tiles& tiles, std::int64_t tile, const Rows<Mode>& rows, Scratch& scratch) {
    __builtin_memset(scratch.sums, 0, static_cast<std::size_t>(rows.count) * sizeof(scratch.sums[0]));
    const std::int64_t blocks = num_blocks(rows.cols);
    if (rows.count <= kPanelGroupRows) {
        const Group group = group_of(0, rows.count);
        for (std::int64_t b = 0; b < blocks; b += kPackedChunkBlocks) {
            const PackedWeights<Tiles> weights{tiles.chunk(tile, b / kPackedChunkBlocks, scratch.chunk)};
            accumulate<Mode>(weights, smaller(kPackedChunkBlocks, blocks - b), rows.blocks(group, b),
                             group.num_rows, scratch.sums);
        }
        return;
    }
    for (std::int64_t first = 0; first < blocks; first += kPieceBlocks) {
        const std::int64_t count = smaller(kPieceBlocks, blocks - first);
        for (std::int64_t b = 0; b < count; b += kPackedChunkBlocks) {
            const PackedWeights<Tiles> weights{
                tiles.chunk(tile, (first + b) / kPackedChunkBlocks, scratch.chunk)};
            for (std::int64_t i = 0; i < kPackedChunkBlocks; ++i) {
                weights.fetch_ahead(i);
                for (int g = 0; g < kGroups; ++g) scratch.decoded[b + i][g] = weights.load(i, g);
            }
        }
        for (std::int64_t r = 0; r < rows.count; r += kPanelGroupRows) {
            const Group group = group_of(r, rows.count);
            accumulate<Mode>(DecodedWeights{scratch.decoded}, count, rows.blocks(group, first),
                             group.num_rows, scratch.sums + r);
        }
    }
}

/// Intermediates [i, i + 16) of rows [r, r + count): one block of h of each, at most 8.
template <class Mode>
void store_h(const GateUpTask& task, std::int64_t r, int count, std::int64_t i,
             const float (*sums)[kPackedTileRows]) {
    const std::int64_t size = task.intermediate_size;
    Block16 h[kLanes];
    alignas(32) float input_scale[kLanes] = {};
    for (int row = 0; row < kLanes; ++row) {
        if (row >= count) {
            h[row] = {Floats::set(0.0F), Floats::set(0.0F)};
            continue;
        }
        const auto activate = [&](int lane) {
            const Floats gate{_mm256_load_ps(sums[row] + lane)};
            const Floats up{_mm256_load_ps(sums[row] + kPackedHalfRows + lane)};
            return moe::Silu::apply(Floats::set(task.gate_scale[r + row]) * gate,
                                    Floats::set(task.up_scale[r + row]) * up);
        };
        h[row] = {activate(0), activate(kLanes)};
        if (task.h_rows != nullptr) {
            store_bf16(h[row], task.h_rows + (r + row) * size + i);
        } else {
            h[row] = {round_to_bf16(h[row].low), round_to_bf16(h[row].high)};
            input_scale[row] = task.input_scale[r + row];
        }
    }
    if (task.h_rows != nullptr) return;
    auto* panel = reinterpret_cast<typename Mode::EncodedBlock*>(task.h_panel);
    encode_blocks(h, {_mm256_load_ps(input_scale)}, count,
                  panel + block_index(group_of(r, task.num_rows), size, num_blocks(i), r));
}

template <class Mode, class Tiles>
void gate_up(const GateUpTask& task) {
    auto& scratch = *reinterpret_cast<Scratch*>(task.scratch);
    const Tiles tiles(task);
    const Rows<Mode> rows{reinterpret_cast<const typename Mode::EncodedBlock*>(task.panel), task.hidden_size,
                          task.num_rows};
    for (std::int64_t i = task.first; i < task.last; i += kPackedHalfRows) {
        multiply_tile<Mode>(tiles, i / kPackedHalfRows, rows, scratch);
        for (std::int64_t r = 0; r < rows.count; r += kLanes) {
            const int count = static_cast<int>(smaller(kLanes, rows.count - r));
            store_h<Mode>(task, r, count, i, scratch.sums + r);
        }
    }
}

template <class Mode, class Tiles>
void down(const DownTask& task) {
    auto& scratch = *reinterpret_cast<Scratch*>(task.scratch);
    const Tiles tiles(task);
    const Rows<Mode> rows{reinterpret_cast<const typename Mode::EncodedBlock*>(task.panel),
                          task.intermediate_size, task.num_rows};
    for (std::int64_t c = task.first; c < task.last; c += kPackedTileRows) {
        multiply_tile<Mode>(tiles, c / kPackedTileRows, rows, scratch);
        for (std::int64_t r = 0; r < rows.count; ++r) {
            const __m256 scale = _mm256_set1_ps(task.scale[r]);
            float* y = task.y + r * task.y_stride + (c - task.first);
            for (int lane = 0; lane < kPackedTileRows; lane += kLanes) {
                const __m256 value = _mm256_mul_ps(scale, _mm256_load_ps(scratch.sums[r] + lane));
                task.past_caches ? _mm256_stream_ps(y + lane, value) : _mm256_store_ps(y + lane, value);
            }
        }
    }
    if (task.past_caches) _mm_sfence();  // before another thread may read it
}

template <class Mode>
void encode_rows(const EncodeTask& task) {
    const std::int64_t blocks = num_blocks(task.cols);
    for (std::int64_t r = task.first; r < task.last; ++r) {
        const std::int64_t source = task.index != nullptr ? task.index[r] : r;
        const std::uint16_t* values = task.values + source * task.cols;
        auto* row = reinterpret_cast<typename Mode::EncodedBlock*>(task.rows) + r * blocks;
        for (std::int64_t block = 0; block < blocks; block += kLanes) {
            const int count = static_cast<int>(smaller(kLanes, blocks - block));
            Block16 x[kLanes] = {};
            for (int i = 0; i < count; ++i) x[i] = load_bf16_block(values + (block + i) * kBlock);
            encode_blocks(x, Floats::set(task.input_scale[r]), count, row + block);
        }
    }
}

template <class Mode>
void gather_rows(const GatherTask& task) {
    const std::int64_t blocks = num_blocks(task.cols);
    for (std::int64_t r = 0; r < task.num_rows; ++r) {
        const std::int64_t source = task.index != nullptr ? task.index[r] : r;
        const auto* row = reinterpret_cast<const typename Mode::EncodedBlock*>(task.rows) + source * blocks;
        const Group group = group_of(r, task.num_rows);
        auto* out =
            reinterpret_cast<typename Mode::EncodedBlock*>(task.panel) + block_index(group, task.cols, 0, r);
        for (std::int64_t b = 0; b < blocks; ++b) out[b * group.num_rows] = row[b];
    }
}

template <class Mode>
std::size_t row_bytes(std::int64_t cols) {
    return static_cast<std::size_t>(num_blocks(cols)) * sizeof(typename Mode::EncodedBlock);
}

template <class Mode>
std::size_t panel_bytes(std::int64_t num_rows, std::int64_t cols) {
    return static_cast<std::size_t>(num_rows) * row_bytes<Mode>(cols);
}

template <class Mode, class Tiles>
constexpr Kernel make_kernel(const char* name, Precision precision, const PackedLayout* layout) {
    const bool is_w4a4 = precision == Precision::w4a4;
    return {
        .name = name,
        .needs = kAvx2,
        .precision = precision,
        .layout = layout,
        .min_rows = 1,
        .encodes_h = true,
        .encoded_bytes = row_bytes<Mode>,
        .encode_rows = encode_rows<Mode>,
        .rows_per_group = kPanelGroupRows,
        .panel_bytes = panel_bytes<Mode>,
        .gather_rows = gather_rows<Mode>,
        .gate_up_tile = kPackedHalfRows,
        .down_tile = kPackedTileRows,
        .scratch_bytes = scratch_bytes,
        .gate_up = gate_up<Mode, Tiles>,
        .down = down<Mode, Tiles>,
        .combine = combine,
        .order = is_w4a4 ? moe::SumOrder{} : moe::SumOrder{moe::SumOrder::fixed_blocks, 1},
        // On AMD 6 of the 11 operations of w4a4 share two ports and the 32 of w4a16 four; Intel has three.
        .peak = "vpmaddubsw",
        .peak_share_amd = is_w4a4 ? 2.0 / (6.0 / 2) : 2.0 / (32.0 / 4),
        .peak_share_intel = is_w4a4 ? 2.0 / (11.0 / 3) : 2.0 / (32.0 / 3)};
}

}  // namespace

extern const Kernel kW4a16, kW4a16InPlace, kW4a4, kW4a4InPlace;
const Kernel kW4a16 = make_kernel<W4a16, PackedTiles>("avx2_w4a16", Precision::w4a16, &kAvx2PackedLayout);
const Kernel kW4a16InPlace =
    make_kernel<W4a16, InPlaceTiles>("avx2_w4a16_in_place", Precision::w4a16, nullptr);
const Kernel kW4a4 = make_kernel<W4a4, PackedTiles>("avx2_w4a4", Precision::w4a4, &kAvx2PackedLayout);
const Kernel kW4a4InPlace = make_kernel<W4a4, InPlaceTiles>("avx2_w4a4_in_place", Precision::w4a4, nullptr);

}  // namespace moe4::cpu::avx2
