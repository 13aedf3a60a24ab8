#pragma once
// What the AVX2 kernels need beside their GEMMs: the lanes of the activations, rounding, quantising and
// combining. All of it lives in an anonymous namespace, so that no copy with these instructions can be linked
// elsewhere.
#include <immintrin.h>

#include <cstdint>

#include "backends/cpu/kernels/kernel.hpp"
#include "moe/activations.hpp"

namespace moe4::cpu::avx2 {
namespace {

constexpr int kBlock = kNvfp4BlockSize;
constexpr int kLanes = 8;
constexpr int kBias = 12;  // makes doubled codes unsigned

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

inline __m256i bf16_bits(Floats x) {
    const __m256i bits = _mm256_castps_si256(x.value);
    const __m256i upper = _mm256_srli_epi32(bits, 16);
    const __m256i to_even =
        _mm256_add_epi32(_mm256_and_si256(upper, _mm256_set1_epi32(1)), _mm256_set1_epi32(0x7FFF));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, to_even), 16);
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x.value, x.value, _CMP_UNORD_Q));
    const __m256i quiet = _mm256_or_si256(upper, _mm256_set1_epi32(0x40));
    return _mm256_blendv_epi8(rounded, quiet, is_nan);
}

inline void store_bf16(Block16 x, std::uint16_t* out) {
    const __m256i packed = _mm256_packus_epi32(bf16_bits(x.low), bf16_bits(x.high));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_permute4x64_epi64(packed, 0xD8));
}

inline Floats load_bf16(const std::uint16_t* x) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16))};
}
inline Block16 load_bf16_block(const std::uint16_t* x) { return {load_bf16(x), load_bf16(x + kLanes)}; }

inline Floats round_to_bf16(Floats x) { return {_mm256_castsi256_ps(_mm256_slli_epi32(bf16_bits(x), 16))}; }

/// What brings 2^-8 s_w and doubled codes to the value of a weight.
constexpr float kScaleFactor = 128.0F;

/// A block of NVFP4 activations, whose scale is multiplier * unit with a power of two as its unit. With d the
/// dot product of the biased weights, start + multiplier * d are the bits of the float
///     shift + multiplier * (exact dot product) * unit        shift = 1.5 * 2^23 * unit
/// so that one subtraction both converts and scales, exactly. Of a NaN the shift is NaN.
struct QuantizedBlock {
    std::int8_t codes[kBlock];  // doubled; of each 8 columns the even ones, then the odd ones, as nibbles lie
    std::int16_t multiplier[2];  // both alike
    std::int32_t start;
    float shift;
};

/// A block of bf16 activations as integers of 24 bits: 256 x = scale / kScaleFactor * integer. The balanced
/// digits to base 256 are signed bytes in the order of QuantizedBlock. The lowest are zero unless one value
/// is below a 128th of the largest: has_low. Of a NaN and of an infinity the scale is NaN.
struct FixedBlock {
    std::int8_t digits[2][kBlock];  // middle and highest
    std::int8_t low[kBlock];
    std::int32_t start, low_start;  // what the bias adds, negative
    float scale;
    std::int32_t has_low;
};
static_assert(sizeof(FixedBlock) == 64);

/// Rounds non-negative numbers of at most 448 to e4m3, ties to even.
inline __m256 round_to_e4m3(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i to_even = _mm256_add_epi32(
        _mm256_and_si256(_mm256_srli_epi32(bits, 20), _mm256_set1_epi32(1)), _mm256_set1_epi32(0x7FFFF));
    const __m256 normal = _mm256_castsi256_ps(
        _mm256_and_si256(_mm256_add_epi32(bits, to_even), _mm256_set1_epi32(static_cast<int>(0xFFF00000))));
    const __m256 shift = _mm256_set1_ps(0x1p14F);  // its last bit is 2^-9, as that of a subnormal e4m3
    const __m256 subnormal = _mm256_sub_ps(_mm256_add_ps(x, shift), shift);
    return _mm256_blendv_ps(normal, subnormal, _mm256_cmp_ps(x, _mm256_set1_ps(0x1p-6F), _CMP_LT_OQ));
}

