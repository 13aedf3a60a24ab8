// AVX2 on the packed layout: eight weight rows in the lanes of a register.
//   w4a4   Weight codes become the unsigned bytes 2 * e2m1 + 12, activation codes the signed bytes 2 * e2m1:
//          vpmaddubsw multiplies and adds them without saturating (24 * 12 * 8 products in a lane < 2^15).
//          The bias costs 12 times the sum of the activations, known when they are encoded. Then one exact
//          product of scales and one fused multiply-add a block, as the contract has it.
//   w4a16  The exact weight e2m1 * e4m3 in fp32 and one fused multiply-add a value, k ascending.
// For many rows a piece of a tile is decoded once into L1; for few the codes are decoded in registers.
#include <immintrin.h>

#include "backends/cpu/packed_layout.hpp"
#include "moe/activations.hpp"

namespace moe4::cpu::avx2 {
namespace {

constexpr int kBlock = kNvfp4BlockSize;
constexpr int kLanes = 8;
constexpr int kGroups = kPackedTileRows / kLanes;  // of 8 weight rows in a tile
constexpr std::int64_t kMaxRows = 512;             // rows that share a decoded tile: bounds the scratch
constexpr int kPrefetchBytes = 3072;               // ahead in the stream of weights

std::int64_t smaller(std::int64_t a, std::int64_t b) { return a < b ? a : b; }

/// Eight floats as moe/activations.hpp wants them.
struct Floats {
    struct Int {
        __m256i value;
        static Int set(int x) { return {_mm256_set1_epi32(x)}; }
        friend Int operator+(Int a, Int b) { return {_mm256_add_epi32(a.value, b.value)}; }
        friend Int operator-(Int a, Int b) { return {_mm256_sub_epi32(a.value, b.value)}; }
        friend Int shift_left_23(Int a) { return {_mm256_slli_epi32(a.value, 23)}; }
        friend Int shift_right_1(Int a) { return {_mm256_srai_epi32(a.value, 1)}; }
    };

    __m256 value;
    static Floats set(float x) { return {_mm256_set1_ps(x)}; }
    static Floats from_bits(Int a) { return {_mm256_castsi256_ps(a.value)}; }
    friend Int bits(Floats a) { return {_mm256_castps_si256(a.value)}; }
    friend Floats operator+(Floats a, Floats b) { return {_mm256_add_ps(a.value, b.value)}; }
    friend Floats operator-(Floats a, Floats b) { return {_mm256_sub_ps(a.value, b.value)}; }
    friend Floats operator*(Floats a, Floats b) { return {_mm256_mul_ps(a.value, b.value)}; }
    friend Floats operator/(Floats a, Floats b) { return {_mm256_div_ps(a.value, b.value)}; }
    friend Floats fma(Floats a, Floats b, Floats c) { return {_mm256_fmadd_ps(a.value, b.value, c.value)}; }
    friend Floats min(Floats a, Floats b) { return {_mm256_min_ps(a.value, b.value)}; }
    friend Floats max(Floats a, Floats b) { return {_mm256_max_ps(a.value, b.value)}; }
};

/// The 16 values of one block.
struct Block16 {
    Floats low, high;
};

__m256i bf16_bits(Floats x) {
    const __m256i bits = _mm256_castps_si256(x.value);
    const __m256i upper = _mm256_srli_epi32(bits, 16);
    const __m256i to_even =
        _mm256_add_epi32(_mm256_and_si256(upper, _mm256_set1_epi32(1)), _mm256_set1_epi32(0x7FFF));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, to_even), 16);
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x.value, x.value, _CMP_UNORD_Q));
    const __m256i quiet = _mm256_or_si256(upper, _mm256_set1_epi32(0x40));
    return _mm256_blendv_epi8(rounded, quiet, is_nan);
}

void store_bf16(Block16 x, std::uint16_t* out) {
    const __m256i packed = _mm256_packus_epi32(bf16_bits(x.low), bf16_bits(x.high));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_permute4x64_epi64(packed, 0xD8));
}

Floats load_bf16(const std::uint16_t* x) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16))};
}
Block16 load_bf16_block(const std::uint16_t* x) { return {load_bf16(x), load_bf16(x + kLanes)}; }

