#pragma once
// The tile shapes of the mma.sync GEMM: what the host needs to know of them.
#include <cstdint>

#include "backends/cuda/grouped_gemm.hpp"
#include "backends/cuda/k_order.cuh"

namespace moe4::cuda::sm90 {

inline constexpr int kMaxStages = 16;

struct MmaShape {
    int row_warps;    // groups of 32 weight rows
    int split;        // parts of K, 256 k each a stage
    int token_tiles;  // of 8 tokens
    int blocks_per_sm;

    constexpr int half_rows() const { return 16 * row_warps; }
    constexpr int threads() const { return (row_warps * split + 2) * 32; }
    constexpr int code_bytes() const { return 2 * half_rows() * kChunk / 2; }  // a chunk
    constexpr int scale_bytes() const { return 2 * half_rows() * kChunk / 16; }
    /// 16 bytes more than the data, so that ldmatrix meets eight different groups of banks.
    constexpr int row_pitch() const { return split * kChunk * 2 + 16; }
    constexpr int token_offset() const { return split * (code_bytes() + scale_bytes()); }
    constexpr int partial_bytes() const { return (split - 1) * row_warps * 2 * token_tiles * 32 * 16; }
    constexpr int stage_bytes(int token_rows) const {
        return static_cast<int>(round_up(token_offset() + token_rows * row_pitch(), 1024));
    }
};

/// What a launch adds: the ring of stages in shared memory.
struct MmaLaunch {
    std::int32_t num_stages;
    std::int32_t stage_bytes;
    std::int32_t token_rows;  // of a stage
};

using MmaKernel = void (*)(CUtensorMap, CUtensorMap, GroupedGemm, MmaLaunch);

/// Ordered by how many tokens they are good for; choose_mma says which runs when.
inline constexpr MmaShape kMmaShapes[] = {
    {2, 4, 1, 2}, {4, 1, 1, 4}, {8, 1, 2, 2}, {4, 1, 2, 3}, {4, 1, 4, 2}, {8, 1, 4, 1},
};
inline constexpr int kNumMmaShapes = 6;
static_assert(sizeof(kMmaShapes) / sizeof(MmaShape) == kNumMmaShapes);

/// [shape]; one file each, so that they compile side by side.
struct MmaKernels {
    MmaKernel of_shape[kNumMmaShapes];
};
MmaKernels mma_bf16_gate_up();
MmaKernels mma_bf16_down();
MmaKernels mma_f16_gate_up();
MmaKernels mma_f16_down();

}  // namespace moe4::cuda::sm90
