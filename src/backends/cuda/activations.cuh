#pragma once
// The activations of moe/activations.hpp on a GPU. exp and the reciprocal are the hardware's (2 ulp each);
// what they give is rounded to bf16 or coarser next.
#include "moe4/moe.hpp"

namespace moe4::cuda {

/// 2^x and 1 / x with subnormal results flushed to zero, which spares the checks for them.
__device__ inline float fast_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ inline float fast_reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/// gate / (1 + exp(-gate)) * up
__device__ inline float silu(float gate, float up) {
    constexpr float kLog2E = 1.44269504F;
    return gate * fast_reciprocal(1.0F + fast_exp2(gate * -kLog2E)) * up;
}

/// call(function of gate and up): one branch for all the values that `call` has.
template <class Call>
__device__ __forceinline__ void with_activation(Activation activation, const Call& call) {
    switch (activation) {
        case Activation::silu:
            return call([](float gate, float up) { return silu(gate, up); });
    }
}

__device__ inline float activate(Activation activation, float gate, float up) {
    float h = __int_as_float(0x7FC00000);
    with_activation(activation, [&](const auto& function) { h = function(gate, up); });
    return h;
}

}  // namespace moe4::cuda