Floats round_to_bf16(Floats x) { return {_mm256_castsi256_ps(_mm256_slli_epi32(bf16_bits(x), 16))}; }

/// A block of NVFP4 activations. An e4m3 byte shifted left by 20 is its value times 2^-120 as a float; what
/// undoes that, and the quarter that two doubled codes are too large by, is in the activation's scale.
struct EncodedBlock {
    std::int8_t codes[kBlock];  // doubled; of each 8 columns the even ones, then the odd ones, as nibbles lie
    std::int32_t bias;          // -12 * sum of codes
    float scale;                // 2^118 * e4m3
};
constexpr float kScaleFactor = 0x1p118F;

/// Rounds a non-negative number of at most 448 to e4m3, ties to even.
__m128 round_to_e4m3(__m128 x) {
    const __m128i bits = _mm_castps_si128(x);
    const __m128i to_even =
        _mm_add_epi32(_mm_and_si128(_mm_srli_epi32(bits, 20), _mm_set1_epi32(1)), _mm_set1_epi32(0x7FFFF));
    const __m128 normal = _mm_castsi128_ps(
        _mm_and_si128(_mm_add_epi32(bits, to_even), _mm_set1_epi32(static_cast<int>(0xFFF00000))));
    const __m128 shift = _mm_set1_ps(0x1p14F);  // its last bit is 2^-9, as that of a subnormal e4m3
    const __m128 subnormal = _mm_sub_ps(_mm_add_ps(x, shift), shift);
    return _mm_blendv_ps(normal, subnormal, _mm_cmplt_ps(x, _mm_set1_ps(0x1p-6F)));
}

/// Twice the nearest e2m1 of x, ties to the even code, saturating at 12.
__m256i doubled_e2m1(Floats x) {
    // Adding 1.5 * 2^23 units in the last place rounds to that unit: a half below 2, one below 4, else two.
    const __m256 magnitude = _mm256_andnot_ps(_mm256_set1_ps(-0.0F), x.value);
    const __m256 is_2 = _mm256_cmp_ps(magnitude, _mm256_set1_ps(2.0F), _CMP_GE_OQ);
    const __m256 is_4 = _mm256_cmp_ps(magnitude, _mm256_set1_ps(4.0F), _CMP_GE_OQ);
    __m256 shift = _mm256_blendv_ps(_mm256_set1_ps(0x1.8p22F), _mm256_set1_ps(0x1.8p23F), is_2);
    shift = _mm256_blendv_ps(shift, _mm256_set1_ps(0x1.8p24F), is_4);
    __m256 rounded = _mm256_sub_ps(_mm256_add_ps(magnitude, shift), shift);
    rounded = _mm256_min_ps(rounded, _mm256_set1_ps(6.0F));
    const __m256i doubled = _mm256_cvtps_epi32(_mm256_add_ps(rounded, rounded));
    return _mm256_sign_epi32(doubled, _mm256_or_si256(_mm256_castps_si256(x.value), _mm256_set1_epi32(1)));
}

/// format::quantize_activation_block, operation by operation.
void encode_block(Block16 x, float input_scale, EncodedBlock& out) {
    const __m256 sign = _mm256_set1_ps(-0.0F);
    const __m256 largest8 =
        _mm256_max_ps(_mm256_andnot_ps(sign, x.low.value), _mm256_andnot_ps(sign, x.high.value));
    __m128 largest = _mm_max_ps(_mm256_castps256_ps128(largest8), _mm256_extractf128_ps(largest8, 1));
    largest = _mm_max_ps(largest, _mm_movehl_ps(largest, largest));
    largest = _mm_max_ps(largest, _mm_movehdup_ps(largest));
    __m128 scale = _mm_setzero_ps();
    if (input_scale != 0.0F) {
        const __m128 ratio = _mm_div_ss(_mm_div_ss(largest, _mm_set_ss(6.0F)), _mm_set_ss(input_scale));
        scale = round_to_e4m3(_mm_min_ss(ratio, _mm_set_ss(448.0F)));
    }
    const Floats step = Floats::set(_mm_cvtss_f32(scale) * input_scale);
    const __m256 is_coded = _mm256_cmp_ps(step.value, _mm256_setzero_ps(), _CMP_NEQ_OQ);
    __m256i low = _mm256_and_si256(doubled_e2m1(x.low / step), _mm256_castps_si256(is_coded));
    __m256i high = _mm256_and_si256(doubled_e2m1(x.high / step), _mm256_castps_si256(is_coded));
    if (_mm256_movemask_ps(_mm256_cmp_ps(x.low.value, x.high.value, _CMP_UNORD_Q)) != 0) {
        low = high = _mm256_setzero_si256();
        scale = _mm_set_ss(__builtin_nanf(""));
    }
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xD8);
    const __m128i in_order =
        _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    const __m128i evens_first = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    const __m128i codes = _mm_shuffle_epi8(in_order, evens_first);
    const __m128i sums = _mm_sad_epu8(_mm_add_epi8(codes, _mm_set1_epi8(12)), _mm_setzero_si128());
    const int biased_sum = _mm_cvtsi128_si32(sums) + _mm_extract_epi16(sums, 4);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out.codes), codes);
    out.bias = -12 * (biased_sum - 12 * kBlock);
    out.scale = _mm_cvtss_f32(scale) * kScaleFactor;
}

