#pragma once
// The intrinsics that the AVX-512 and AMX kernels use, in plain C++, lane by lane as Intel's guide defines
// them. The tests that run those kernels on any CPU find this header before the compiler's;
// intrinsics_test.cpp holds every function to the instruction where the CPU has it.
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <type_traits>

namespace emulated {

/// Kind keeps apart registers that differ in type alone.
template <std::size_t kBytes, class Kind>
struct alignas(kBytes) Register {
    std::uint8_t bytes[kBytes];
};
using __m128i = Register<16, int>;
using __m256i = Register<32, int>;
using __m512i = Register<64, int>;
using __m512 = Register<64, float>;
using __m512h = Register<64, std::uint16_t>;
using __m512bh = Register<64, short>;
using __mmask16 = std::uint16_t;
using __mmask64 = std::uint64_t;

/// A register's bytes, anywhere in memory.
struct [[gnu::may_alias]] __m256i_u {
    std::uint8_t bytes[32];
    operator __m256i() const { return std::bit_cast<__m256i>(*this); }
};

enum { _CMP_UNORD_Q = 3, _CMP_NEQ_OQ = 12, _CMP_LT_OQ = 17, _CMP_GE_OQ = 29 };
enum { _MM_HINT_T0 = 3, _MM_HINT_T1 = 2 };

template <class Lane, class R>
std::array<Lane, sizeof(R) / sizeof(Lane)> lanes(const R& x) {
    return std::bit_cast<std::array<Lane, sizeof(R) / sizeof(Lane)>>(x);
}

/// Lane i is f(i). Not inlined into the kernels, whose loops are unrolled: that takes minutes to compile.
template <class Out, class Lane, class F>
[[gnu::noinline]] Out generate(const F& f) {
    std::array<Lane, sizeof(Out) / sizeof(Lane)> out;
    for (std::size_t i = 0; i < out.size(); ++i) out[i] = f(i);
    return std::bit_cast<Out>(out);
}

/// Lane i is f(lane i of every x).
template <class Out, class Lane, class F, class... Rs>
Out map(const F& f, const Rs&... xs) {
    const auto map_arrays = [&f](const auto&... all) {
        return generate<Out, decltype(f(all[0]...))>([&](std::size_t i) { return f(all[i]...); });
    };
    return map_arrays(lanes<Lane>(xs)...);
}

/// Lanes of x where the mask has a bit, of y elsewhere.
template <class Lane, class R>
R select(std::uint64_t mask, const R& x, const R& y) {
    const auto xs = lanes<Lane>(x);
    const auto ys = lanes<Lane>(y);
    return generate<R, Lane>([&](std::size_t i) { return (mask >> i & 1) != 0 ? xs[i] : ys[i]; });
}

/// Lane i is the lane of `table` that lane i of `indices` names; bits beyond are ignored.
template <class Lane, class R, class Table>
R permute(const R& indices, const Table& table) {
    const auto entries = lanes<Lane>(table);
    return map<R, Lane>([&](Lane i) { return entries[i % entries.size()]; }, indices);
}

/// Of every 128 bits, the lower or the upper lanes of x and y in turn.
template <class Lane, class R>
R unpack(const R& x, const R& y, bool is_upper) {
    constexpr std::size_t kHalf = 8 / sizeof(Lane);
    const std::array both{lanes<Lane>(x), lanes<Lane>(y)};
    return generate<R, Lane>([&](std::size_t i) {
        return both[i % 2][i / (2 * kHalf) * (2 * kHalf) + i % (2 * kHalf) / 2 + (is_upper ? kHalf : 0)];
    });
}

template <class R>
R load(const void* from) {
    R x;
    std::memcpy(&x, from, sizeof(x));
    return x;
}
template <class R>
void store(void* to, const R& x) {
    std::memcpy(to, &x, sizeof(x));
}

/// Where the aligned instructions fault.
template <class R>
void check_aligned(const void* address) {
    if (reinterpret_cast<std::uintptr_t>(address) % sizeof(R) != 0) std::abort();
}
template <class R>
R load_aligned(const void* from) {
    check_aligned<R>(from);
    return load<R>(from);
}
template <class R>
void store_aligned(void* to, const R& x) {
    check_aligned<R>(to);
    store(to, x);
}

/// Touches no lane without a bit in the mask: it is zero.
template <class R, class Lane>
R load_masked(std::uint64_t mask, const void* from) {
    return generate<R, Lane>([&](std::size_t i) {
        const auto* lane = static_cast<const char*>(from) + i * sizeof(Lane);
        return (mask >> i & 1) != 0 ? load<Lane>(lane) : Lane{0};
    });
}

inline float half_to_float(std::uint16_t half) {
    const int exponent = half >> 10 & 31;
    const int mantissa = half & 1023;
    float magnitude = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -24)
                                    : std::ldexp(static_cast<float>(1024 + mantissa), exponent - 25);
    if (exponent == 31) magnitude = mantissa == 0 ? INFINITY : NAN;
    return (half & 0x8000) != 0 ? -magnitude : magnitude;
}