/// Twice the nearest e2m1 of x, ties to the even code, 12 at most; NaN gives 12.
inline __m256i doubled_e2m1(Floats x) {
    // Adding 1.5 * 2^23 units in the last place rounds to that unit: a half below 2, one below 4, else two.
    const __m256 magnitude = _mm256_andnot_ps(_mm256_set1_ps(-0.0F), x.value);
    const __m256 is_2 = _mm256_cmp_ps(magnitude, _mm256_set1_ps(2.0F), _CMP_GE_OQ);
    const __m256 is_4 = _mm256_cmp_ps(magnitude, _mm256_set1_ps(4.0F), _CMP_GE_OQ);
    __m256 shift = _mm256_blendv_ps(_mm256_set1_ps(0x1.8p22F), _mm256_set1_ps(0x1.8p23F), is_2);
    shift = _mm256_blendv_ps(shift, _mm256_set1_ps(0x1.8p24F), is_4);
    __m256 rounded = _mm256_sub_ps(_mm256_add_ps(magnitude, shift), shift);
    rounded = _mm256_min_ps(rounded, _mm256_set1_ps(6.0F));
    const __m256i doubled = _mm256_cvtps_epi32(_mm256_add_ps(rounded, rounded));
    const __m256i is_negative = _mm256_castps_si256(_mm256_cmp_ps(x.value, _mm256_setzero_ps(), _CMP_LT_OQ));
    return _mm256_sub_epi32(_mm256_xor_si256(doubled, is_negative), is_negative);
}

/// Largest magnitude of every block, NaN where it has one: of magnitudes the bits are in order.
inline __m256 largest_magnitudes(const Block16 (&x)[kLanes]) {
    const __m256i magnitude = _mm256_set1_epi32(0x7FFFFFFF);
    __m256i largest[kLanes];
    for (int i = 0; i < kLanes; ++i) {
        largest[i] = _mm256_max_epi32(_mm256_and_si256(_mm256_castps_si256(x[i].low.value), magnitude),
                                      _mm256_and_si256(_mm256_castps_si256(x[i].high.value), magnitude));
    }
    __m256i two[kLanes / 2];  // of lanes i and i + 1 what is left to compare, side by side
    for (int i = 0; i < kLanes / 2; ++i) {
        two[i] = _mm256_max_epi32(_mm256_unpacklo_epi32(largest[2 * i], largest[2 * i + 1]),
                                  _mm256_unpackhi_epi32(largest[2 * i], largest[2 * i + 1]));
    }
    __m256i four[2];
    for (int i = 0; i < 2; ++i) {
        four[i] = _mm256_max_epi32(_mm256_unpacklo_epi64(two[2 * i], two[2 * i + 1]),
                                   _mm256_unpackhi_epi64(two[2 * i], two[2 * i + 1]));
    }
    return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_permute2x128_si256(four[0], four[1], 0x20),
                                                _mm256_permute2x128_si256(four[0], four[1], 0x31)));
}

/// 16 small integers in the order of the codes of packed weights.
inline __m128i code_bytes(__m256i low, __m256i high) {
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xD8);
    const __m128i in_order =
        _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    const __m128i evens_first = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    return _mm_shuffle_epi8(in_order, evens_first);
}

inline std::int32_t sum_of_lanes(__m256i x) {
    const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    const __m128i two = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
    return _mm_cvtsi128_si32(two) + _mm_extract_epi32(two, 1);
}

/// format::quantize_activation_block of eight blocks, operation by operation; the first `count` are written.
inline void encode_blocks(const Block16 (&x)[kLanes], Floats input_scale, int count, QuantizedBlock* out) {
    const __m256 largest = largest_magnitudes(x);
    const __m256 is_number = _mm256_cmp_ps(largest, largest, _CMP_ORD_Q);
    const __m256 ratio = _mm256_div_ps(_mm256_div_ps(largest, _mm256_set1_ps(6.0F)), input_scale.value);
    const __m256 is_scaled = _mm256_cmp_ps(input_scale.value, _mm256_setzero_ps(), _CMP_NEQ_OQ);
    const __m256 scale = _mm256_and_ps(round_to_e4m3(_mm256_min_ps(ratio, _mm256_set1_ps(448.0F))),
                                       _mm256_and_ps(is_scaled, is_number));
    const __m256 exponent = _mm256_and_ps(scale, _mm256_castsi256_ps(_mm256_set1_epi32(0x7F800000)));
    const __m256 unit =
        _mm256_mul_ps(_mm256_max_ps(exponent, _mm256_set1_ps(0x1p-6F)), _mm256_set1_ps(0x1p-3F));
    // Both operands' codes are doubled.
    const __m256 shift = _mm256_mul_ps(unit, _mm256_set1_ps(0x1.8p23F * kScaleFactor / 2));

    alignas(32) float steps[kLanes];
    alignas(32) float is_coded[kLanes];  // a mask
    alignas(32) std::int32_t multipliers[kLanes];
    alignas(32) std::int32_t shift_bits[kLanes];
    alignas(32) float shifts[kLanes];
    const __m256 step = _mm256_mul_ps(scale, input_scale.value);
    _mm256_store_ps(steps, step);
    _mm256_store_ps(is_coded, _mm256_cmp_ps(step, _mm256_setzero_ps(), _CMP_NEQ_OQ));
    _mm256_store_si256(reinterpret_cast<__m256i*>(multipliers),
                       _mm256_cvtps_epi32(_mm256_div_ps(scale, unit)));
    _mm256_store_si256(reinterpret_cast<__m256i*>(shift_bits), _mm256_castps_si256(shift));
    _mm256_store_ps(shifts, _mm256_blendv_ps(largest, shift, is_number));

    for (int i = 0; i < count; ++i) {
        const Floats divisor = Floats::set(steps[i]);
        const __m256i mask = _mm256_castps_si256(_mm256_broadcast_ss(&is_coded[i]));
        const __m256i low = _mm256_and_si256(doubled_e2m1(x[i].low / divisor), mask);
        const __m256i high = _mm256_and_si256(doubled_e2m1(x[i].high / divisor), mask);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out[i].codes), code_bytes(low, high));
        out[i].multiplier[0] = out[i].multiplier[1] = static_cast<std::int16_t>(multipliers[i]);
        out[i].start = shift_bits[i] - kBias * multipliers[i] * sum_of_lanes(_mm256_add_epi32(low, high));
        out[i].shift = shifts[i];
    }
}