/// What 8 rows of weights hold of 16 columns: bytes 2 * e2m1 + 12, four columns of a row in each lane.
struct WeightBlock {
    __m256i codes[4];
    __m256 scale;  // 2^-120 * e4m3
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
    __m256 scale(std::int64_t block) const {
        const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(&half->scale[block][row]));
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu8_epi32(bytes), 20));
    }
};

__m256i low_nibbles(__m256i codes) { return _mm256_and_si256(codes, _mm256_set1_epi8(15)); }
__m256i high_nibbles(__m256i codes) { return low_nibbles(_mm256_srli_epi16(codes, 4)); }

void prefetch(const PackedChunk& chunk) {
    const auto* ahead = reinterpret_cast<const char*>(&chunk) + kPrefetchBytes;
    for (std::size_t i = 0; i < sizeof(PackedChunk); i += 64) _mm_prefetch(ahead + i, _MM_HINT_T0);
}

/// NVFP4 activations.
struct W4a4 {
    static constexpr std::int64_t kRowStep = 6;     // rows whose sums fill the registers
    static constexpr std::int64_t kFewRows = 4;     // up to which decoding in registers is faster
    static constexpr std::int64_t kStepChunks = 4;  // decoded together, within L1
    struct Decoded {
        WeightBlock blocks[kGroups][kStepChunks * kPackedChunkBlocks];
    };

    static std::size_t row_bytes(std::int64_t cols) {
        return static_cast<std::size_t>(cols / kBlock) * sizeof(EncodedBlock);
    }

    static void store_block(Block16 x, float input_scale, std::uint8_t* row, std::int64_t block) {
        encode_block(x, input_scale, reinterpret_cast<EncodedBlock*>(row)[block]);
    }

    static void load_row(const std::uint8_t* encoded, std::int64_t cols, std::uint8_t* row) {
        for (std::size_t i = 0; i < row_bytes(cols); i += 8) __builtin_memcpy(row + i, encoded + i, 8);
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
                .scale = group.scale(block)};
    }

    static void decode(const PackedChunk& chunk, std::int64_t position, Decoded& decoded) {
        for (int g = 0; g < kGroups; ++g) {
            WeightBlock* out = decoded.blocks[g] + position * kPackedChunkBlocks;
            for (int block = 0; block < kPackedChunkBlocks; ++block)
                out[block] = decode_block(PackedGroup(chunk, g), block);
        }
    }

    template <int kRows>
    static void multiply(const Decoded& decoded, std::int64_t num_blocks, const std::uint8_t* rows,
                         std::size_t row_bytes, float (*sums)[kPackedTileRows]) {
        for (int g = 0; g < kGroups; ++g) {
            add_blocks<kRows>([&](std::int64_t block) { return decoded.blocks[g][block]; }, num_blocks, rows,
                              row_bytes, sums, g);
        }
    }

    template <int kRows>
    static void multiply(const PackedChunk& chunk, std::int64_t num_blocks, const std::uint8_t* rows,
                         std::size_t row_bytes, float (*sums)[kPackedTileRows]) {
        for (int g = 0; g < kGroups; ++g) {
            const PackedGroup group(chunk, g);
            add_blocks<kRows>([&](std::int64_t block) { return decode_block(group, block); }, num_blocks,
                              rows, row_bytes, sums, g);
        }
    }

