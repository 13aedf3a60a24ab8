#pragma once
// The activations of moe/activations.hpp on a GPU. exp and the reciprocal are the hardware's (2 ulp each);
// what they give is rounded to bf16 or coarser next.
#include "moe4/moe.hpp"

namespace moe4::cuda {

/// gate / (1 + exp(-gate)) * up
__device__ inline float silu(float gate, float up) { return __fdividef(gate, 1.0F + __expf(-gate)) * up; }

__device__ inline float activate(Activation activation, float gate, float up) {
    switch (activation) {
        case Activation::silu:
            return silu(gate, up);
    }
    return __int_as_float(0x7FC00000);
}

}  // namespace moe4::cuda
