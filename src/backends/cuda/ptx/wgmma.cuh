#pragma once
// Two or four k16 steps of wgmma m64nNk16 for one or two m64 tiles: A (weights) from registers, B (tokens)
// from shared memory. N is known at run time only, and ptxas gives up overlapping when wgmmas of one
// accumulator lie in different branches (C7512), or waits for all of them when the commit lies behind the
// branches, or for each where there is no branch; so one asm block holds the branches, each with its own
// fence and commit. PTX ISA 9.0, 9.7.15.5.
#include <cstdint>

namespace moe4::cuda::ptx {

/// Returns when at most `pending` groups of this warpgroup are unfinished.
template <int pending>
__device__ inline void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

/// The lower half of a descriptor: K-major rows of 128 bytes, 128-byte swizzle, eight rows 1024 bytes apart.
/// The next k16 step is 32 bytes further: plus 2.
__device__ inline std::uint32_t wgmma_descriptor(std::uint32_t shared_address) {
    return shared_address >> 4 | 1U << 16;
}

/// Four 8x8 matrices of 16-bit elements, transposed; lane l gives the address of row l % 8 of matrix l / 8
/// (16 bytes).
__device__ inline void store_matrix_x4_transposed(std::uint32_t address, const std::uint32_t (&from)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3])
                 : "memory");
}

/// The same, not transposed: a row is the words of a quad.
__device__ inline void store_matrix_x4(std::uint32_t address, const std::uint32_t (&from)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3])
                 : "memory");
}

/// Which of the branches has a multiple of tokens that holds n of them.
__device__ inline std::uint32_t wgmma_leaf(const float (&)[2][4][4], int n) { return (n - 1) / 8; }
__device__ inline std::uint32_t wgmma_leaf(const float (&)[1][8][4], int n) {
    return n <= 32 ? 0 : n <= 40 ? 1 : n <= 48 ? 2 : 3;
}
__device__ inline std::uint32_t wgmma_leaf(const float (&)[1][12][4], int n) { return (n - 1) / 8; }
__device__ inline std::uint32_t wgmma_leaf(const float (&)[2][20][4], int n) {
    return n <= 96 ? (n - 1) / 16 : 6 + (n - 97) / 8;
}

// wgmma_group_{bf16,f16}(d, a, step0, leaf): d[m] += a[step][m] * tokens(step), for as many tokens as the
// branch has that wgmma_leaf names; one group. step0 is the lower half of the first step's descriptor.
// Operands: the sums, A, step0, leaf.
// clang-format off