private:
    template <int kRows, class Weights>
    [[gnu::always_inline]] static void add_blocks(const Weights& weights, std::int64_t num_blocks,
                                                  const std::uint8_t* rows, std::size_t row_bytes,
                                                  float (*sums)[kPackedTileRows], int group) {
        __m256 sum[kRows];
        for (int r = 0; r < kRows; ++r) sum[r] = _mm256_load_ps(sums[r] + group * kLanes);
        for (std::int64_t block = 0; block < num_blocks; ++block) {
            const WeightBlock w = weights(block);
#pragma GCC unroll 8
            for (int r = 0; r < kRows; ++r) {
                const auto& x = reinterpret_cast<const EncodedBlock*>(rows + r * row_bytes)[block];
                const __m256 scale = _mm256_mul_ps(w.scale, _mm256_set1_ps(x.scale));
                sum[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot(w, x)), scale, sum[r]);
            }
        }
        for (int r = 0; r < kRows; ++r) _mm256_store_ps(sums[r] + group * kLanes, sum[r]);
    }

    [[gnu::always_inline]] static __m256i dot(const WeightBlock& w, const EncodedBlock& x) {
        const auto part = [&](int i) {
            std::int32_t codes;
            __builtin_memcpy(&codes, x.codes + 4 * i, 4);
            return _mm256_maddubs_epi16(w.codes[i], _mm256_set1_epi32(codes));
        };
        const __m256i sums =
            _mm256_add_epi16(_mm256_add_epi16(part(0), part(1)), _mm256_add_epi16(part(2), part(3)));
        return _mm256_add_epi32(_mm256_madd_epi16(sums, _mm256_set1_epi16(1)), _mm256_set1_epi32(x.bias));
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

    static std::size_t row_bytes(std::int64_t cols) { return static_cast<std::size_t>(cols) * 4; }

    static void store_block(Block16 x, float /*input_scale*/, std::uint8_t* row, std::int64_t block) {
        float* out = reinterpret_cast<float*>(row) + block * kBlock;
        _mm256_storeu_ps(out, x.low.value);
        _mm256_storeu_ps(out + kLanes, x.high.value);
    }

    static void load_row(const std::uint8_t* bf16, std::int64_t cols, std::uint8_t* row) {
        const auto* values = reinterpret_cast<const std::uint16_t*>(bf16);
        for (std::int64_t block = 0; block < cols / kBlock; ++block)
            store_block(load_bf16_block(values + block * kBlock), 0.0F, row, block);
    }

    /// Columns 8 i .. 8 i + 7 of the 8 rows, exact.
    [[gnu::always_inline]] static void decode_columns(const PackedGroup& group, int i, __m256 (&values)[8]) {
        const __m256i table = _mm256_broadcastsi128_si256(
            _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12));
        const __m256 scale = _mm256_mul_ps(group.scale(i / 2), _mm256_set1_ps(0x1p119F));
        const __m256i even = _mm256_shuffle_epi8(table, low_nibbles(group.codes(i)));
        const __m256i odd = _mm256_shuffle_epi8(table, high_nibbles(group.codes(i)));
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) {
            const auto column = [&](__m256i codes) {
                const __m256i doubled = _mm256_srai_epi32(_mm256_slli_epi32(codes, 24 - 8 * k), 24);
                return _mm256_mul_ps(_mm256_cvtepi32_ps(doubled), scale);
            };
            values[2 * k] = column(even);
            values[2 * k + 1] = column(odd);
        }
    }

    static void decode(const PackedChunk& chunk, std::int64_t position, Decoded& decoded) {
        for (int g = 0; g < kGroups; ++g) {
            const PackedGroup group(chunk, g);
            for (int i = 0; i < kPackedChunkCols / 8; ++i) {
                __m256 values[8];
                decode_columns(group, i, values);
                float(*out)[kPackedHalfRows] =
                    decoded.values[g / 2] + position * kPackedChunkCols + std::int64_t{i} * 8;
#pragma GCC unroll 8
                for (int k = 0; k < 8; ++k) _mm256_store_ps(out[k] + g % 2 * kLanes, values[k]);
            }
        }
    }

    template <int kRows>
    static void multiply(const Decoded& decoded, std::int64_t num_blocks, const std::uint8_t* rows,
                         std::size_t row_bytes, float (*sums)[kPackedTileRows]) {
        for (int half = 0; half < 2; ++half) {
            __m256 low[kRows];
            __m256 high[kRows];
            for (int r = 0; r < kRows; ++r) {
                low[r] = _mm256_load_ps(sums[r] + half * kPackedHalfRows);
                high[r] = _mm256_load_ps(sums[r] + half * kPackedHalfRows + kLanes);
            }
            for (std::int64_t k = 0; k < num_blocks * kBlock; ++k) {
                const __m256 w_low = _mm256_load_ps(decoded.values[half][k]);
                const __m256 w_high = _mm256_load_ps(decoded.values[half][k] + kLanes);
#pragma GCC unroll 8
                for (int r = 0; r < kRows; ++r) {
                    const __m256 x = _mm256_set1_ps(reinterpret_cast<const float*>(rows + r * row_bytes)[k]);
                    low[r] = _mm256_fmadd_ps(x, w_low, low[r]);
                    high[r] = _mm256_fmadd_ps(x, w_high, high[r]);
                }
            }
            for (int r = 0; r < kRows; ++r) {
                _mm256_store_ps(sums[r] + half * kPackedHalfRows, low[r]);
                _mm256_store_ps(sums[r] + half * kPackedHalfRows + kLanes, high[r]);
            }
        }
    }

    /// All 32 rows side by side, because one chain of dependent additions a row would leave the units idle.
    template <int kRows>
    static void multiply(const PackedChunk& chunk, std::int64_t num_blocks, const std::uint8_t* rows,
                         std::size_t row_bytes, float (*sums)[kPackedTileRows]) {
        __m256 sum[kGroups][kRows];
        for (int g = 0; g < kGroups; ++g) {
            for (int r = 0; r < kRows; ++r) sum[g][r] = _mm256_load_ps(sums[r] + g * kLanes);
        }
        for (int i = 0; i < 2 * num_blocks; ++i) {
#pragma GCC unroll 4
            for (int g = 0; g < kGroups; ++g) {
                __m256 values[8];
                decode_columns(PackedGroup(chunk, g), i, values);
#pragma GCC unroll 8
                for (int k = 0; k < 8; ++k) {
#pragma GCC unroll 2
                    for (int r = 0; r < kRows; ++r) {
                        const auto* x = reinterpret_cast<const float*>(rows + r * row_bytes);
                        sum[g][r] = _mm256_fmadd_ps(_mm256_set1_ps(x[8 * i + k]), values[k], sum[g][r]);
                    }
                }
            }
        }
        for (int g = 0; g < kGroups; ++g) {
            for (int r = 0; r < kRows; ++r) _mm256_store_ps(sums[r] + g * kLanes, sum[g][r]);
        }
    }
};

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
    float sums[kMaxRows][kPackedTileRows];
};

