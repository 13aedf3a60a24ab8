#pragma once
// The intrinsics of immintrin.h here as functions of bytes, from the instructions and from their emulation.
#include "backends/cpu/isa.hpp"

namespace moe4::testing {

struct Operands {
    alignas(64) unsigned char bytes[3][64];
};

enum class Lanes { integers, floats, halves };

struct Intrinsic {
    const char* call;
    cpu::IsaSet needs;
    Lanes lanes;  // of the result
    /// Writes a result of at most 64 bytes.
    void (*run)(const Operands&, unsigned char* result);
};

struct Intrinsics {
    const Intrinsic* list;
    int count;
};
Intrinsics instructions();
Intrinsics emulations();

}  // namespace moe4::testing