#define MOE4_D0_8 "%0,%1,%2,%3"
#define MOE4_D0_16 MOE4_D0_8 "," "%4,%5,%6,%7"
#define MOE4_D0_24 MOE4_D0_16 "," "%8,%9,%10,%11"
#define MOE4_D0_32 MOE4_D0_24 "," "%12,%13,%14,%15"
#define MOE4_D0_40 MOE4_D0_32 "," "%16,%17,%18,%19"
#define MOE4_D0_48 MOE4_D0_40 "," "%20,%21,%22,%23"
#define MOE4_D0_56 MOE4_D0_48 "," "%24,%25,%26,%27"
#define MOE4_D0_64 MOE4_D0_56 "," "%28,%29,%30,%31"
#define MOE4_D0_72 MOE4_D0_64 "," "%32,%33,%34,%35"
#define MOE4_D0_80 MOE4_D0_72 "," "%36,%37,%38,%39"
#define MOE4_D0_88 MOE4_D0_80 "," "%40,%41,%42,%43"
#define MOE4_D0_96 MOE4_D0_88 "," "%44,%45,%46,%47"
#define MOE4_D0_104 MOE4_D0_96 "," "%48,%49,%50,%51"
#define MOE4_D0_112 MOE4_D0_104 "," "%52,%53,%54,%55"
#define MOE4_D0_120 MOE4_D0_112 "," "%56,%57,%58,%59"
#define MOE4_D0_128 MOE4_D0_120 "," "%60,%61,%62,%63"
#define MOE4_D0_136 MOE4_D0_128 "," "%64,%65,%66,%67"
#define MOE4_D0_144 MOE4_D0_136 "," "%68,%69,%70,%71"
#define MOE4_D0_152 MOE4_D0_144 "," "%72,%73,%74,%75"
#define MOE4_D0_160 MOE4_D0_152 "," "%76,%77,%78,%79"
#define MOE4_E1_8 "%16,%17,%18,%19"
#define MOE4_E1_16 MOE4_E1_8 ",%20,%21,%22,%23"
#define MOE4_E1_24 MOE4_E1_16 ",%24,%25,%26,%27"
#define MOE4_E1_32 MOE4_E1_24 ",%28,%29,%30,%31"
#define MOE4_D1_8 "%80,%81,%82,%83"
#define MOE4_D1_16 MOE4_D1_8 "," "%84,%85,%86,%87"
#define MOE4_D1_24 MOE4_D1_16 "," "%88,%89,%90,%91"
#define MOE4_D1_32 MOE4_D1_24 "," "%92,%93,%94,%95"
#define MOE4_D1_40 MOE4_D1_32 "," "%96,%97,%98,%99"
#define MOE4_D1_48 MOE4_D1_40 "," "%100,%101,%102,%103"
#define MOE4_D1_56 MOE4_D1_48 "," "%104,%105,%106,%107"
#define MOE4_D1_64 MOE4_D1_56 "," "%108,%109,%110,%111"
#define MOE4_D1_72 MOE4_D1_64 "," "%112,%113,%114,%115"
#define MOE4_D1_80 MOE4_D1_72 "," "%116,%117,%118,%119"
#define MOE4_D1_88 MOE4_D1_80 "," "%120,%121,%122,%123"
#define MOE4_D1_96 MOE4_D1_88 "," "%124,%125,%126,%127"
#define MOE4_D1_104 MOE4_D1_96 "," "%128,%129,%130,%131"
#define MOE4_D1_112 MOE4_D1_104 "," "%132,%133,%134,%135"
#define MOE4_D1_120 MOE4_D1_112 "," "%136,%137,%138,%139"
#define MOE4_D1_128 MOE4_D1_120 "," "%140,%141,%142,%143"
#define MOE4_D1_136 MOE4_D1_128 "," "%144,%145,%146,%147"
#define MOE4_D1_144 MOE4_D1_136 "," "%148,%149,%150,%151"
#define MOE4_D1_152 MOE4_D1_144 "," "%152,%153,%154,%155"
#define MOE4_D1_160 MOE4_D1_152 "," "%156,%157,%158,%159"
#define MOE4_WGMMA(type, n, d, a, b)                                                                        \
    "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" d "}, {" a "}, " b ", always, 1, 1, 0;\n"
