#pragma once
// mma.sync m16n8k16 with fp32 sums, and ldmatrix that feeds it. PTX ISA 9.0, 9.7.14.5.
#include <cstdint>

namespace moe4::cuda::ptx {

/// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8 (16 bytes).
__device__ inline void load_matrix_x4(std::uint32_t (&out)[4], std::uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(address)
                 : "memory");
}

#define MOE4_MMA(name, type)                                                                        \
    __device__ inline void name(float(&d)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t a2, \
                                std::uint32_t a3, std::uint32_t b0, std::uint32_t b1) {             \
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                         \
                     ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"         \
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                               \
                     : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));                       \
    }
MOE4_MMA(mma_bf16, "bf16")
MOE4_MMA(mma_f16, "f16")
#undef MOE4_MMA

}  // namespace moe4::cuda::ptx