template <class Mode>
std::size_t scratch_bytes(std::int64_t max_rows, std::int64_t, std::int64_t) {
    return sizeof(Scratch<Mode>) - sizeof(Scratch<Mode>::sums) +
           static_cast<std::size_t>(smaller(max_rows, kMaxRows)) * sizeof(Scratch<Mode>::sums[0]);
}

/// sums[r] = panel[r] . (the 32 rows of the tile)
template <class Mode>
void multiply_tile(const PackedChunk* tile, std::int64_t cols, const std::uint8_t* panel,
                   std::int64_t num_rows, Scratch<Mode>& scratch) {
    for (std::int64_t r = 0; r < num_rows; ++r) {
        for (int lane = 0; lane < kPackedTileRows; lane += kLanes)
            _mm256_store_ps(scratch.sums[r] + lane, _mm256_setzero_ps());
    }
    const std::size_t row_bytes = Mode::row_bytes(cols);
    const std::int64_t num_blocks = cols / kBlock;
    if (num_rows <= Mode::kFewRows) {
        with_count(num_rows, [&]<int kCount>() {
            constexpr int kRows = kCount <= Mode::kFewRows ? kCount : 1;
            for (std::int64_t block = 0; block < num_blocks; block += kPackedChunkBlocks, ++tile) {
                prefetch(*tile);
                Mode::template multiply<kRows>(*tile, smaller(kPackedChunkBlocks, num_blocks - block),
                                               panel + Mode::row_bytes(block * kBlock), row_bytes,
                                               scratch.sums);
            }
        });
        return;
    }
    const std::int64_t num_steps = (num_rows + Mode::kRowStep - 1) / Mode::kRowStep;
    constexpr std::int64_t kStepBlocks = Mode::kStepChunks * kPackedChunkBlocks;
    for (std::int64_t block = 0; block < num_blocks; block += kStepBlocks) {
        const std::int64_t count = smaller(kStepBlocks, num_blocks - block);
        for (std::int64_t i = 0; i < (count + kPackedChunkBlocks - 1) / kPackedChunkBlocks; ++i, ++tile) {
            prefetch(*tile);
            Mode::decode(*tile, i, scratch.decoded);
        }
        for (std::int64_t step = 0; step < num_steps; ++step) {
            const std::int64_t first = step * num_rows / num_steps;
            const std::int64_t last = (step + 1) * num_rows / num_steps;
            const std::uint8_t* rows =
                panel + static_cast<std::size_t>(first) * row_bytes + Mode::row_bytes(block * kBlock);
            with_count(last - first, [&]<int kCount>() {
                Mode::template multiply<kCount>(scratch.decoded, count, rows, row_bytes,
                                                scratch.sums + first);
            });
        }
    }
}

