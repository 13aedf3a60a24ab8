// Register loops in assembly: twelve independent accumulators, more than latency times issue width (at most 5
// x 2), so that the units are full. AMX: four accumulator tiles, whose chains a tdp's 16 clocks cover.
// Assembly rather than intrinsics, so that no compiler moves, fuses or drops anything and the file needs no
// flags of its own.
#include "backends/cpu/kernels/instruction_peaks.hpp"

namespace moe4::cpu {

#if defined(__x86_64__)

namespace {

// clang-format off
#define MOE4_TWELVE(op, a, b, reg)                                                               \
    op " " a ", " b ", %%" reg "0\n\t" op " " a ", " b ", %%" reg "1\n\t"                        \
    op " " a ", " b ", %%" reg "2\n\t" op " " a ", " b ", %%" reg "3\n\t"                        \
    op " " a ", " b ", %%" reg "4\n\t" op " " a ", " b ", %%" reg "5\n\t"                        \
    op " " a ", " b ", %%" reg "6\n\t" op " " a ", " b ", %%" reg "7\n\t"                        \
    op " " a ", " b ", %%" reg "8\n\t" op " " a ", " b ", %%" reg "9\n\t"                        \
    op " " a ", " b ", %%" reg "10\n\t" op " " a ", " b ", %%" reg "11\n\t"
#define MOE4_VECTOR_LOOP(name, op, reg)                                                          \
    void name(std::int64_t iterations) {                                                         \
        asm volatile("vpxor %%xmm12, %%xmm12, %%xmm12\n\tvpxor %%xmm13, %%xmm13, %%xmm13\n\t"    \
                     ".balign 64\n1:\n\t" MOE4_TWELVE(op, "%%" reg "12", "%%" reg "13", reg)     \
                     "dec %0\n\tjnz 1b\n\tvzeroupper"                                            \
                     : "+r"(iterations) : : "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4",        \
                       "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12",        \
                       "xmm13");                                                                 \
    }
// clang-format on

MOE4_VECTOR_LOOP(avx2_maddubs, "vpmaddubsw", "ymm")
MOE4_VECTOR_LOOP(avx2_fma, "vfmadd231ps", "ymm")
MOE4_VECTOR_LOOP(avx512_fma, "vfmadd231ps", "zmm")
MOE4_VECTOR_LOOP(avx512_vnni, "vpdpbusd", "zmm")
MOE4_VECTOR_LOOP(avx512_bf16, "vdpbf16ps", "zmm")
#undef MOE4_VECTOR_LOOP
#undef MOE4_TWELVE

struct alignas(64) TileConfig {
    std::uint8_t palette = 1;
    std::uint8_t start_row = 0;
    std::uint8_t reserved[14] = {};
    std::uint16_t bytes_per_row[16] = {};
    std::uint8_t rows[16] = {};
};

/// Accumulators 0 to 3 of 16 x 16 floats; operands 4 of 16 rows and 5 of k / 2 rows (two bf16 a lane).
void amx_bf16(std::int64_t iterations, int k) {
    TileConfig config;
    for (int tile = 0; tile < 6; ++tile) {
        config.bytes_per_row[tile] = static_cast<std::uint16_t>(tile == 4 ? 2 * k : 64);
        config.rows[tile] = static_cast<std::uint8_t>(tile == 5 ? k / 2 : 16);
    }
    asm volatile(
        "ldtilecfg %1\n\t"
        "tilezero %%tmm0\n\ttilezero %%tmm1\n\ttilezero %%tmm2\n\ttilezero %%tmm3\n\t"
        "tilezero %%tmm4\n\ttilezero %%tmm5\n\t"
        ".balign 64\n1:\n\t"
        "tdpbf16ps %%tmm5, %%tmm4, %%tmm0\n\ttdpbf16ps %%tmm5, %%tmm4, %%tmm1\n\t"
        "tdpbf16ps %%tmm5, %%tmm4, %%tmm2\n\ttdpbf16ps %%tmm5, %%tmm4, %%tmm3\n\t"
        "dec %0\n\tjnz 1b\n\ttilerelease"
        : "+r"(iterations)
        : "m"(config)
        : "cc", "memory");
}
void amx_bf16_k32(std::int64_t iterations) { amx_bf16(iterations, 32); }
void amx_bf16_k16(std::int64_t iterations) { amx_bf16(iterations, 16); }

}  // namespace

const InstructionPeak kInstructionPeaks[] = {
    {"amx_bf16_k32", kAmxBf16, 4 * 16 * 16 * 32 * 2, amx_bf16_k32},
    {"amx_bf16_k16", kAmxBf16, 4 * 16 * 16 * 16 * 2, amx_bf16_k16},
    {"vpdpbusd", kAvx512 | kAvx512Vnni, 12 * 64 * 2, avx512_vnni},
    {"vdpbf16ps", kAvx512 | kAvx512Bf16, 12 * 32 * 2, avx512_bf16},
    {"avx512_fma", kAvx512, 12 * 16 * 2, avx512_fma},
    {"vpmaddubsw", kAvx2, 12 * 32 * 2, avx2_maddubs},
    {"avx2_fma", kAvx2, 12 * 8 * 2, avx2_fma},
};
const int kNumInstructionPeaks = sizeof(kInstructionPeaks) / sizeof(kInstructionPeaks[0]);

// A prefetch some KB ahead of the loads: without it a virtual machine's single core stays a third below its
// memory.
void read_memory(const std::uint8_t* data, std::int64_t bytes, IsaSet isa) {
    std::int64_t lines = bytes / 256;  // NOLINT(misc-const-correctness): the assembly counts it down
    if ((isa & kAvx512) != 0) {
        asm volatile(
            "1:\n\tprefetcht1 4096(%0)\n\tprefetcht1 4160(%0)\n\tprefetcht1 4224(%0)\n\tprefetcht1 "
            "4288(%0)\n\t"
            "vmovdqa64 (%0), %%zmm0\n\tvmovdqa64 64(%0), %%zmm1\n\tvmovdqa64 128(%0), %%zmm2\n\t"
            "vmovdqa64 192(%0), %%zmm3\n\tadd $256, %0\n\tdec %1\n\tjnz 1b\n\tvzeroupper"
            : "+r"(data), "+r"(lines)
            :
            : "cc", "memory", "xmm0", "xmm1", "xmm2", "xmm3");
        return;
    }
    asm volatile(
        "1:\n\tprefetcht1 4096(%0)\n\tprefetcht1 4160(%0)\n\tprefetcht1 4224(%0)\n\tprefetcht1 4288(%0)\n\t"
        "movdqa (%0), %%xmm0\n\tmovdqa 16(%0), %%xmm1\n\tmovdqa 32(%0), %%xmm2\n\tmovdqa 48(%0), %%xmm3\n\t"
        "movdqa 64(%0), %%xmm0\n\tmovdqa 80(%0), %%xmm1\n\tmovdqa 96(%0), %%xmm2\n\tmovdqa 112(%0), "
        "%%xmm3\n\t"
        "movdqa 128(%0), %%xmm0\n\tmovdqa 144(%0), %%xmm1\n\tmovdqa 160(%0), %%xmm2\n\tmovdqa 176(%0), "
        "%%xmm3\n\t"
        "movdqa 192(%0), %%xmm0\n\tmovdqa 208(%0), %%xmm1\n\tmovdqa 224(%0), %%xmm2\n\tmovdqa 240(%0), "
        "%%xmm3\n\t"
        "add $256, %0\n\tdec %1\n\tjnz 1b"
        : "+r"(data), "+r"(lines)
        :
        : "cc", "memory", "xmm0", "xmm1", "xmm2", "xmm3");
}

#else

const InstructionPeak kInstructionPeaks[] = {{"", ~IsaSet{0}, 0, nullptr}};
const int kNumInstructionPeaks = 0;

void read_memory(const std::uint8_t* data, std::int64_t bytes, IsaSet) {
    for (std::int64_t i = 0; i < bytes; i += 8) {
        (void)*reinterpret_cast<const volatile std::uint64_t*>(data + i);
    }
}

#endif

}  // namespace moe4::cpu
