// AVX2: eight weight rows in the lanes of a register.
//   w4a4   Weight codes become the unsigned bytes 2 * e2m1 + 12, activation codes the signed bytes 2 * e2m1:
//          vpmaddubsw multiplies and adds them, a block's sum of 8 products a lane staying below 2^15. What
//          the bias adds is known when activations are encoded. Then one exact scaling and one fused
//          multiply-add a block, as the contract has it (EncodedBlock says how).
//   w4a16  The exact weight e2m1 * e4m3 in fp32 and one fused multiply-add a value, k ascending.
// For many rows a piece of a tile is decoded once into L1; for few the codes are decoded in registers.
#include "backends/cpu/kernels/avx2_tiles.hpp"

namespace moe4::cpu::avx2 {
namespace {

constexpr int kGroups = kPackedTileRows / kLanes;  // of 8 weight rows in a tile
constexpr std::int64_t kMaxRows = 512;             // rows that share a decoded tile: bounds the scratch
constexpr std::int64_t kPanelBytes = 384 << 10;    // of them: within the second cache

/// What 8 rows of weights hold of 16 columns: bytes 2 * e2m1 + 12, four columns of a row in each lane.
struct WeightBlock {
    __m256i codes[4];
    __m256 scale;  // e4m3 / 4: doubled codes twice
};

/// The 8 rows of group `group` of a chunk.
struct PackedGroup {
    const PackedHalf* half;
    int row;
    PackedGroup(const PackedChunk& chunk, int group)
        : half(&chunk.half[group * kLanes / kPackedHalfRows]), row(group * kLanes % kPackedHalfRows) {}

    __m256i codes(std::int64_t i) const {
        return _mm256_load_si256(reinterpret_cast<const __m256i*>(half->codes[i][row]));
    }
    __m256 quarter_scale(std::int64_t block) const {
        const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(&half->scale[block][row]));
        const __m256i bits = _mm256_slli_epi32(_mm256_cvtepu8_epi32(bytes), 20);  // of the value * 2^-120
        return _mm256_mul_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps(0x1p118F));
    }
};

__m256i low_nibbles(__m256i codes) { return _mm256_and_si256(codes, _mm256_set1_epi8(15)); }
__m256i high_nibbles(__m256i codes) { return low_nibbles(_mm256_srli_epi16(codes, 4)); }

/// NVFP4 activations.
struct W4a4 {
    static constexpr std::int64_t kRowStep = 6;     // rows whose sums fill the registers
    static constexpr std::int64_t kFewRows = 4;     // up to which decoding in registers is faster
    static constexpr std::int64_t kStepChunks = 8;  // decoded together, within L1
    struct Decoded {
        WeightBlock blocks[kGroups][kStepChunks * kPackedChunkBlocks];
    };

    static constexpr std::size_t kBlockBytes = sizeof(EncodedBlock);

    static void store_blocks(const Block16 (&x)[kLanes], Floats input_scale, int count, std::uint8_t* out,
                             std::size_t out_stride) {
        encode_blocks(x, input_scale, count, out, out_stride);
    }

    static void load_row(const std::uint8_t* encoded, std::int64_t cols, std::uint8_t* row) {
        const std::size_t bytes = static_cast<std::size_t>(cols / kBlock) * kBlockBytes;
        for (std::size_t i = 0; i < bytes; i += 4) __builtin_memcpy(row + i, encoded + i, 4);
    }