/// To nearest, ties to even.
inline std::uint16_t float_to_half(float x) {
    const auto bits = std::bit_cast<std::uint32_t>(x);
    const float magnitude = std::fabs(x);
    std::uint32_t half = 0x7E00;
    if (magnitude >= 65520.0F) {
        half = 0x7C00;
    } else if (magnitude >= 0x1p-14F) {
        half = ((bits & 0x7FFFFFFF) - (112U << 23) + 0xFFF + (bits >> 13 & 1)) >> 13;
    } else if (magnitude < 0x1p-14F) {
        half = static_cast<std::uint32_t>(std::nearbyint(magnitude * 0x1p24F));
    }
    return static_cast<std::uint16_t>((bits >> 16 & 0x8000) | half);
}

inline void _mm_prefetch(const void*, int) {}
inline void _mm_sfence() {}

// Memory
inline __m128i _mm_load_si128(const void* p) { return load_aligned<__m128i>(p); }
inline __m512i _mm512_load_si512(const void* p) { return load_aligned<__m512i>(p); }
inline __m512 _mm512_load_ps(const void* p) { return load_aligned<__m512>(p); }
inline __m256i _mm256_loadu_si256(const void* p) { return load<__m256i>(p); }
inline __m128i _mm_maskz_loadu_epi8(__mmask16 k, const void* p) { return load_masked<__m128i, char>(k, p); }
inline __m512i _mm512_maskz_loadu_epi8(__mmask64 k, const void* p) {
    return load_masked<__m512i, char>(k, p);
}
inline __m512 _mm512_maskz_loadu_ps(__mmask16 k, const void* p) { return load_masked<__m512, float>(k, p); }
inline void _mm512_store_si512(void* p, __m512i a) { store_aligned(p, a); }
inline void _mm512_store_ps(void* p, __m512 a) { store_aligned(p, a); }
inline void _mm512_stream_si512(void* p, __m512i a) { store_aligned(p, a); }
inline void _mm512_stream_ps(void* p, __m512 a) { store_aligned(p, a); }
inline void _mm_storeu_si128(void* p, __m128i a) { store(p, a); }
inline void _mm256_storeu_si256(void* p, __m256i a) { store(p, a); }
inline void _mm512_storeu_ps(void* p, __m512 a) { store(p, a); }

// Constants
inline __m512 _mm512_setzero_ps() { return {}; }
inline __m512i _mm512_setzero_si512() { return {}; }
template <class R, class Lane>
R set1(Lane value) {
    return generate<R, Lane>([=](std::size_t) { return value; });
}
inline __m512 _mm512_set1_ps(float a) { return set1<__m512>(a); }
inline __m512i _mm512_set1_epi16(short a) { return set1<__m512i>(a); }
inline __m512i _mm512_set1_epi32(int a) { return set1<__m512i>(a); }
inline __m512i _mm512_set1_epi64(long long a) { return set1<__m512i>(a); }
template <class... Lanes>
__m128i _mm_setr_epi8(Lanes... a) {
    return std::bit_cast<__m128i>(std::array<char, 16>{static_cast<char>(a)...});
}
template <class... Lanes>
__m256i _mm256_setr_epi16(Lanes... a) {
    return std::bit_cast<__m256i>(std::array<short, 16>{static_cast<short>(a)...});
}
template <class... Lanes>
__m512 _mm512_setr_ps(Lanes... a) {
    return std::bit_cast<__m512>(std::array<float, 16>{a...});
}
template <class... Lanes>
__m512i _mm512_set_epi16(Lanes... a) {
    const std::array<short, 32> last_first{static_cast<short>(a)...};
    return generate<__m512i, short>([&](std::size_t i) { return last_first[31 - i]; });
}

