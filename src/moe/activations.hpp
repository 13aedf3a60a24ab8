#pragma once
// The activations and the exp they stand on, written once for every instruction set: templates over a vector
// type F of float lanes. Every lane does the same IEEE operations everywhere, so results are bit-identical on
// all of them.
//
// F offers: F::set(float), + - * /, fma(a, b, c), min(a, b) and max(a, b) that return b when either is NaN
// (as SSE does), and for the exponent: F::Int, bits(F), F::from_bits(Int), Int + Int, Int - Int,
// Int::set(int), shift_left_23(Int), shift_right_1(Int) (arithmetic). No std:: in here: ISA files instantiate
// it with their flags.

namespace moe4::moe {

/// e^x, at most 2 ulp from the true value over the whole range: subnormal results, 0, infinity and NaN
/// included. n = round(x / ln 2), r = x - n ln 2 in two parts, e^r by the polynomial of Cephes expf, scaled
/// by 2^n in two steps.
template <class F>
constexpr F exp(F x) {
    constexpr float kRoundToInteger = 0x1.8p23F;  // adding it leaves the integer in the low mantissa bits
    x = max(F::set(-104.0F), min(F::set(89.0F), x));
    const F shifted = fma(x, F::set(0x1.715476p+0F), F::set(kRoundToInteger));
    const F n = shifted - F::set(kRoundToInteger);
    F r = fma(n, F::set(-0x1.62ep-1F), x);
    r = fma(n, F::set(-0x1.0bfbe8p-15F), r);

    F p = fma(F::set(1.9875691500e-4F), r, F::set(1.3981999507e-3F));
    p = fma(p, r, F::set(8.3334519073e-3F));
    p = fma(p, r, F::set(4.1665795894e-2F));
    p = fma(p, r, F::set(1.6666665459e-1F));
    p = fma(p, r, F::set(5.0000001201e-1F));
    p = fma(p, r * r, r) + F::set(1.0F);

    using Int = typename F::Int;
    const Int exponent = bits(shifted) - bits(F::set(kRoundToInteger));
    const Int half = shift_right_1(exponent);
    const F scale = F::from_bits(shift_left_23(half + Int::set(127)));
    const F rest = F::from_bits(shift_left_23(exponent - half + Int::set(127)));
    return p * scale * rest;
}

/// h = gate / (1 + exp(-gate)) * up
struct Silu {
    template <class F>
    static constexpr F apply(F gate, F up) {
        return gate / (F::set(1.0F) + moe::exp(F::set(0.0F) - gate)) * up;
    }
};

}  // namespace moe4::moe
