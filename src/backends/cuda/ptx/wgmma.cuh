#pragma once
// Two k16 steps of wgmma m64nNk16 for two m64 tiles: A (weights) from registers, B (tokens) from shared
// memory. N is known at run time only, and ptxas gives up overlapping when wgmmas of one accumulator lie in
// different branches (C7512), or waits for all of them when the commit lies behind the branches; so one asm
// block holds the branches, each with its own fence and commit. PTX ISA 9.0, 9.7.15.5.
#include <cstdint>

namespace moe4::cuda::ptx {

/// Returns when at most `pending` groups of this warpgroup are unfinished.
template <int pending>
__device__ inline void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

/// K-major rows of 128 bytes, 128-byte swizzle, eight rows 1024 bytes apart. The next k16 step is 32 bytes
/// further: the descriptor plus 2.
__device__ inline std::uint64_t wgmma_descriptor(std::uint32_t shared_address) {
    return std::uint64_t{shared_address >> 4 & 0x3FFFU} | std::uint64_t{1} << 16 | std::uint64_t{64} << 32 |
           std::uint64_t{1} << 62;
}

// wgmma_group_bf16 and _f16(d, a, step0, step1, n): d[m] += a[step][m] * tokens(step), for tokens 0..n-1 of
// at most 160, rounded up to 16; one group. Operands 0..79 and 80..159 are the sums, 160..175 A, then the
// descriptors and n.
// clang-format off

#define MOE4_D0_16 "%0,%1,%2,%3,%4,%5,%6,%7"
#define MOE4_D0_32 MOE4_D0_16 "," "%8,%9,%10,%11,%12,%13,%14,%15"
#define MOE4_D0_48 MOE4_D0_32 "," "%16,%17,%18,%19,%20,%21,%22,%23"
#define MOE4_D0_64 MOE4_D0_48 "," "%24,%25,%26,%27,%28,%29,%30,%31"
#define MOE4_D0_80 MOE4_D0_64 "," "%32,%33,%34,%35,%36,%37,%38,%39"
#define MOE4_D0_96 MOE4_D0_80 "," "%40,%41,%42,%43,%44,%45,%46,%47"
#define MOE4_D0_112 MOE4_D0_96 "," "%48,%49,%50,%51,%52,%53,%54,%55"
#define MOE4_D0_128 MOE4_D0_112 "," "%56,%57,%58,%59,%60,%61,%62,%63"
#define MOE4_D0_144 MOE4_D0_128 "," "%64,%65,%66,%67,%68,%69,%70,%71"
#define MOE4_D0_160 MOE4_D0_144 "," "%72,%73,%74,%75,%76,%77,%78,%79"
#define MOE4_D1_16 "%80,%81,%82,%83,%84,%85,%86,%87"
#define MOE4_D1_32 MOE4_D1_16 "," "%88,%89,%90,%91,%92,%93,%94,%95"
#define MOE4_D1_48 MOE4_D1_32 "," "%96,%97,%98,%99,%100,%101,%102,%103"
#define MOE4_D1_64 MOE4_D1_48 "," "%104,%105,%106,%107,%108,%109,%110,%111"
#define MOE4_D1_80 MOE4_D1_64 "," "%112,%113,%114,%115,%116,%117,%118,%119"
#define MOE4_D1_96 MOE4_D1_80 "," "%120,%121,%122,%123,%124,%125,%126,%127"
#define MOE4_D1_112 MOE4_D1_96 "," "%128,%129,%130,%131,%132,%133,%134,%135"
#define MOE4_D1_128 MOE4_D1_112 "," "%136,%137,%138,%139,%140,%141,%142,%143"
#define MOE4_D1_144 MOE4_D1_128 "," "%144,%145,%146,%147,%148,%149,%150,%151"
#define MOE4_D1_160 MOE4_D1_144 "," "%152,%153,%154,%155,%156,%157,%158,%159"
#define MOE4_A00 "{%160,%161,%162,%163}"
#define MOE4_A01 "{%164,%165,%166,%167}"
#define MOE4_A10 "{%168,%169,%170,%171}"
#define MOE4_A11 "{%172,%173,%174,%175}"
#define MOE4_WGMMA(type, n, d, a, b) \
    "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" d "}, " a ", " b ", always, 1, 1, 0;\n"
#define MOE4_LEAF(type, n)                                                                                  \
    "wgmma.fence.sync.aligned;\n"                                                                           \
    MOE4_WGMMA(type, n, MOE4_D0_##n, MOE4_A00, "%176") MOE4_WGMMA(type, n, MOE4_D1_##n, MOE4_A01, "%176")     \
    MOE4_WGMMA(type, n, MOE4_D0_##n, MOE4_A10, "%177") MOE4_WGMMA(type, n, MOE4_D1_##n, MOE4_A11, "%177")     \
    "wgmma.commit_group.sync.aligned;\nbra.uni DONE;\n"
#define MOE4_ABOVE(n) "setp.gt.s32 above, %178, " #n ";\n@above bra.uni N" #n ";\n"
#define MOE4_SUM4(m, n) "+f"(d[m][n][0]), "+f"(d[m][n][1]), "+f"(d[m][n][2]), "+f"(d[m][n][3])
#define MOE4_SUMS(m)                                                                                        \
    MOE4_SUM4(m, 0), MOE4_SUM4(m, 1), MOE4_SUM4(m, 2), MOE4_SUM4(m, 3), MOE4_SUM4(m, 4), MOE4_SUM4(m, 5),     \
    MOE4_SUM4(m, 6), MOE4_SUM4(m, 7), MOE4_SUM4(m, 8), MOE4_SUM4(m, 9), MOE4_SUM4(m, 10), MOE4_SUM4(m, 11),   \
    MOE4_SUM4(m, 12), MOE4_SUM4(m, 13), MOE4_SUM4(m, 14), MOE4_SUM4(m, 15), MOE4_SUM4(m, 16),                 \
    MOE4_SUM4(m, 17), MOE4_SUM4(m, 18), MOE4_SUM4(m, 19)
#define MOE4_A4(s, m) "r"(a[s][m][0]), "r"(a[s][m][1]), "r"(a[s][m][2]), "r"(a[s][m][3])
#define MOE4_WGMMA_GROUP(name, type)                                                                        \
    __device__ __forceinline__ void name(float (&d)[2][20][4], const std::uint32_t (&a)[2][2][4],             \
                                         std::uint64_t step0, std::uint64_t step1, int n) {                   \
        asm volatile("{\n.reg .pred always, above;\nsetp.ne.b32 always, 1, 0;\n"                              \
            MOE4_ABOVE(80) MOE4_ABOVE(32) MOE4_ABOVE(16)                                                      \
            MOE4_LEAF(type, 16) "N16:\n" MOE4_LEAF(type, 32)                                                  \
            "N32:\n" MOE4_ABOVE(64) MOE4_ABOVE(48) MOE4_LEAF(type, 48)                                        \
            "N48:\n" MOE4_LEAF(type, 64) "N64:\n" MOE4_LEAF(type, 80)                                         \
            "N80:\n" MOE4_ABOVE(112) MOE4_ABOVE(96) MOE4_LEAF(type, 96)                                       \
            "N96:\n" MOE4_LEAF(type, 112)                                                                     \
            "N112:\n" MOE4_ABOVE(144) MOE4_ABOVE(128) MOE4_LEAF(type, 128)                                    \
            "N128:\n" MOE4_LEAF(type, 144) "N144:\n" MOE4_LEAF(type, 160)                                     \
            "DONE:\n}\n"                                                                                      \
            : MOE4_SUMS(0), MOE4_SUMS(1)                                                                      \
            : MOE4_A4(0, 0), MOE4_A4(0, 1), MOE4_A4(1, 0), MOE4_A4(1, 1), "l"(step0), "l"(step1), "r"(n)        \
            : "memory");                                                                                      \
    }
MOE4_WGMMA_GROUP(wgmma_group_bf16, "bf16")
MOE4_WGMMA_GROUP(wgmma_group_f16, "f16")

#undef MOE4_D0_16
#undef MOE4_D0_32
#undef MOE4_D0_48
#undef MOE4_D0_64
#undef MOE4_D0_80
#undef MOE4_D0_96
#undef MOE4_D0_112
#undef MOE4_D0_128
#undef MOE4_D0_144
#undef MOE4_D0_160
#undef MOE4_D1_16
#undef MOE4_D1_32
#undef MOE4_D1_48
#undef MOE4_D1_64
#undef MOE4_D1_80
#undef MOE4_D1_96
#undef MOE4_D1_112
#undef MOE4_D1_128
#undef MOE4_D1_144
#undef MOE4_D1_160
#undef MOE4_A00
#undef MOE4_A01
#undef MOE4_A10
#undef MOE4_A11
#undef MOE4_WGMMA
#undef MOE4_LEAF
#undef MOE4_ABOVE
#undef MOE4_SUM4
#undef MOE4_SUMS
#undef MOE4_A4
#undef MOE4_WGMMA_GROUP
// clang-format on

}  // namespace moe4::cuda::ptx
