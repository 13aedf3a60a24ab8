#pragma once
// Which instruction sets the kernels are written for, and which of them this process may execute.
#include <cstdint>
#include <string>
#include <string_view>

namespace moe4::cpu {

/// A set of CPU features, by bit.
using IsaSet = std::uint32_t;
enum IsaBit : IsaSet {
    kAvx2 = 1U << 0,        // AVX2, FMA and F16C
    kAvx512 = 1U << 1,      // AVX-512 F, BW, VL and DQ
    kAvx512Vbmi = 1U << 2,  // vpermb
    kAvx512Vnni = 1U << 3,  // vpdpbusd
    kAvx512Bf16 = 1U << 4,  // vdpbf16ps
    kAvx512Fp16 = 1U << 5,  // vmulph
    kAmxBf16 = 1U << 6,     // AMX tiles and tdpbf16ps
    // No instruction but a fact of the machine: vdpbf16ps does twice the operations of multiply-adds (AMD's
    // Zen 4 and 5), not half of them (Intel).
    kFastBf16Dot = 1U << 7,
};

/// What CPU and operating system offer; asks Linux for the permission to use AMX tiles.
IsaSet detect_isa();

/// Everything up to and including the named level: "scalar", "avx2", "avx512" or "amx". Throws
/// invalid_argument, listing the levels, for another name.
IsaSet isa_up_to(std::string_view level);

/// "avx512 avx512_vnni"; "scalar" for the empty set.
std::string isa_names(IsaSet);

/// "AMD EPYC 9B45" as the CPU spells it; the architecture's name where it does not say.
std::string cpu_name();
bool is_amd();

/// Tells the CPU that this is a waiting loop.
void spin_pause();

}  // namespace moe4::cpu
