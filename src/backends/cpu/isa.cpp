#include "backends/cpu/isa.hpp"

#include "moe4/error.hpp"

// The one place of this folder, outside kernels/, that knows the architecture.
#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace moe4::cpu {

namespace {

struct Feature {
    IsaBit bit;
    const char* name;
};
constexpr Feature kFeatures[] = {
    {kAvx2, "avx2"},
    {kAvx512, "avx512"},
    {kAvx512Vbmi, "avx512_vbmi"},
    {kAvx512Vnni, "avx512_vnni"},
    {kAvx512Bf16, "avx512_bf16"},
    {kAvx512Fp16, "avx512_fp16"},
    {kAmxBf16, "amx_bf16"},
    {kFastBf16Dot, "fast_bf16_dot"},
};

struct Level {
    std::string_view name;
    IsaSet features;
};
constexpr IsaSet kAllAvx512 = kAvx512 | kAvx512Vbmi | kAvx512Vnni | kAvx512Bf16 | kAvx512Fp16 | kFastBf16Dot;
constexpr Level kLevels[] = {
    {"scalar", 0},
    {"avx2", kAvx2},
    {"avx512", kAvx2 | kAllAvx512},
    {"amx", kAvx2 | kAllAvx512 | kAmxBf16},
};

}  // namespace

IsaSet isa_up_to(std::string_view level) {
    std::string known;
    for (const Level& each : kLevels) {
        if (each.name == level) return each.features;
        if (!known.empty()) known += ", ";
        known += each.name;
    }
    throw Error(ErrorKind::invalid_argument,
                "MOE4_ISA is \"" + std::string(level) + "\", expected one of " + known);
}

std::string isa_names(IsaSet set) {
    std::string names;
    for (const Feature& feature : kFeatures) {
        if ((set & feature.bit) == 0) continue;
        if (!names.empty()) names += ' ';
        names += feature.name;
    }
    return names.empty() ? "scalar" : names;
}

#if defined(__x86_64__)

namespace {

struct Leaf {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Leaf cpuid(unsigned leaf, unsigned subleaf = 0) {
    Leaf r;
    __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);  // leaves zeros beyond the last leaf
    return r;
}

constexpr bool has_bits(std::uint64_t value, std::uint64_t bits) { return (value & bits) == bits; }
constexpr unsigned bit(int i) { return 1U << i; }

/// The register states that the operating system saves (XCR0).
std::uint64_t enabled_states() {
    unsigned low = 0;
    unsigned high = 0;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (std::uint64_t{high} << 32) | low;
}

/// Linux hands out the 8 KB of tile state on request, once for the whole process.
bool request_amx_tiles() {
#if defined(__linux__)
    constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
    constexpr long kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    return false;
#endif
}

}  // namespace

IsaSet detect_isa() {
    const Leaf basic = cpuid(1);
    if (!has_bits(basic.ecx, bit(27))) return 0;  // OSXSAVE
    const std::uint64_t states = enabled_states();
    constexpr std::uint64_t kYmm = 0x6;
    constexpr std::uint64_t kZmm = 0xE6;
    constexpr std::uint64_t kTiles = 0x60000;
    const Leaf extended = cpuid(7);
    const Leaf extended_1 = cpuid(7, 1);

    IsaSet set = 0;
    const bool has_fma_avx_f16c = has_bits(basic.ecx, bit(12) | bit(28) | bit(29));
    if (has_bits(states, kYmm) && has_fma_avx_f16c && has_bits(extended.ebx, bit(5))) set |= kAvx2;
    const bool has_f_dq_bw_vl = has_bits(extended.ebx, bit(16) | bit(17) | bit(30) | bit(31));
    if ((set & kAvx2) == 0 || !has_bits(states, kZmm) || !has_f_dq_bw_vl) return set;
    set |= kAvx512;
    if (has_bits(extended.ecx, bit(1))) set |= kAvx512Vbmi;
    if (has_bits(extended.ecx, bit(11))) set |= kAvx512Vnni;
    if (has_bits(extended_1.eax, bit(5))) set |= kAvx512Bf16 | (is_amd() ? kFastBf16Dot : 0U);
    if (has_bits(extended.edx, bit(23))) set |= kAvx512Fp16;
    const bool has_amx_bf16 = has_bits(extended.edx, bit(22) | bit(24));
    if (has_amx_bf16 && has_bits(states, kTiles) && request_amx_tiles()) set |= kAmxBf16;
    return set;
}

bool is_amd() { return cpuid(0).ebx == 0x68747541; }  // "Auth", of AuthenticAMD

std::string cpu_name() {
    std::string name;
    for (unsigned leaf = 0x80000002; leaf <= 0x80000004; ++leaf) {
        const Leaf r = cpuid(leaf);
        for (const unsigned part : {r.eax, r.ebx, r.ecx, r.edx}) {
            for (int shift = 0; shift < 32; shift += 8) name += static_cast<char>(part >> shift);
        }
    }
    name.erase(name.find_last_not_of(std::string_view("\0 ", 2)) + 1);
    name.erase(0, name.find_first_not_of(' '));
    return name.empty() ? "x86-64" : name;
}

void spin_pause() { __builtin_ia32_pause(); }

#else

IsaSet detect_isa() { return 0; }
bool is_amd() { return false; }

#if defined(__aarch64__)
std::string cpu_name() { return "aarch64"; }
#else
std::string cpu_name() { return "CPU"; }
#endif

void spin_pause() {}

#endif

}  // namespace moe4::cpu