    [[gnu::always_inline]] static WeightBlock decode_block(const PackedGroup& group, std::int64_t block) {
        const __m256i table = _mm256_broadcastsi128_si256(
            _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
        const __m256i first = group.codes(2 * block);
        const __m256i second = group.codes(2 * block + 1);
        return {.codes = {_mm256_shuffle_epi8(table, low_nibbles(first)),
                          _mm256_shuffle_epi8(table, high_nibbles(first)),
                          _mm256_shuffle_epi8(table, low_nibbles(second)),
                          _mm256_shuffle_epi8(table, high_nibbles(second))},
                .scale = group.quarter_scale(block)};
    }

    /// A copy that goes through registers: gcc copies the struct through memory in halves, which stalls.
    [[gnu::always_inline]] static WeightBlock load_block(const WeightBlock& w) {
        return {.codes = {_mm256_load_si256(&w.codes[0]), _mm256_load_si256(&w.codes[1]),
                          _mm256_load_si256(&w.codes[2]), _mm256_load_si256(&w.codes[3])},
                .scale = _mm256_load_ps(reinterpret_cast<const float*>(&w.scale))};
    }

    static void decode(const PackedChunk& chunk, std::int64_t position, Decoded& decoded) {
        for (int g = 0; g < kGroups; ++g) {
            WeightBlock* out = decoded.blocks[g] + position * kPackedChunkBlocks;
            for (int block = 0; block < kPackedChunkBlocks; ++block)
                out[block] = decode_block(PackedGroup(chunk, g), block);
        }
    }

    template <int kRows>
    [[gnu::noinline]] static void multiply(const Decoded& decoded, std::int64_t num_blocks,
                                           const std::uint8_t* rows, std::size_t stride,
                                           float (*sums)[kPackedTileRows]) {
        for (int half = 0; half < 2; ++half) {
            const WeightBlock* w = decoded.blocks[2 * half];
            add_blocks<kRows>(
                [w](int group, std::int64_t block) {
                    return load_block(w[group * kStepChunks * kPackedChunkBlocks + block]);
                },
                num_blocks, rows, stride, sums, half);
        }
    }

    template <int kRows>
    [[gnu::noinline]] static void multiply(const PackedChunk& chunk, std::int64_t num_blocks,
                                           const std::uint8_t* rows, std::size_t stride,
                                           float (*sums)[kPackedTileRows]) {
        for (int half = 0; half < 2; ++half) {
            const PackedGroup low(chunk, 2 * half);
            const PackedGroup high(chunk, 2 * half + 1);
            add_blocks<kRows>(
                [&](int group, std::int64_t block) { return decode_block(group == 0 ? low : high, block); },
                num_blocks, rows, stride, sums, half);
        }
    }

private:
    /// weights(group, block) of the two groups of a half.
    template <int kRows, class Weights>
    [[gnu::always_inline]] static void add_blocks(const Weights& weights, std::int64_t num_blocks,
                                                  const std::uint8_t* rows, std::size_t stride,
                                                  float (*sums)[kPackedTileRows], int half) {
        __m256 low[kRows];
        __m256 high[kRows];
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
            low[r] = _mm256_load_ps(sums[r] + half * kPackedHalfRows);
            high[r] = _mm256_load_ps(sums[r] + half * kPackedHalfRows + kLanes);
        }
        for (std::int64_t block = 0; block < num_blocks; ++block) {
            const WeightBlock w_low = weights(0, block);
            const WeightBlock w_high = weights(1, block);
#pragma GCC unroll 8
            for (int r = 0; r < kRows; ++r) {
                const auto& x = reinterpret_cast<const EncodedBlock*>(rows + r * stride)[block];
                low[r] = _mm256_fmadd_ps(scaled_dot(w_low, x), w_low.scale, low[r]);
                high[r] = _mm256_fmadd_ps(scaled_dot(w_high, x), w_high.scale, high[r]);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
            _mm256_store_ps(sums[r] + half * kPackedHalfRows, low[r]);
            _mm256_store_ps(sums[r] + half * kPackedHalfRows + kLanes, high[r]);
        }
    }

    [[gnu::always_inline]] static __m256 scaled_dot(const WeightBlock& w, const EncodedBlock& x) {
        const auto broadcast = [](const void* four_bytes) {
            std::int32_t value;
            __builtin_memcpy(&value, four_bytes, 4);
            return _mm256_set1_epi32(value);
        };
        const auto part = [&](int i) { return _mm256_maddubs_epi16(w.codes[i], broadcast(x.codes + 4 * i)); };
        const __m256i sums =
            _mm256_add_epi16(_mm256_add_epi16(part(0), part(1)), _mm256_add_epi16(part(2), part(3)));
        const __m256i bits =
            _mm256_add_epi32(_mm256_madd_epi16(sums, broadcast(x.multiplier)), broadcast(&x.start));
        return _mm256_sub_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps(x.shift));
    }
};

/// bf16 activations, as floats in a panel.
struct W4a16 {
    static constexpr std::int64_t kRowStep = 6;
    static constexpr std::int64_t kFewRows = 2;
    static constexpr std::int64_t kStepChunks = 2;
    struct Decoded {
        float values[2][kStepChunks * kPackedChunkCols][kPackedHalfRows];
    };

    static constexpr std::size_t kBlockBytes = kBlock * sizeof(float);