std::int64_t tile_chunks(std::int64_t cols) { return (cols + kPackedChunkCols - 1) / kPackedChunkCols; }

/// 16 intermediates of a row: one block of h.
template <class Mode>
void store_h(const GateUpTask& task, std::int64_t r, std::int64_t i, const float* sums) {
    const auto activate = [&](int lane) {
        const Floats gate{_mm256_load_ps(sums + lane)};
        const Floats up{_mm256_load_ps(sums + kPackedHalfRows + lane)};
        return moe::Silu::apply(Floats::set(task.gate_scale[r]) * gate, Floats::set(task.up_scale[r]) * up);
    };
    const Block16 h{activate(0), activate(kLanes)};
    if (task.h_rows != nullptr) {
        store_bf16(h, task.h_rows + r * task.intermediate_size + i);
    } else {
        std::uint8_t* row =
            task.h_panel + static_cast<std::size_t>(r) * Mode::row_bytes(task.intermediate_size);
        Mode::store_block({round_to_bf16(h.low), round_to_bf16(h.high)}, task.input_scale[r], row,
                          i / kBlock);
    }
}

template <class Mode>
void gate_up(const GateUpTask& task) {
    auto& scratch = *reinterpret_cast<Scratch<Mode>*>(task.scratch);
    const auto* tiles = reinterpret_cast<const PackedChunk*>(task.expert->packed_gate_up);
    for (std::int64_t first_row = 0; first_row < task.num_rows; first_row += kMaxRows) {
        const std::int64_t num_rows = smaller(kMaxRows, task.num_rows - first_row);
        const std::uint8_t* panel =
            task.panel + static_cast<std::size_t>(first_row) * Mode::row_bytes(task.hidden_size);
        for (std::int64_t i = task.first; i < task.last; i += kPackedHalfRows) {
            const PackedChunk* tile = tiles + i / kPackedHalfRows * tile_chunks(task.hidden_size);
            multiply_tile<Mode>(tile, task.hidden_size, panel, num_rows, scratch);
            for (std::int64_t r = 0; r < num_rows; ++r)
                store_h<Mode>(task, first_row + r, i, scratch.sums[r]);
        }
    }
}

