#pragma once
// The tile shapes of the wgmma GEMM: what the host needs to know of them.
#include <cstdint>

#include "backends/cuda/grouped_gemm.hpp"
#include "backends/cuda/k_order.cuh"

namespace moe4::cuda::sm90 {

inline constexpr int kWgmmaTokenBox = 16;  // rows of the smaller tensor copy
inline constexpr int kPlanSlots = 2;       // items of a block, between the claim of one and its end

struct WgmmaShape {
    int warpgroups;  // that multiply
    int m_tiles;     // of 64 weight rows, for each of them
    int tile_tokens;
    int weight_stages;  // of 256 k
    int token_stages;   // of 64 k: those of whole chunks
    int consumer_registers;

    constexpr int units() const { return warpgroups * m_tiles; }
    constexpr int rows() const { return 64 * units(); }
    constexpr int threads() const { return (warpgroups + 1) * 128; }
    /// The rest of what a launch gets.
    constexpr int producer_registers() const {
        const int launched = 65536 / threads() / 8 * 8;
        return launched * (warpgroups + 1) - consumer_registers * warpgroups;
    }
    constexpr int code_bytes() const { return rows() * kChunk / 2; }
    constexpr int scale_bytes() const { return rows() * kChunk / 16; }
    constexpr int token_bytes() const { return tile_tokens * 128; }
    /// Warpgroups that share quantisation blocks of h pass them on to each other through shared memory.
    constexpr int exchange_threads() const { return 256 / m_tiles; }
    constexpr int exchange_tokens() const { return exchange_threads() / 4; }
    constexpr int part_bytes() const { return exchange_tokens() * 128; }
    /// At once, so that a thread has so many blocks to encode: their chains overlap, where registers allow.
    constexpr int exchange_parts() const { return m_tiles; }
    constexpr int exchange_bytes() const { return exchange_parts() * part_bytes(); }
    constexpr int num_exchanges() const { return warpgroups * m_tiles / 2; }
    constexpr int plan_bytes() const { return 32 + tile_tokens * 8; }  // of a tile: TilePlan
    constexpr int shared_bytes() const {
        return weight_stages * (code_bytes() + scale_bytes()) + token_stages * token_bytes() +
               num_exchanges() * exchange_bytes() + kPlanSlots * plan_bytes() + 320;
    }
};

/// Ordered by how many rows an expert they are good for; choose_wgmma says which runs when.
inline constexpr WgmmaShape kWgmmaShapes[] = {
    {4, 1, 96, 3, 8, 104},
    {2, 2, 160, 3, 4, 232},
};
inline constexpr int kNumWgmmaShapes = 2;
static_assert(sizeof(kWgmmaShapes) / sizeof(WgmmaShape) == kNumWgmmaShapes);
static_assert(kWgmmaShapes[0].shared_bytes() <= 227 * 1024 && kWgmmaShapes[1].shared_bytes() <= 227 * 1024);

/// Permuted rows grouped by expert, boxes 64 columns wide of 64 and of kWgmmaTokenBox rows.
struct TokenMaps {
    CUtensorMap by_64, by_16;
};
struct WgmmaMaps {
    WeightMaps gate_up, down;  // of the shape's rows
    TokenMaps x, h;
};

/// A launch: both GEMMs of a layer, or one of them.
struct WgmmaTask {
    GroupedGemm gate_up, down;
    bool runs_gate_up, runs_down;
    std::int32_t* next_item;       // 0 at the start
    std::int32_t* finished_tiles;  // [segments] of gate_up; 0 before it starts
};

using WgmmaKernel = void (*)(WgmmaMaps, WgmmaTask);
/// [shape]; one file each, so that they compile side by side.
struct WgmmaKernels {
    WgmmaKernel of_shape[kNumWgmmaShapes];
};
WgmmaKernels wgmma_bf16();
WgmmaKernels wgmma_f16();

}  // namespace moe4::cuda::sm90
