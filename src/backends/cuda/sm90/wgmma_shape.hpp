#pragma once
// The tile of the wgmma GEMM: what the host needs to know of it.
#include "backends/cuda/sm90/mma_shape.hpp"

namespace moe4::cuda::sm90 {

inline constexpr int kWgmmaTileTokens = 160;
inline constexpr int kWgmmaHalfRows = 128;    // gate rows of a tile, and as many up rows
inline constexpr int kWgmmaWeightStages = 3;  // of 256 k
inline constexpr int kWgmmaTokenStages = 5;   // of 64 k
inline constexpr int kWgmmaTokenBox = 16;     // rows of a tensor copy
inline constexpr int kWgmmaThreads = 384;     // two warpgroups that multiply, one that loads
inline constexpr int kWgmmaCodeBytes = 2 * kWgmmaHalfRows * kChunk / 2;
inline constexpr int kWgmmaScaleBytes = 2 * kWgmmaHalfRows * kChunk / 16;
inline constexpr int kWgmmaTokenBytes = kWgmmaTileTokens * 64 * 2;
inline constexpr int kWgmmaSharedBytes =
    kWgmmaWeightStages * (kWgmmaCodeBytes + kWgmmaScaleBytes) + kWgmmaTokenStages * kWgmmaTokenBytes + 256;

/// Weights as mma kernels have them; tokens: permuted rows grouped by expert, 64 columns wide boxes of 64 and
/// of kWgmmaTokenBox rows.
using WgmmaKernel = void (*)(CUtensorMap codes, CUtensorMap scales, CUtensorMap tokens_64,
                             CUtensorMap tokens_16, GroupedGemm);
WgmmaKernel wgmma_bf16_gate_up();
WgmmaKernel wgmma_bf16_down();
WgmmaKernel wgmma_f16_gate_up();
WgmmaKernel wgmma_f16_down();

}  // namespace moe4::cuda::sm90