    static void store_blocks(const Block16 (&x)[kLanes], Floats /*input_scale*/, int count, std::uint8_t* out,
                             std::size_t out_stride) {
        for (int i = 0; i < count; ++i) store_block(x[i], out + static_cast<std::size_t>(i) * out_stride);
    }

    static void load_row(const std::uint8_t* bf16, std::int64_t cols, std::uint8_t* row) {
        const auto* values = reinterpret_cast<const std::uint16_t*>(bf16);
        for (std::int64_t block = 0; block < cols / kBlock; ++block)
            store_block(load_bf16_block(values + block * kBlock), row + block * kBlockBytes);
    }

    static void store_block(Block16 x, std::uint8_t* out) {
        _mm256_storeu_ps(reinterpret_cast<float*>(out), x.low.value);
        _mm256_storeu_ps(reinterpret_cast<float*>(out) + kLanes, x.high.value);
    }

    /// Columns 8 i .. 8 i + 7 of 8 rows, a row a lane.
    struct Columns {
        __m256i even, odd;  // bytes 4 * e2m1
        __m256 scale;       // 2^-26 * e4m3

        [[gnu::always_inline]] Columns(const PackedGroup& group, std::int64_t i)
            : scale(_mm256_mul_ps(group.quarter_scale(i / 2), _mm256_set1_ps(0x1p-24F))) {
            const __m256i table = _mm256_broadcastsi128_si256(
                _mm_setr_epi8(0, 2, 4, 6, 8, 12, 16, 24, 0, -2, -4, -6, -8, -12, -16, -24));
            even = _mm256_shuffle_epi8(table, low_nibbles(group.codes(i)));
            odd = _mm256_shuffle_epi8(table, high_nibbles(group.codes(i)));
        }

        /// The exact weights of column 8 i + k. As the upper byte of an integer a code has its sign.
        [[gnu::always_inline]] __m256 column(int k) const {
            constexpr int kZeros = 0x808080;  // of the three bytes below
            const int byte = k / 2;
            const __m256i to_upper_byte = _mm256_broadcastsi128_si256(
                _mm_setr_epi32(byte << 24 | kZeros, (byte + 4) << 24 | kZeros, (byte + 8) << 24 | kZeros,
                               (byte + 12) << 24 | kZeros));
            const __m256i upper_byte = _mm256_shuffle_epi8(k % 2 == 0 ? even : odd, to_upper_byte);
            return _mm256_mul_ps(_mm256_cvtepi32_ps(upper_byte), scale);
        }
    };

    static void decode(const PackedChunk& chunk, std::int64_t position, Decoded& decoded) {
        for (int g = 0; g < kGroups; ++g) {
            const PackedGroup group(chunk, g);
            for (int i = 0; i < kPackedChunkCols / 8; ++i) {
                const Columns columns(group, i);
                float(*out)[kPackedHalfRows] =
                    decoded.values[g / 2] + position * kPackedChunkCols + std::int64_t{i} * 8;
#pragma GCC unroll 8
                for (int k = 0; k < 8; ++k) _mm256_store_ps(out[k] + g % 2 * kLanes, columns.column(k));
            }
        }
    }

    template <int kRows>
    [[gnu::noinline]] static void multiply(const Decoded& decoded, std::int64_t num_blocks,
                                           const std::uint8_t* rows, std::size_t stride,
                                           float (*sums)[kPackedTileRows]) {
        for (int half = 0; half < 2; ++half) {
            __m256 low[kRows];
            __m256 high[kRows];
#pragma GCC unroll 8
            for (int r = 0; r < kRows; ++r) {
                low[r] = _mm256_load_ps(sums[r] + half * kPackedHalfRows);
                high[r] = _mm256_load_ps(sums[r] + half * kPackedHalfRows + kLanes);
            }
            for (std::int64_t k = 0; k < num_blocks * kBlock; ++k) {
                const __m256 w_low = _mm256_load_ps(decoded.values[half][k]);
                const __m256 w_high = _mm256_load_ps(decoded.values[half][k] + kLanes);
#pragma GCC unroll 8
                for (int r = 0; r < kRows; ++r) {
                    const __m256 x = _mm256_set1_ps(reinterpret_cast<const float*>(rows + r * stride)[k]);
                    low[r] = _mm256_fmadd_ps(x, w_low, low[r]);
                    high[r] = _mm256_fmadd_ps(x, w_high, high[r]);
                }
            }
#pragma GCC unroll 8
            for (int r = 0; r < kRows; ++r) {
                _mm256_store_ps(sums[r] + half * kPackedHalfRows, low[r]);
                _mm256_store_ps(sums[r] + half * kPackedHalfRows + kLanes, high[r]);
            }
        }
    }