// The same bits
inline __m512 _mm512_castsi512_ps(__m512i a) { return std::bit_cast<__m512>(a); }
inline __m512i _mm512_castps_si512(__m512 a) { return std::bit_cast<__m512i>(a); }
inline __m512h _mm512_castsi512_ph(__m512i a) { return std::bit_cast<__m512h>(a); }
inline __m512i _mm512_castph_si512(__m512h a) { return std::bit_cast<__m512i>(a); }

// Floats
inline __m512 _mm512_add_ps(__m512 a, __m512 b) { return map<__m512, float>(std::plus<>{}, a, b); }
inline __m512 _mm512_sub_ps(__m512 a, __m512 b) { return map<__m512, float>(std::minus<>{}, a, b); }
inline __m512 _mm512_mul_ps(__m512 a, __m512 b) { return map<__m512, float>(std::multiplies<>{}, a, b); }
inline __m512 _mm512_div_ps(__m512 a, __m512 b) { return map<__m512, float>(std::divides<>{}, a, b); }
inline __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) {
    return map<__m512, float>([](float x, float y, float z) { return std::fma(x, y, z); }, a, b, c);
}
/// The second where either is NaN or both are zeros.
inline float max_ss(float x, float y) { return x > y ? x : y; }
inline float min_ss(float x, float y) { return x < y ? x : y; }
inline __m512 _mm512_max_ps(__m512 a, __m512 b) { return map<__m512, float>(max_ss, a, b); }
inline __m512 _mm512_min_ps(__m512 a, __m512 b) { return map<__m512, float>(min_ss, a, b); }
inline float _mm512_reduce_max_ps(__m512 a) {
    auto x = lanes<float>(a);
    for (std::size_t half = 8; half > 0; half /= 2) {
        for (std::size_t i = 0; i < half; ++i) x[i] = max_ss(x[i], x[i + half]);
    }
    return x[0];
}
inline __m512 _mm512_abs_ps(__m512 a) {
    return map<__m512, std::uint32_t>([](std::uint32_t bits) { return bits & 0x7FFFFFFF; }, a);
}
inline __m512h _mm512_mul_ph(__m512h a, __m512h b) {
    return map<__m512h, std::uint16_t>(
        [](std::uint16_t x, std::uint16_t y) { return float_to_half(half_to_float(x) * half_to_float(y)); },
        a, b);
}
/// Adds the products of the pairs of bf16 values of a and b to each sum, of every pair the second product
/// first. Subnormals, given or computed, are zeros.
inline __m512 _mm512_dpbf16_ps(__m512 sums, __m512bh a, __m512bh b) {
    const auto flush = [](float x) { return std::fabs(x) < 0x1p-126F ? std::copysign(0.0F, x) : x; };
    const auto value = [&](const __m512bh& x, std::size_t i) {
        return flush(std::bit_cast<float>(std::uint32_t{lanes<std::uint16_t>(x)[i]} << 16));
    };
    const auto sum = lanes<float>(sums);
    return generate<__m512, float>([&](std::size_t i) {
        const float second = flush(std::fma(value(a, 2 * i + 1), value(b, 2 * i + 1), flush(sum[i])));
        return flush(std::fma(value(a, 2 * i), value(b, 2 * i), second));
    });
}
inline __mmask16 _mm512_cmp_ps_mask(__m512 a, __m512 b, int predicate) {
    const auto holds = [predicate](float x, float y) {
        if (predicate == _CMP_LT_OQ) return x < y;
        if (predicate == _CMP_GE_OQ) return x >= y;
        if (predicate == _CMP_NEQ_OQ) return x < y || x > y;
        return std::isunordered(x, y);
    };
    unsigned mask = 0;
    for (std::size_t i = 0; i < 16; ++i) mask |= unsigned{holds(lanes<float>(a)[i], lanes<float>(b)[i])} << i;
    return static_cast<__mmask16>(mask);
}

