#pragma once
// What the files of AVX-512 kernels share: the lanes of the activations, rounding, quantising and combining.
// All of it lives in an anonymous namespace, so that no copy with these instructions can be linked elsewhere.
// Needs AVX-512 F, BW, VL and DQ.
#include <immintrin.h>

#include <cstdint>

#include "backends/cpu/kernels/kernel.hpp"
#include "moe/activations.hpp"

namespace moe4::cpu {
namespace {

constexpr int kLanes = 16;
static_assert(kLanes == kNvfp4BlockSize, "a vector of h is a block");

/// The vector type of moe/activations.hpp.
struct Lanes {
    struct Int {
        __m512i value;
        static Int set(int x) { return {_mm512_set1_epi32(x)}; }
        friend Int operator+(Int a, Int b) { return {_mm512_add_epi32(a.value, b.value)}; }
        friend Int operator-(Int a, Int b) { return {_mm512_sub_epi32(a.value, b.value)}; }
        friend Int shift_left_23(Int a) { return {_mm512_slli_epi32(a.value, 23)}; }
        friend Int shift_right_1(Int a) { return {_mm512_srai_epi32(a.value, 1)}; }
    };

    __m512 value;
    static Lanes set(float x) { return {_mm512_set1_ps(x)}; }
    static Lanes from_bits(Int a) { return {_mm512_castsi512_ps(a.value)}; }
    friend Int bits(Lanes a) { return {_mm512_castps_si512(a.value)}; }
    friend Lanes operator+(Lanes a, Lanes b) { return {_mm512_add_ps(a.value, b.value)}; }
    friend Lanes operator-(Lanes a, Lanes b) { return {_mm512_sub_ps(a.value, b.value)}; }
    friend Lanes operator*(Lanes a, Lanes b) { return {_mm512_mul_ps(a.value, b.value)}; }
    friend Lanes operator/(Lanes a, Lanes b) { return {_mm512_div_ps(a.value, b.value)}; }
    friend Lanes fma(Lanes a, Lanes b, Lanes c) { return {_mm512_fmadd_ps(a.value, b.value, c.value)}; }
    friend Lanes min(Lanes a, Lanes b) { return {_mm512_min_ps(a.value, b.value)}; }
    friend Lanes max(Lanes a, Lanes b) { return {_mm512_max_ps(a.value, b.value)}; }
};

/// Into L2: what comes next should not displace from L1 what is in use. Inline at every level: gcc takes a
/// function that only prefetches for one without effects and drops its calls.
[[gnu::always_inline]] inline void prefetch(const std::uint8_t* bytes, std::int64_t lines) {
    for (std::int64_t line = 0; line < lines; ++line)
        _mm_prefetch(reinterpret_cast<const char*>(bytes + line * 64), _MM_HINT_T1);
}

inline __m512 bf16_to_float(__m256i bits) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

/// format::bf16_from_float; vcvtneps2bf16 would flush subnormals.
inline __m256i bf16_from_float(__m512 x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x0040'0000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, is_nan, quiet), 16));
}

/// 2^-8 of 16 e4m3 values: a byte shifted left by 7 is that as a half. Exact for subnormal scales too, since
/// vcvtph2ps heeds neither FTZ nor DAZ.
inline __m512 decode_scales(const std::uint8_t* scales) {
    const __m256i bytes = _mm256_cvtepu8_epi16(_mm_load_si128(reinterpret_cast<const __m128i*>(scales)));
    return _mm512_cvtph_ps(_mm256_slli_epi16(bytes, 7));
}

/// A quantised block: format::quantize_activation_block with its scale as a number.
struct QuantizedBlock {
    __m512i doubled;  // twice the e2m1 values
    float scale;      // the e4m3 value
};

/// The e4m3 value next to x in [0, 448], ties to even.
inline float round_to_e4m3(float x) {
    if (x < 0x1p-6F) return (x * 512.0F + 0x1p23F - 0x1p23F) * 0x1p-9F;
    const auto bits = __builtin_bit_cast(std::uint32_t, x);
    return __builtin_bit_cast(float, (bits + 0x7FFFFU + ((bits >> 20) & 1U)) & 0xFFF0'0000U);
}

/// Twice the e2m1 value next to y, ties to even, 12 at most; NaN gives 12.
inline __m512i double_and_round_to_e2m1(__m512 y) {
    const __m512 doubled = _mm512_add_ps(y, y);
    const __m512 magnitude = _mm512_abs_ps(doubled);
    // Adding 1.5 * 2^23 times the step between neighbours rounds to it: 1 below 4, 2 below 8, then 4.
    __m512 rounder = _mm512_set1_ps(0x1.8p23F);
    rounder = _mm512_mask_mov_ps(rounder, _mm512_cmp_ps_mask(magnitude, _mm512_set1_ps(4.0F), _CMP_GE_OQ),
                                 _mm512_set1_ps(0x1.8p24F));
    rounder = _mm512_mask_mov_ps(rounder, _mm512_cmp_ps_mask(magnitude, _mm512_set1_ps(8.0F), _CMP_GE_OQ),
                                 _mm512_set1_ps(0x1.8p25F));
    const __m512 rounded = _mm512_sub_ps(_mm512_add_ps(magnitude, rounder), rounder);
    const __m512i capped = _mm512_cvtps_epi32(_mm512_min_ps(rounded, _mm512_set1_ps(12.0F)));
    const __mmask16 is_negative = _mm512_cmp_ps_mask(y, _mm512_setzero_ps(), _CMP_LT_OQ);
    return _mm512_mask_sub_epi32(capped, is_negative, _mm512_setzero_si512(), capped);
}

inline QuantizedBlock quantize_block(__m512 x, float global_scale) {
    const QuantizedBlock zero = {_mm512_setzero_si512(), 0.0F};
    if (_mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q) != 0) return {zero.doubled, __builtin_nanf("")};
    if (global_scale == 0.0F) return zero;
    const float ratio = _mm512_reduce_max_ps(_mm512_abs_ps(x)) / 6.0F / global_scale;
    const float block_scale = round_to_e4m3(ratio < 448.0F ? ratio : 448.0F);
    const float scale = block_scale * global_scale;
    if (scale == 0.0F) return {zero.doubled, block_scale};
    return {double_and_round_to_e2m1(_mm512_div_ps(x, _mm512_set1_ps(scale))), block_scale};
}

inline void combine(const CombineTask& task) {
    for (std::int64_t t = 0; t < task.num_tokens; ++t) {
        for (std::int64_t c = 0; c < task.cols; c += kLanes) {
            __m512 out = _mm512_setzero_ps();
            for (std::int64_t slot = t * task.top_k; slot < (t + 1) * task.top_k; ++slot) {
                if (task.slot_row[slot] < 0) continue;
                const float* y = task.y + task.slot_row[slot] * task.y_stride + c;
                out = _mm512_fmadd_ps(_mm512_set1_ps(task.weight[slot]), _mm512_load_ps(y), out);
            }
            const std::int64_t first = t * task.out_stride + c;
            if (task.out_f32 != nullptr) {
                _mm512_storeu_ps(task.out_f32 + first, out);
            } else {
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(task.out_bf16 + first), bf16_from_float(out));
            }
        }
    }
}

}  // namespace
}  // namespace moe4::cpu
