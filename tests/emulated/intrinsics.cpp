// Compiled twice: with the compiler's immintrin.h as MOE4_INTRINSICS = instructions, and with the one of this
// folder as emulations. Nothing of the standard library, as in every file with flags of its own.
#include "emulated/intrinsics.hpp"

#include <immintrin.h>

namespace moe4::testing {
namespace {

using namespace cpu;

template <class T>
[[gnu::always_inline]] inline T load_operand(const Operands& x, int i) {
    T value;
    __builtin_memcpy(&value, x.bytes[i], sizeof(value));
    return value;
}
[[gnu::always_inline]] inline void store_result(unsigned char* result, const auto& value) {
    __builtin_memcpy(result, &value, sizeof(value));
}

#define I512(i) load_operand<__m512i>(x, i)
#define F512(i) load_operand<__m512>(x, i)
#define I256(i) load_operand<__m256i>(x, i)
#define I128(i) load_operand<__m128i>(x, i)
#define K(i) load_operand<__mmask16>(x, i)
#define CALL(needs, lanes, ...)                                                 \
    {#__VA_ARGS__, needs, lanes, [](const Operands& x, unsigned char* result) { \
         static_cast<void>(x);                                                  \
         store_result(result, __VA_ARGS__);                                     \
     }},
#define STORED(...) \
    {#__VA_ARGS__, kAvx512, Lanes::integers, [](const Operands& x, unsigned char* result) { __VA_ARGS__; }},
#define INTEGERS(...) CALL(kAvx512, Lanes::integers, __VA_ARGS__)
#define FLOATS(...) CALL(kAvx512, Lanes::floats, __VA_ARGS__)

/// The one function with FP16, which the compiler would use for 16 bits of any kind elsewhere too.
[[gnu::target("avx512fp16")]] void multiply_halves(const Operands& x, unsigned char* result) {
    const __m512h product = _mm512_mul_ph(_mm512_castsi512_ph(I512(0)), _mm512_castsi512_ph(I512(1)));
    _mm512_store_si512(result, _mm512_castph_si512(product));
}

// clang-format off
constexpr Intrinsic kIntrinsics[] = {
    INTEGERS(_mm_load_si128(reinterpret_cast<const __m128i*>(x.bytes[1])))
    INTEGERS(_mm512_load_si512(x.bytes[1]))
    INTEGERS(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x.bytes[1] + 5)))
    INTEGERS(_mm_maskz_loadu_epi8(K(0), x.bytes[1] + 5))
    INTEGERS(_mm512_maskz_loadu_epi8(load_operand<__mmask64>(x, 0), x.bytes[1] + 5))
    FLOATS(_mm512_load_ps(reinterpret_cast<const float*>(x.bytes[1])))
    FLOATS(_mm512_maskz_loadu_ps(K(0), x.bytes[1] + 5))
    FLOATS(_mm512_setzero_ps())
    FLOATS(_mm512_set1_ps(load_operand<float>(x, 0)))
    FLOATS(_mm512_setr_ps(0.0F, 1.0F, 2.0F, 3.0F, 4.0F, 5.0F, 6.0F, 7.0F, 8.0F, 9.0F, 10.0F, 11.0F, 12.0F, 13.0F, 14.0F, 15.0F))
    INTEGERS(_mm512_setzero_si512())
    INTEGERS(_mm512_set1_epi16(load_operand<short>(x, 0)))
    INTEGERS(_mm512_set1_epi32(load_operand<int>(x, 0)))
    INTEGERS(_mm512_set1_epi64(load_operand<long long>(x, 0)))
    INTEGERS(_mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15))
    INTEGERS(_mm256_setr_epi16(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15))
    INTEGERS(_mm512_set_epi16(31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18, 17, 16, 15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0))
    INTEGERS(_mm512_castps_si512(F512(0)))
    FLOATS(_mm512_castsi512_ps(I512(0)))
    FLOATS(_mm512_add_ps(F512(0), F512(1)))
    FLOATS(_mm512_sub_ps(F512(0), F512(1)))
    FLOATS(_mm512_mul_ps(F512(0), F512(1)))
    FLOATS(_mm512_div_ps(F512(0), F512(1)))
    FLOATS(_mm512_fmadd_ps(F512(0), F512(1), F512(2)))
    FLOATS(_mm512_max_ps(F512(0), F512(1)))
    FLOATS(_mm512_min_ps(F512(0), F512(1)))
    FLOATS(_mm512_reduce_max_ps(_mm512_cvtepi32_ps(I512(0))))  // of a NaN compilers differ
    FLOATS(_mm512_abs_ps(F512(0)))
    CALL(kAvx512 | kAvx512Bf16, Lanes::floats,
         _mm512_dpbf16_ps(F512(0), load_operand<__m512bh>(x, 1), load_operand<__m512bh>(x, 2)))
    INTEGERS(_mm512_cmp_ps_mask(F512(0), F512(1), _CMP_LT_OQ))
    INTEGERS(_mm512_cmp_ps_mask(F512(0), F512(1), _CMP_GE_OQ))
    INTEGERS(_mm512_cmp_ps_mask(F512(0), F512(1), _CMP_NEQ_OQ))
    INTEGERS(_mm512_cmp_ps_mask(F512(0), F512(1), _CMP_UNORD_Q))
    INTEGERS(_mm512_and_si512(I512(0), I512(1)))
    INTEGERS(_mm512_or_si512(I512(0), I512(1)))
    INTEGERS(_mm256_or_si256(I256(0), I256(1)))
    INTEGERS(_mm512_add_epi16(I512(0), I512(1)))
    INTEGERS(_mm512_add_epi32(I512(0), I512(1)))
    INTEGERS(_mm512_sub_epi32(I512(0), I512(1)))
    INTEGERS(_mm512_max_epi32(I512(0), I512(1)))
    INTEGERS(_mm512_reduce_add_epi32(_mm512_srai_epi32(I512(0), 4)))  // gcc adds signed integers: no overflow
    INTEGERS(_mm256_slli_epi16(I256(0), 7))
    INTEGERS(_mm512_slli_epi32(I512(0), 23))
    INTEGERS(_mm512_srli_epi16(I512(0), 4))
    INTEGERS(_mm512_srli_epi32(I512(0), 20))
    INTEGERS(_mm512_srai_epi16(I512(0), 3))
    INTEGERS(_mm512_srai_epi32(I512(0), 1))
    CALL(kAvx512 | kAvx512Vnni, Lanes::integers, _mm512_dpbusd_epi32(I512(0), I512(1), I512(2)))
    CALL(kAvx512 | kAvx512Vbmi, Lanes::integers, _mm512_multishift_epi64_epi8(I512(0), I512(1)))
    INTEGERS(_mm256_cvtepu8_epi16(I128(0)))
    INTEGERS(_mm512_cvtepu8_epi32(I128(0)))
    INTEGERS(_mm512_cvtepu16_epi32(I256(0)))
    INTEGERS(_mm512_cvtepi32_epi8(I512(0)))
    INTEGERS(_mm512_cvtepi32_epi16(I512(0)))
    INTEGERS(_mm512_cvtps_epi32(F512(0)))
    FLOATS(_mm512_cvtepi32_ps(I512(0)))
    FLOATS(_mm512_cvtph_ps(I256(0)))
    FLOATS(_mm512_mask_mov_ps(F512(1), K(0), F512(2)))
    INTEGERS(_mm512_mask_mov_epi32(I512(1), K(0), I512(2)))
    FLOATS(_mm512_mask_sub_ps(F512(0), K(0), F512(1), F512(2)))
    INTEGERS(_mm512_mask_sub_epi32(I512(0), K(0), I512(1), I512(2)))
    FLOATS(_mm512_maskz_mov_ps(K(0), F512(1)))
    FLOATS(_mm512_maskz_mul_ps(K(0), F512(1), F512(2)))
    FLOATS(_mm512_permutexvar_ps(I512(0), F512(1)))
    INTEGERS(_mm256_permutexvar_epi16(I256(0), I256(1)))
    INTEGERS(_mm512_permutexvar_epi16(I512(0), I512(1)))
    INTEGERS(_mm512_permutex2var_epi16(I512(0), I512(1), I512(2)))
    CALL(kAvx512 | kAvx512Vbmi, Lanes::integers, _mm512_permutexvar_epi8(I512(0), I512(1)))
    CALL(kAvx512 | kAvx512Vbmi, Lanes::integers,
         _mm512_maskz_permutexvar_epi8(load_operand<__mmask64>(x, 0), I512(1), I512(2)))
    INTEGERS(_mm_shuffle_epi8(I128(0), I128(1)))
    INTEGERS(_mm_unpacklo_epi8(I128(0), I128(1)))
    INTEGERS(_mm512_unpacklo_epi32(I512(0), I512(1)))
    INTEGERS(_mm512_unpackhi_epi32(I512(0), I512(1)))
    INTEGERS(_mm512_unpacklo_epi64(I512(0), I512(1)))
    INTEGERS(_mm512_unpackhi_epi64(I512(0), I512(1)))
    INTEGERS(_mm512_broadcast_i32x4(I128(0)))
    INTEGERS(_mm512_broadcast_i64x4(I256(0)))
    INTEGERS(_mm512_inserti32x4(I512(0), I128(1), 2))
    INTEGERS(_mm512_shuffle_i32x4(I512(0), I512(1), 0x44))
    INTEGERS(_mm512_shuffle_i32x4(I512(0), I512(1), 0xEE))
    INTEGERS(_mm512_shuffle_i32x4(I512(0), I512(1), 0x88))
    INTEGERS(_mm512_shuffle_i32x4(I512(0), I512(1), 0xDD))
    // Of these, what the store left in memory.
    STORED(_mm512_store_si512(result, I512(0)))
    STORED(_mm512_stream_si512(reinterpret_cast<__m512i*>(result), I512(0)))
    STORED(_mm512_store_ps(result, F512(0)))
    STORED(_mm512_stream_ps(reinterpret_cast<float*>(result), F512(0)))
    STORED(_mm_storeu_si128(reinterpret_cast<__m128i*>(result + 5), I128(0)))
    STORED(_mm256_storeu_si256(reinterpret_cast<__m256i*>(result + 5), I256(0)))
    STORED(_mm512_storeu_ps(result, F512(0)))
    {"_mm512_mul_ph", kAvx512 | kAvx512Fp16, Lanes::halves, multiply_halves},
};
// clang-format on

}  // namespace

Intrinsics MOE4_INTRINSICS() { return {kIntrinsics, sizeof(kIntrinsics) / sizeof(kIntrinsics[0])}; }

}  // namespace moe4::testing