template <class Mode>
void down(const DownTask& task) {
    auto& scratch = *reinterpret_cast<Scratch<Mode>*>(task.scratch);
    const auto* tiles = reinterpret_cast<const PackedChunk*>(task.expert->packed_down);
    for (std::int64_t first_row = 0; first_row < task.num_rows; first_row += kMaxRows) {
        const std::int64_t num_rows = smaller(kMaxRows, task.num_rows - first_row);
        const std::uint8_t* panel =
            task.panel + static_cast<std::size_t>(first_row) * Mode::row_bytes(task.intermediate_size);
        for (std::int64_t c = task.first; c < task.last; c += kPackedTileRows) {
            const PackedChunk* tile = tiles + c / kPackedTileRows * tile_chunks(task.intermediate_size);
            multiply_tile<Mode>(tile, task.intermediate_size, panel, num_rows, scratch);
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

template <class Mode>
void encode_rows(const EncodeTask& task) {
    for (std::int64_t r = task.first; r < task.last; ++r) {
        const std::int64_t source = task.index != nullptr ? task.index[r] : r;
        const std::uint16_t* values = task.values + source * task.cols;
        std::uint8_t* row = task.rows + static_cast<std::size_t>(r) * Mode::row_bytes(task.cols);
        for (std::int64_t block = 0; block < task.cols / kBlock; ++block)
            Mode::store_block(load_bf16_block(values + block * kBlock), task.input_scale[r], row, block);
    }
}

template <class Mode, std::size_t (*source_bytes)(std::int64_t)>
void gather_rows(const GatherTask& task) {
    for (std::int64_t r = task.first; r < task.last; ++r) {
        const std::int64_t source = task.index != nullptr ? task.index[r] : r;
        Mode::load_row(task.rows + static_cast<std::size_t>(source) * source_bytes(task.cols), task.cols,
                       task.panel + static_cast<std::size_t>(r) * Mode::row_bytes(task.cols));
    }
}

template <class Mode>
std::size_t panel_bytes(std::int64_t num_rows, std::int64_t cols) {
    return static_cast<std::size_t>(num_rows) * Mode::row_bytes(cols);
}

void combine(const CombineTask& task) {
    for (std::int64_t t = 0; t < task.num_tokens; ++t) {
        for (std::int64_t c = 0; c < task.cols; c += kBlock) {
            Block16 out{Floats::set(0.0F), Floats::set(0.0F)};
            for (std::int64_t slot = t * task.top_k; slot < (t + 1) * task.top_k; ++slot) {
                if (task.slot_row[slot] < 0) continue;
                const float* y = task.y + task.slot_row[slot] * task.y_stride + c;
                const Floats weight = Floats::set(task.weight[slot]);
                out.low = fma(weight, Floats{_mm256_load_ps(y)}, out.low);
                out.high = fma(weight, Floats{_mm256_load_ps(y + kLanes)}, out.high);
            }
            const std::int64_t first = t * task.out_stride + c;
            if (task.out_f32 != nullptr) {
                _mm256_storeu_ps(task.out_f32 + first, out.low.value);
                _mm256_storeu_ps(task.out_f32 + first + kLanes, out.high.value);
            } else {
                store_bf16(out, task.out_bf16 + first);
            }
        }
    }
}

std::size_t bf16_row_bytes(std::int64_t cols) { return static_cast<std::size_t>(cols) * 2; }

template <class Mode, std::size_t (*encoded_bytes)(std::int64_t)>
constexpr Kernel make_kernel(const char* name, Precision precision) {
    return {.name = name,
            .needs = kAvx2,
            .precision = precision,
            .layout = &kPackedLayout,
            .min_rows = 1,
            .encodes_h = true,
            .encoded_bytes = encoded_bytes,
            .encode_rows = precision == Precision::w4a4 ? encode_rows<Mode> : nullptr,
            .rows_per_group = 1,
            .panel_bytes = panel_bytes<Mode>,
            .gather_rows = gather_rows<Mode, encoded_bytes>,
            .gate_up_tile = kPackedHalfRows,
            .down_tile = kPackedTileRows,
            .scratch_bytes = scratch_bytes<Mode>,
            .gate_up = gate_up<Mode>,
            .down = down<Mode>,
            .combine = combine};
}

}  // namespace

extern const Kernel kW4a16, kW4a4;
const Kernel kW4a16 = make_kernel<W4a16, bf16_row_bytes>("avx2_w4a16", Precision::w4a16);
const Kernel kW4a4 = make_kernel<W4a4, W4a4::row_bytes>("avx2_w4a4", Precision::w4a4);

}  // namespace moe4::cpu::avx2