    /// All 32 rows side by side, because one chain of dependent additions a row would leave the units idle.
    template <int kRows>
    [[gnu::noinline]] static void multiply(const PackedChunk& chunk, std::int64_t num_blocks,
                                           const std::uint8_t* rows, std::size_t stride,
                                           float (*sums)[kPackedTileRows]) {
        __m256 sum[kGroups][kRows];
        for (int g = 0; g < kGroups; ++g) {
#pragma GCC unroll 8
            for (int r = 0; r < kRows; ++r) sum[g][r] = _mm256_load_ps(sums[r] + g * kLanes);
        }
        for (std::int64_t i = 0; i < 2 * num_blocks; ++i) {
            const Columns columns[kGroups] = {{PackedGroup(chunk, 0), i},
                                              {PackedGroup(chunk, 1), i},
                                              {PackedGroup(chunk, 2), i},
                                              {PackedGroup(chunk, 3), i}};
#pragma GCC unroll 8
            for (int k = 0; k < 8; ++k) {
                __m256 x[kRows];
#pragma GCC unroll 2
                for (int r = 0; r < kRows; ++r)
                    x[r] = _mm256_set1_ps(reinterpret_cast<const float*>(rows + r * stride)[8 * i + k]);
#pragma GCC unroll 4
                for (int g = 0; g < kGroups; ++g) {
                    const __m256 w = columns[g].column(k);
#pragma GCC unroll 2
                    for (int r = 0; r < kRows; ++r) sum[g][r] = _mm256_fmadd_ps(x[r], w, sum[g][r]);
                }
            }
        }
        for (int g = 0; g < kGroups; ++g) {
#pragma GCC unroll 8
            for (int r = 0; r < kRows; ++r) _mm256_store_ps(sums[r] + g * kLanes, sum[g][r]);
        }
    }
};

/// Rows of a panel, a cache line more than they need: a stride of a power of two would put the lines that are
/// read together into one set of the cache.
template <class Mode>
std::size_t row_stride(std::int64_t cols) {
    return static_cast<std::size_t>(cols / kBlock) * Mode::kBlockBytes + 64;
}

/// Rows that share a decoded tile: they are read once a tile, so they should stay in the second cache.
template <class Mode>
std::int64_t rows_at_once(std::int64_t cols) {
    const auto fitting = kPanelBytes / static_cast<std::int64_t>(row_stride<Mode>(cols));
    return fitting < 4 * Mode::kRowStep ? 4 * Mode::kRowStep : smaller(fitting, kMaxRows);
}

/// call.operator()<count>() for a count of 1 to 6.
template <class Call>
void with_count(std::int64_t count, const Call& call) {
    switch (count) {
        case 1:
            return call.template operator()<1>();
        case 2:
            return call.template operator()<2>();
        case 3:
            return call.template operator()<3>();
        case 4:
            return call.template operator()<4>();
        case 5:
            return call.template operator()<5>();
        default:
            return call.template operator()<6>();
    }
}

template <class Mode>
struct Scratch {
    typename Mode::Decoded decoded;
    alignas(64) PackedChunk chunk;
    float sums[kMaxRows][kPackedTileRows];
};

template <class Mode>
std::size_t scratch_bytes(std::int64_t max_rows, std::int64_t, std::int64_t) {
    return sizeof(Scratch<Mode>) - sizeof(Scratch<Mode>::sums) +
           static_cast<std::size_t>(smaller(max_rows, kMaxRows)) * sizeof(Scratch<Mode>::sums[0]);
}