// Integers
inline __m512i _mm512_and_si512(__m512i a, __m512i b) {
    return map<__m512i, std::uint64_t>(std::bit_and<>{}, a, b);
}
inline __m512i _mm512_or_si512(__m512i a, __m512i b) {
    return map<__m512i, std::uint64_t>(std::bit_or<>{}, a, b);
}
inline __m256i _mm256_or_si256(__m256i a, __m256i b) {
    return map<__m256i, std::uint64_t>(std::bit_or<>{}, a, b);
}
inline __m512i _mm512_add_epi16(__m512i a, __m512i b) {
    return map<__m512i, std::uint16_t>(std::plus<std::uint16_t>{}, a, b);
}
inline __m512i _mm512_add_epi32(__m512i a, __m512i b) {
    return map<__m512i, std::uint32_t>(std::plus<>{}, a, b);
}
inline __m512i _mm512_sub_epi32(__m512i a, __m512i b) {
    return map<__m512i, std::uint32_t>(std::minus<>{}, a, b);
}
inline __m512i _mm512_max_epi32(__m512i a, __m512i b) {
    return map<__m512i, std::int32_t>([](int x, int y) { return x > y ? x : y; }, a, b);
}
inline int _mm512_reduce_add_epi32(__m512i a) {
    std::uint32_t sum = 0;
    for (const std::uint32_t x : lanes<std::uint32_t>(a)) sum += x;
    return static_cast<int>(sum);
}
/// By less than a lane has bits: kernels shift by no more.
template <class Lane, class R>
R shift_left(const R& a, unsigned count) {
    return map<R, Lane>([=](Lane x) { return static_cast<Lane>(x << count); }, a);
}
template <class Lane, class R>
R shift_right(const R& a, unsigned count) {
    return map<R, Lane>([=](Lane x) { return static_cast<Lane>(x >> count); }, a);
}
inline __m256i _mm256_slli_epi16(__m256i a, unsigned n) { return shift_left<std::uint16_t>(a, n); }
inline __m512i _mm512_slli_epi32(__m512i a, unsigned n) { return shift_left<std::uint32_t>(a, n); }
inline __m512i _mm512_srli_epi16(__m512i a, unsigned n) { return shift_right<std::uint16_t>(a, n); }
inline __m512i _mm512_srli_epi32(__m512i a, unsigned n) { return shift_right<std::uint32_t>(a, n); }
inline __m512i _mm512_srai_epi16(__m512i a, unsigned n) { return shift_right<std::int16_t>(a, n); }
inline __m512i _mm512_srai_epi32(__m512i a, unsigned n) { return shift_right<std::int32_t>(a, n); }
/// Adds four products of unsigned bytes of a and signed bytes of b to each sum, without saturation.
inline __m512i _mm512_dpbusd_epi32(__m512i sums, __m512i a, __m512i b) {
    const auto x = lanes<std::uint8_t>(a);
    const auto y = lanes<std::int8_t>(b);
    auto out = lanes<std::uint32_t>(sums);
    for (std::size_t i = 0; i < 64; ++i) out[i / 4] += static_cast<std::uint32_t>(x[i] * y[i]);
    return std::bit_cast<__m512i>(out);
}
/// Byte i is 8 of the 64 bits of b around it, from the bit that byte i of a names, cyclically.
inline __m512i _mm512_multishift_epi64_epi8(__m512i a, __m512i b) {
    const auto from = lanes<std::uint8_t>(a);
    const auto bits = lanes<std::uint64_t>(b);
    return generate<__m512i, std::uint8_t>(
        [&](std::size_t i) { return static_cast<std::uint8_t>(std::rotr(bits[i / 8], from[i] & 63)); });
}

// Conversions
template <class Out, class To, class From, class R>
Out convert(const R& a) {
    return map<Out, From>([](From x) { return static_cast<To>(x); }, a);
}
inline __m256i _mm256_cvtepu8_epi16(__m128i a) { return convert<__m256i, std::uint16_t, std::uint8_t>(a); }
inline __m512i _mm512_cvtepu8_epi32(__m128i a) { return convert<__m512i, std::uint32_t, std::uint8_t>(a); }
inline __m512i _mm512_cvtepu16_epi32(__m256i a) { return convert<__m512i, std::uint32_t, std::uint16_t>(a); }
inline __m128i _mm512_cvtepi32_epi8(__m512i a) { return convert<__m128i, std::uint8_t, std::uint32_t>(a); }
inline __m256i _mm512_cvtepi32_epi16(__m512i a) { return convert<__m256i, std::uint16_t, std::uint32_t>(a); }
inline __m512 _mm512_cvtepi32_ps(__m512i a) { return convert<__m512, float, std::int32_t>(a); }
inline __m512 _mm512_cvtph_ps(__m256i a) { return map<__m512, std::uint16_t>(half_to_float, a); }
/// To nearest, ties to even; the smallest integer where it does not fit.
inline __m512i _mm512_cvtps_epi32(__m512 a) {
    constexpr int kNone = std::numeric_limits<int>::min();
    return map<__m512i, float>(
        [](float x) { return std::fabs(x) < 0x1p31F ? static_cast<int>(std::nearbyint(x)) : kNone; }, a);
}