#define MOE4_LEAF_2_160(type, n)                                                                            \
    "wgmma.fence.sync.aligned;\n"                                                                           \
    MOE4_WGMMA(type, n, MOE4_D0_##n, "%160,%161,%162,%163", "step0")                                        \
    MOE4_WGMMA(type, n, MOE4_D1_##n, "%164,%165,%166,%167", "step0")                                        \
    MOE4_WGMMA(type, n, MOE4_D0_##n, "%168,%169,%170,%171", "step1")                                        \
    MOE4_WGMMA(type, n, MOE4_D1_##n, "%172,%173,%174,%175", "step1")                                        \
    "wgmma.commit_group.sync.aligned;\nbra.uni DONE;\n"
#define MOE4_LEAF_1_96(type, n)                                                                             \
    "wgmma.fence.sync.aligned;\n"                                                                           \
    MOE4_WGMMA(type, n, MOE4_D0_##n, "%48,%49,%50,%51", "step0")                                            \
    MOE4_WGMMA(type, n, MOE4_D0_##n, "%52,%53,%54,%55", "step1")                                            \
    "wgmma.commit_group.sync.aligned;\nbra.uni DONE;\n"
#define MOE4_LEAF_1_64(type, n)                                                                             \
    "wgmma.fence.sync.aligned;\n"                                                                           \
    MOE4_WGMMA(type, n, MOE4_D0_##n, "%32,%33,%34,%35", "step0")                                            \
    MOE4_WGMMA(type, n, MOE4_D0_##n, "%36,%37,%38,%39", "step1")                                            \
    MOE4_WGMMA(type, n, MOE4_D0_##n, "%40,%41,%42,%43", "step2")                                            \
    MOE4_WGMMA(type, n, MOE4_D0_##n, "%44,%45,%46,%47", "step3")                                            \
    "wgmma.commit_group.sync.aligned;\nbra.uni DONE;\n"
#define MOE4_LEAF_2_32(type, n)                                                                             \
    "wgmma.fence.sync.aligned;\n"                                                                           \
    MOE4_WGMMA(type, n, MOE4_D0_##n, "%32,%33,%34,%35", "step0")                                            \
    MOE4_WGMMA(type, n, MOE4_E1_##n, "%36,%37,%38,%39", "step0")                                            \
    MOE4_WGMMA(type, n, MOE4_D0_##n, "%40,%41,%42,%43", "step1")                                            \
    MOE4_WGMMA(type, n, MOE4_E1_##n, "%44,%45,%46,%47", "step1")                                            \
    "wgmma.commit_group.sync.aligned;\nbra.uni DONE;\n"
// The descriptors of k16 steps, 64-bit registers: half of one is the same for all.
#define MOE4_STEP(i, step0)                                                                                 \
    ".reg .b64 step" #i ";\n.reg .b32 low" #i ";\nadd.u32 low" #i ", " step0 ", 2 * " #i ";\n"              \
    "mov.b64 step" #i ", {low" #i ", 0x40000040};\n"
#define MOE4_STEPS2(step0) MOE4_STEP(0, step0) MOE4_STEP(1, step0)
#define MOE4_STEPS4(step0) MOE4_STEPS2(step0) MOE4_STEP(2, step0) MOE4_STEP(3, step0)
// A binary tree over the bits of the leaf's number.
#define MOE4_BIT(code, i) "and.b32 bit, " code ", 1 << " #i ";\nsetp.ne.u32 b" #i ", bit, 0;\n"
#define MOE4_BITS(code) MOE4_BIT(code, 0) MOE4_BIT(code, 1) MOE4_BIT(code, 2) MOE4_BIT(code, 3)
#define MOE4_IF(i, leaf) "@b" #i " bra.uni L" #leaf ";\n"
#define MOE4_ELSE(leaf) "L" #leaf ":\n"
#define MOE4_TREE_2_160(type)                                                                               \
    MOE4_IF(3, 8) MOE4_IF(2, 4) MOE4_IF(1, 2) MOE4_IF(0, 1) MOE4_LEAF_2_160(type, 16) MOE4_ELSE(1)          \
    MOE4_LEAF_2_160(type, 32) MOE4_ELSE(2) MOE4_IF(0, 3) MOE4_LEAF_2_160(type, 48) MOE4_ELSE(3)             \
    MOE4_LEAF_2_160(type, 64) MOE4_ELSE(4) MOE4_IF(1, 6) MOE4_IF(0, 5) MOE4_LEAF_2_160(type, 80)            \
    MOE4_ELSE(5) MOE4_LEAF_2_160(type, 96) MOE4_ELSE(6) MOE4_IF(0, 7) MOE4_LEAF_2_160(type, 104)            \
    MOE4_ELSE(7) MOE4_LEAF_2_160(type, 112) MOE4_ELSE(8) MOE4_IF(2, 12) MOE4_IF(1, 10) MOE4_IF(0, 9)        \
    MOE4_LEAF_2_160(type, 120) MOE4_ELSE(9) MOE4_LEAF_2_160(type, 128) MOE4_ELSE(10) MOE4_IF(0, 11)         \
    MOE4_LEAF_2_160(type, 136) MOE4_ELSE(11) MOE4_LEAF_2_160(type, 144) MOE4_ELSE(12) MOE4_IF(0, 13)        \
    MOE4_LEAF_2_160(type, 152) MOE4_ELSE(13) MOE4_LEAF_2_160(type, 160)
#define MOE4_TREE_1_96(type)                                                                                \
    MOE4_IF(3, 8) MOE4_IF(2, 4) MOE4_IF(1, 2) MOE4_IF(0, 1) MOE4_LEAF_1_96(type, 16) MOE4_ELSE(1)           \
    MOE4_LEAF_1_96(type, 16) MOE4_ELSE(2) MOE4_IF(0, 3) MOE4_LEAF_1_96(type, 24) MOE4_ELSE(3)               \
    MOE4_LEAF_1_96(type, 32) MOE4_ELSE(4) MOE4_IF(1, 6) MOE4_IF(0, 5) MOE4_LEAF_1_96(type, 40)              \
    MOE4_ELSE(5) MOE4_LEAF_1_96(type, 48) MOE4_ELSE(6) MOE4_IF(0, 7) MOE4_LEAF_1_96(type, 56)               \
    MOE4_ELSE(7) MOE4_LEAF_1_96(type, 64) MOE4_ELSE(8) MOE4_IF(1, 10) MOE4_IF(0, 9)                         \
    MOE4_LEAF_1_96(type, 72) MOE4_ELSE(9) MOE4_LEAF_1_96(type, 80) MOE4_ELSE(10) MOE4_IF(0, 11)             \
    MOE4_LEAF_1_96(type, 88) MOE4_ELSE(11) MOE4_LEAF_1_96(type, 96)
#define MOE4_TREE_1_64(type)                                                                                \
    MOE4_IF(1, 2) MOE4_IF(0, 1) MOE4_LEAF_1_64(type, 32) MOE4_ELSE(1)                                       \
    MOE4_LEAF_1_64(type, 40) MOE4_ELSE(2) MOE4_IF(0, 3) MOE4_LEAF_1_64(type, 48) MOE4_ELSE(3)               \
    MOE4_LEAF_1_64(type, 64)
#define MOE4_TREE_2_32(type)                                                                                \
    MOE4_IF(1, 2) MOE4_IF(0, 1) MOE4_LEAF_2_32(type, 8) MOE4_ELSE(1)                                        \
    MOE4_LEAF_2_32(type, 16) MOE4_ELSE(2) MOE4_IF(0, 3) MOE4_LEAF_2_32(type, 24) MOE4_ELSE(3)               \
    MOE4_LEAF_2_32(type, 32)
#define MOE4_SUM4(m, n) "+f"(d[m][n][0]), "+f"(d[m][n][1]), "+f"(d[m][n][2]), "+f"(d[m][n][3])
#define MOE4_SUMS4(m) MOE4_SUM4(m, 0), MOE4_SUM4(m, 1), MOE4_SUM4(m, 2), MOE4_SUM4(m, 3)
#define MOE4_SUMS8(m)                                                                                       \
    MOE4_SUMS4(m), MOE4_SUM4(m, 4), MOE4_SUM4(m, 5), MOE4_SUM4(m, 6), MOE4_SUM4(m, 7)
#define MOE4_SUMS12(m)                                                                                      \
    MOE4_SUMS8(m), MOE4_SUM4(m, 8), MOE4_SUM4(m, 9), MOE4_SUM4(m, 10), MOE4_SUM4(m, 11)
#define MOE4_SUMS20(m)                                                                                      \
    MOE4_SUMS12(m), MOE4_SUM4(m, 12), MOE4_SUM4(m, 13), MOE4_SUM4(m, 14), MOE4_SUM4(m, 15),                 \
    MOE4_SUM4(m, 16), MOE4_SUM4(m, 17), MOE4_SUM4(m, 18), MOE4_SUM4(m, 19)
#define MOE4_A4(s, m) "r"(a[s][m][0]), "r"(a[s][m][1]), "r"(a[s][m][2]), "r"(a[s][m][3])
#define MOE4_WGMMA_GROUP(name, type)                                                                        \
    __device__ __forceinline__ void name(float (&d)[2][4][4], const std::uint32_t (&a)[2][2][4],            \
                                         std::uint32_t step0, std::uint32_t leaf) {                         \
        asm volatile("{\n.reg .b32 bit;\n.reg .pred always, b0, b1;\nsetp.ne.b32 always, 1, 0;\n"           \
            MOE4_STEPS2("%48") MOE4_BIT("%49", 0) MOE4_BIT("%49", 1) MOE4_TREE_2_32(type) "DONE:\n}\n"      \
            : MOE4_SUMS4(0), MOE4_SUMS4(1)                                                                  \
            : MOE4_A4(0, 0), MOE4_A4(0, 1), MOE4_A4(1, 0), MOE4_A4(1, 1), "r"(step0), "r"(leaf)             \
            : "memory");                                                                                    \
    }                                                                                                       \
    __device__ __forceinline__ void name(float (&d)[1][8][4], const std::uint32_t (&a)[4][1][4],            \
                                         std::uint32_t step0, std::uint32_t leaf) {                         \
        asm volatile("{\n.reg .b32 bit;\n.reg .pred always, b0, b1;\nsetp.ne.b32 always, 1, 0;\n"           \
            MOE4_STEPS4("%48") MOE4_BIT("%49", 0) MOE4_BIT("%49", 1) MOE4_TREE_1_64(type) "DONE:\n}\n"      \
            : MOE4_SUMS8(0)                                                                                 \
            : MOE4_A4(0, 0), MOE4_A4(1, 0), MOE4_A4(2, 0), MOE4_A4(3, 0), "r"(step0), "r"(leaf)             \
            : "memory");                                                                                    \
    }                                                                                                       \
    __device__ __forceinline__ void name(float (&d)[1][12][4], const std::uint32_t (&a)[2][1][4],           \
                                         std::uint32_t step0, std::uint32_t leaf) {                         \
        asm volatile("{\n.reg .b32 bit;\n.reg .pred always, b0, b1, b2, b3;\nsetp.ne.b32 always, 1, 0;\n"   \
            MOE4_STEPS2("%56") MOE4_BITS("%57") MOE4_TREE_1_96(type) "DONE:\n}\n"                           \
            : MOE4_SUMS12(0)                                                                                \
            : MOE4_A4(0, 0), MOE4_A4(1, 0), "r"(step0), "r"(leaf)                                           \
            : "memory");                                                                                    \
    }                                                                                                       \
    __device__ __forceinline__ void name(float (&d)[2][20][4], const std::uint32_t (&a)[2][2][4],           \
                                         std::uint32_t step0, std::uint32_t leaf) {                         \
        asm volatile("{\n.reg .b32 bit;\n.reg .pred always, b0, b1, b2, b3;\nsetp.ne.b32 always, 1, 0;\n"   \
            MOE4_STEPS2("%176") MOE4_BITS("%177") MOE4_TREE_2_160(type) "DONE:\n}\n"                        \
            : MOE4_SUMS20(0), MOE4_SUMS20(1)                                                                \
            : MOE4_A4(0, 0), MOE4_A4(0, 1), MOE4_A4(1, 0), MOE4_A4(1, 1), "r"(step0), "r"(leaf)             \
            : "memory");                                                                                    \
    }
MOE4_WGMMA_GROUP(wgmma_group_bf16, "bf16")
MOE4_WGMMA_GROUP(wgmma_group_f16, "f16")

#undef MOE4_D0_8
#undef MOE4_D0_16
#undef MOE4_D0_24
#undef MOE4_D0_32
#undef MOE4_D0_40
#undef MOE4_D0_48
#undef MOE4_D0_56
#undef MOE4_D0_64
#undef MOE4_D0_72
#undef MOE4_D0_80
#undef MOE4_D0_88
#undef MOE4_D0_96
#undef MOE4_D0_104
#undef MOE4_D0_112
#undef MOE4_D0_120
#undef MOE4_D0_128
#undef MOE4_D0_136
#undef MOE4_D0_144
#undef MOE4_D0_152
#undef MOE4_D0_160
#undef MOE4_D1_8
#undef MOE4_D1_16
#undef MOE4_D1_24
#undef MOE4_D1_32
#undef MOE4_D1_40
#undef MOE4_D1_48
#undef MOE4_D1_56
#undef MOE4_D1_64
#undef MOE4_D1_72
#undef MOE4_D1_80
#undef MOE4_D1_88
#undef MOE4_D1_96
#undef MOE4_D1_104
#undef MOE4_D1_112
#undef MOE4_D1_120
#undef MOE4_D1_128
#undef MOE4_D1_136
#undef MOE4_D1_144
#undef MOE4_D1_152
#undef MOE4_D1_160
#undef MOE4_E1_8
#undef MOE4_E1_16
#undef MOE4_E1_24
#undef MOE4_E1_32
#undef MOE4_LEAF_1_64
#undef MOE4_LEAF_2_32
#undef MOE4_STEP
#undef MOE4_STEPS2
#undef MOE4_STEPS4
#undef MOE4_TREE_1_64
#undef MOE4_TREE_2_32
#undef MOE4_SUMS4
#undef MOE4_SUMS8
#undef MOE4_WGMMA
#undef MOE4_LEAF_2_160
#undef MOE4_LEAF_1_96
#undef MOE4_BIT
#undef MOE4_BITS
#undef MOE4_IF
#undef MOE4_ELSE
#undef MOE4_TREE_2_160
#undef MOE4_TREE_1_96
#undef MOE4_SUM4
#undef MOE4_SUMS12
#undef MOE4_SUMS20
#undef MOE4_A4
#undef MOE4_WGMMA_GROUP
// clang-format on

}  // namespace moe4::cuda::ptx