/// sums[r] = panel[r] . (the 32 rows of the tile)
template <class Mode, class Tiles>
void multiply_tile(const Tiles& tiles, std::int64_t tile, std::int64_t cols, const std::uint8_t* panel,
                   std::int64_t num_rows, Scratch<Mode>& scratch) {
    for (std::int64_t r = 0; r < num_rows; ++r) {
        for (int lane = 0; lane < kPackedTileRows; lane += kLanes)
            _mm256_store_ps(scratch.sums[r] + lane, _mm256_setzero_ps());
    }
    const std::size_t stride = row_stride<Mode>(cols);
    const std::int64_t num_blocks = cols / kBlock;
    if (num_rows <= Mode::kFewRows) {
        with_count(num_rows, [&]<int kCount>() {
            constexpr int kRows = kCount <= Mode::kFewRows ? kCount : 1;
            for (std::int64_t block = 0; block < num_blocks; block += kPackedChunkBlocks) {
                const PackedChunk& chunk = tiles.chunk(tile, block / kPackedChunkBlocks, scratch.chunk);
                Mode::template multiply<kRows>(chunk, smaller(kPackedChunkBlocks, num_blocks - block),
                                               panel + static_cast<std::size_t>(block) * Mode::kBlockBytes,
                                               stride, scratch.sums);
            }
        });
        return;
    }
    const std::int64_t num_steps = (num_rows + Mode::kRowStep - 1) / Mode::kRowStep;
    constexpr std::int64_t kStepBlocks = Mode::kStepChunks * kPackedChunkBlocks;
    for (std::int64_t block = 0; block < num_blocks; block += kStepBlocks) {
        const std::int64_t count = smaller(kStepBlocks, num_blocks - block);
        for (std::int64_t i = 0; i * kPackedChunkBlocks < count; ++i) {
            Mode::decode(tiles.chunk(tile, block / kPackedChunkBlocks + i, scratch.chunk), i,
                         scratch.decoded);
        }
        for (std::int64_t step = 0; step < num_steps; ++step) {
            const std::int64_t first = step * num_rows / num_steps;
            const std::int64_t last = (step + 1) * num_rows / num_steps;
            const std::uint8_t* rows = panel + static_cast<std::size_t>(first) * stride +
                                       static_cast<std::size_t>(block) * Mode::kBlockBytes;
            with_count(last - first, [&]<int kCount>() {
                Mode::template multiply<kCount>(scratch.decoded, count, rows, stride, scratch.sums + first);
            });
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
    const std::size_t stride = row_stride<Mode>(size);
    Mode::store_blocks(h, {_mm256_load_ps(input_scale)}, count,
                       task.h_panel + static_cast<std::size_t>(r) * stride +
                           static_cast<std::size_t>(i / kBlock) * Mode::kBlockBytes,
                       stride);
}

template <class Mode, class Tiles>
void gate_up(const GateUpTask& task) {
    auto& scratch = *reinterpret_cast<Scratch<Mode>*>(task.scratch);
    const Tiles tiles(task);
    const std::int64_t step = rows_at_once<Mode>(task.hidden_size);
    for (std::int64_t first_row = 0; first_row < task.num_rows; first_row += step) {
        const std::int64_t num_rows = smaller(step, task.num_rows - first_row);
        const std::uint8_t* panel =
            task.panel + static_cast<std::size_t>(first_row) * row_stride<Mode>(task.hidden_size);
        for (std::int64_t i = task.first; i < task.last; i += kPackedHalfRows) {
            multiply_tile<Mode>(tiles, i / kPackedHalfRows, task.hidden_size, panel, num_rows, scratch);
            for (std::int64_t r = 0; r < num_rows; r += kLanes) {
                const int count = static_cast<int>(smaller(kLanes, num_rows - r));
                store_h<Mode>(task, first_row + r, count, i, scratch.sums + r);
            }
        }
    }
}

template <class Mode, class Tiles>
void down(const DownTask& task) {
    auto& scratch = *reinterpret_cast<Scratch<Mode>*>(task.scratch);
    const Tiles tiles(task);
    const std::int64_t step = rows_at_once<Mode>(task.intermediate_size);
    for (std::int64_t first_row = 0; first_row < task.num_rows; first_row += step) {
        const std::int64_t num_rows = smaller(step, task.num_rows - first_row);
        const std::uint8_t* panel =
            task.panel + static_cast<std::size_t>(first_row) * row_stride<Mode>(task.intermediate_size);
        for (std::int64_t c = task.first; c < task.last; c += kPackedTileRows) {
            multiply_tile<Mode>(tiles, c / kPackedTileRows, task.intermediate_size, panel, num_rows, scratch);
            for (std::int64_t r = 0; r < num_rows; ++r) {
                const __m256 scale = _mm256_set1_ps(task.scale[first_row + r]);
                float* y = task.y + (first_row + r) * task.y_stride + (c - task.first);
                for (int lane = 0; lane < kPackedTileRows; lane += kLanes) {
                    _mm256_store_ps(y + lane, _mm256_mul_ps(scale, _mm256_load_ps(scratch.sums[r] + lane)));
                }
            }
        }
    }
}

void encode_rows(const EncodeTask& task) {
    const std::int64_t num_blocks = task.cols / kBlock;
    for (std::int64_t r = task.first; r < task.last; ++r) {
        const std::int64_t source = task.index != nullptr ? task.index[r] : r;
        const std::uint16_t* values = task.values + source * task.cols;
        std::uint8_t* row = task.rows + static_cast<std::size_t>(r) * row_stride<W4a4>(task.cols);
        for (std::int64_t block = 0; block < num_blocks; block += kLanes) {
            const int count = static_cast<int>(smaller(kLanes, num_blocks - block));
            Block16 x[kLanes] = {};
            for (int i = 0; i < count; ++i) x[i] = load_bf16_block(values + (block + i) * kBlock);
            encode_blocks(x, Floats::set(task.input_scale[r]), count,
                          row + static_cast<std::size_t>(block) * sizeof(EncodedBlock), sizeof(EncodedBlock));
        }
    }
}

template <class Mode, std::size_t (*source_bytes)(std::int64_t)>
void gather_rows(const GatherTask& task) {
    for (std::int64_t r = task.first; r < task.last; ++r) {
        const std::int64_t source = task.index != nullptr ? task.index[r] : r;
        Mode::load_row(task.rows + static_cast<std::size_t>(source) * source_bytes(task.cols), task.cols,
                       task.panel + static_cast<std::size_t>(r) * row_stride<Mode>(task.cols));
    }
}

template <class Mode>
std::size_t panel_bytes(std::int64_t num_rows, std::int64_t cols) {
    return static_cast<std::size_t>(num_rows) * row_stride<Mode>(cols);
}

std::size_t bf16_row_bytes(std::int64_t cols) { return static_cast<std::size_t>(cols) * 2; }

template <class Mode, class Tiles, std::size_t (*encoded_bytes)(std::int64_t)>
constexpr Kernel make_kernel(const char* name, Precision precision, const PackedLayout* layout) {
    const bool is_w4a4 = precision == Precision::w4a4;
    return {.name = name,
            .needs = kAvx2,
            .precision = precision,
            .layout = layout,
            .min_rows = 1,
            .encodes_h = true,
            .encoded_bytes = encoded_bytes,
            .encode_rows = is_w4a4 ? encode_rows : nullptr,
            .rows_per_group = 1,
            .panel_bytes = panel_bytes<Mode>,
            .gather_rows = gather_rows<Mode, encoded_bytes>,
            .gate_up_tile = kPackedHalfRows,
            .down_tile = kPackedTileRows,
            .scratch_bytes = scratch_bytes<Mode>,
            .gate_up = gate_up<Mode, Tiles>,
            .down = down<Mode, Tiles>,
            .combine = combine,
            .order = {},
            // Of each 11 vector operations, 4 are vpmaddubsw; 6 share its two pipes on AMD, and on Intel all
            // 11 share three ports.
            .peak = is_w4a4 ? "vpmaddubsw" : "avx2_fma",
            .peak_share_amd = is_w4a4 ? 4.0 / 6.0 : 1.0,
            .peak_share_intel = is_w4a4 ? 2.0 / (11.0 / 3.0) : 1.0};
}

}  // namespace

extern const Kernel kW4a16, kW4a16InPlace, kW4a4, kW4a4InPlace;
const Kernel kW4a16 =
    make_kernel<W4a16, PackedTiles, bf16_row_bytes>("avx2_w4a16", Precision::w4a16, &kAvx2PackedLayout);
const Kernel kW4a16InPlace =
    make_kernel<W4a16, InPlaceTiles, bf16_row_bytes>("avx2_w4a16_in_place", Precision::w4a16, nullptr);
const Kernel kW4a4 =
    make_kernel<W4a4, PackedTiles, row_stride<W4a4>>("avx2_w4a4", Precision::w4a4, &kAvx2PackedLayout);
const Kernel kW4a4InPlace =
    make_kernel<W4a4, InPlaceTiles, row_stride<W4a4>>("avx2_w4a4_in_place", Precision::w4a4, nullptr);

}  // namespace moe4::cpu::avx2