/// The integers of moe::SumOrder::fixed_blocks of eight blocks; the first `count` are written.
inline void encode_blocks(const Block16 (&x)[kLanes], Floats /*input_scale*/, int count, FixedBlock* out) {
    const __m256 largest = largest_magnitudes(x);
    const __m256 infinity = _mm256_set1_ps(__builtin_inff());
    const __m256 is_finite = _mm256_cmp_ps(largest, infinity, _CMP_LT_OQ);
    // 127 * 2^16 units hold every 8 bits but ones alone, which one more in the last place makes a power of
    // two.
    const __m256i next_bf16 = _mm256_add_epi32(
        _mm256_castps_si256(_mm256_mul_ps(largest, _mm256_set1_ps(0x1p-22F))), _mm256_set1_epi32(0x10000));
    const __m256 unit =
        _mm256_max_ps(_mm256_and_ps(_mm256_castsi256_ps(next_bf16), infinity), _mm256_set1_ps(0x1p-126F));
    alignas(32) float inverses[kLanes];
    alignas(32) float is_coded[kLanes];  // a mask
    alignas(32) float scales[kLanes];
    _mm256_store_ps(inverses, _mm256_div_ps(_mm256_set1_ps(1.0F), unit));
    _mm256_store_ps(is_coded, is_finite);
    _mm256_store_ps(scales,
                    _mm256_blendv_ps(_mm256_set1_ps(__builtin_nanf("")),
                                     _mm256_mul_ps(unit, _mm256_set1_ps(256.0F * kScaleFactor)), is_finite));

    const auto last_digit = [](__m256i integers) {
        return _mm256_srai_epi32(_mm256_slli_epi32(integers, 24), 24);
    };
    const auto rest = [](__m256i integers) {
        return _mm256_srai_epi32(_mm256_add_epi32(integers, _mm256_set1_epi32(128)), 8);
    };
    for (int i = 0; i < count; ++i) {
        const Floats inverse = Floats::set(inverses[i]);
        const __m256i mask = _mm256_castps_si256(_mm256_broadcast_ss(&is_coded[i]));
        const __m256i first = _mm256_and_si256(_mm256_cvtps_epi32((x[i].low * inverse).value), mask);
        const __m256i second = _mm256_and_si256(_mm256_cvtps_epi32((x[i].high * inverse).value), mask);
        const __m128i low = code_bytes(last_digit(first), last_digit(second));
        const __m256i first_rest = rest(first);
        const __m256i second_rest = rest(second);
        const auto store = [](__m128i bytes, std::int8_t(&to)[kBlock]) {
            _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
        };
        store(low, out[i].low);
        store(code_bytes(last_digit(first_rest), last_digit(second_rest)), out[i].digits[0]);
        store(code_bytes(rest(first_rest), rest(second_rest)), out[i].digits[1]);
        const int sum_of_rest = sum_of_lanes(_mm256_add_epi32(first_rest, second_rest));
        const int sum = sum_of_lanes(_mm256_add_epi32(first, second));
        out[i].start = -kBias * sum_of_rest;
        out[i].low_start = -kBias * (sum - 256 * sum_of_rest);
        out[i].scale = scales[i];
        out[i].has_low = _mm_testz_si128(low, low) == 0;
    }
}

inline void combine(const CombineTask& task) {
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

}  // namespace
}  // namespace moe4::cpu::avx2