// Masked
inline __m512 _mm512_mask_mov_ps(__m512 src, __mmask16 k, __m512 a) { return select<float>(k, a, src); }
inline __m512i _mm512_mask_mov_epi32(__m512i src, __mmask16 k, __m512i a) { return select<int>(k, a, src); }
inline __m512 _mm512_mask_sub_ps(__m512 src, __mmask16 k, __m512 a, __m512 b) {
    return select<float>(k, _mm512_sub_ps(a, b), src);
}
inline __m512i _mm512_mask_sub_epi32(__m512i src, __mmask16 k, __m512i a, __m512i b) {
    return select<int>(k, _mm512_sub_epi32(a, b), src);
}
inline __m512 _mm512_maskz_mov_ps(__mmask16 k, __m512 a) { return select<float>(k, a, _mm512_setzero_ps()); }
inline __m512 _mm512_maskz_mul_ps(__mmask16 k, __m512 a, __m512 b) {
    return select<float>(k, _mm512_mul_ps(a, b), _mm512_setzero_ps());
}

// Lanes moved
inline __m512 _mm512_permutexvar_ps(__m512i indices, __m512 a) {
    return _mm512_castsi512_ps(permute<std::uint32_t>(indices, a));
}
inline __m256i _mm256_permutexvar_epi16(__m256i indices, __m256i a) {
    return permute<std::uint16_t>(indices, a);
}
inline __m512i _mm512_permutexvar_epi8(__m512i indices, __m512i a) {
    return permute<std::uint8_t>(indices, a);
}
inline __m512i _mm512_maskz_permutexvar_epi8(__mmask64 k, __m512i indices, __m512i a) {
    return select<char>(k, _mm512_permutexvar_epi8(indices, a), _mm512_setzero_si512());
}
inline __m512i _mm512_permutexvar_epi16(__m512i indices, __m512i a) {
    return permute<std::uint16_t>(indices, a);
}
inline __m512i _mm512_permutex2var_epi16(__m512i a, __m512i indices, __m512i b) {
    return permute<std::uint16_t>(indices, std::array{a, b});
}
/// Zero where the index has its upper bit set.
inline __m128i _mm_shuffle_epi8(__m128i a, __m128i indices) {
    return map<__m128i, std::int8_t>([](auto i, auto x) { return i < 0 ? std::int8_t{0} : x; }, indices,
                                     permute<std::uint8_t>(indices, a));
}
inline __m128i _mm_unpacklo_epi8(__m128i a, __m128i b) { return unpack<char>(a, b, false); }
inline __m512i _mm512_unpacklo_epi32(__m512i a, __m512i b) { return unpack<int>(a, b, false); }
inline __m512i _mm512_unpackhi_epi32(__m512i a, __m512i b) { return unpack<int>(a, b, true); }
inline __m512i _mm512_unpacklo_epi64(__m512i a, __m512i b) { return unpack<long long>(a, b, false); }
inline __m512i _mm512_unpackhi_epi64(__m512i a, __m512i b) { return unpack<long long>(a, b, true); }
inline __m512i _mm512_broadcast_i32x4(__m128i a) { return set1<__m512i>(a); }
inline __m512i _mm512_broadcast_i64x4(__m256i a) { return set1<__m512i>(a); }
/// What lies above a is undefined.
inline __m512i _mm512_castsi128_si512(__m128i a) { return set1<__m512i>(a); }
inline __m512i _mm512_inserti32x4(__m512i a, __m128i b, unsigned position) {
    auto parts = lanes<__m128i>(a);
    parts[position] = b;
    return std::bit_cast<__m512i>(parts);
}
/// Two parts of a, then two of b, each named by two bits.
inline __m512i _mm512_shuffle_i32x4(__m512i a, __m512i b, unsigned parts) {
    const std::array both{lanes<__m128i>(a), lanes<__m128i>(b)};
    return generate<__m512i, __m128i>([&](std::size_t i) { return both[i / 2][parts >> 2 * i & 3]; });
}

}  // namespace emulated
using namespace emulated;
