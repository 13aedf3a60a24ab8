#pragma once
// The tile shapes of the wgmma GEMM: what the host needs to know of them.
#include <algorithm>
#include <cstdint>
#include <iterator>

#include "backends/cuda/grouped_gemm.hpp"
#include "backends/cuda/k_order.hpp"

namespace moe4::cuda::sm90 {

inline constexpr int kTokenBoxStep = 32;  // a tensor copy has a multiple of so many rows
inline constexpr int kTokenBoxes = 5;
inline constexpr int kPlanSlots = 2;  // items of a block, between the claim of one and its end

struct WgmmaShape {
    int warpgroups;  // that multiply
    int m_tiles;     // of 64 weight rows, for each of them
    int tile_tokens;
    int weight_stages;  // of 256 k
    int token_stages;   // those of whole chunks
    int token_k;        // of a stage
    int group_words;    // of 32 k, multiplied by one group of wgmmas
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
    constexpr int slab_bytes() const { return tile_tokens * 128; }  // of 64 k
    constexpr int token_bytes() const { return token_k / 64 * slab_bytes(); }
    /// Warpgroups that share quantisation blocks of h pass them on to each other through shared memory.
    constexpr int exchange_threads() const { return 256 / m_tiles; }
    constexpr int exchange_tokens() const { return exchange_threads() / 4; }
    constexpr int part_bytes() const { return exchange_tokens() * 128; }
    /// At once, so that a thread has so many blocks to encode: their chains overlap, where registers allow.
    constexpr int exchange_parts() const { return std::min(m_tiles, tile_tokens / exchange_tokens()); }
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
    {.warpgroups = 4,
     .m_tiles = 2,
     .tile_tokens = 32,
     .weight_stages = 2,
     .token_stages = 4,
     .token_k = 256,
     .group_words = 1,
     .consumer_registers = 104},
    {.warpgroups = 4,
     .m_tiles = 1,
     .tile_tokens = 64,
     .weight_stages = 3,
     .token_stages = 6,
     .token_k = 128,
     .group_words = 2,
     .consumer_registers = 104},
    {.warpgroups = 4,
     .m_tiles = 1,
     .tile_tokens = 96,
     .weight_stages = 3,
     .token_stages = 8,
     .token_k = 64,
     .group_words = 1,
     .consumer_registers = 104},
    {.warpgroups = 2,
     .m_tiles = 2,
     .tile_tokens = 160,
     .weight_stages = 3,
     .token_stages = 4,
     .token_k = 64,
     .group_words = 1,
     .consumer_registers = 232},
};
inline constexpr int kNumWgmmaShapes = 4;
static_assert(sizeof(kWgmmaShapes) / sizeof(WgmmaShape) == kNumWgmmaShapes);
static_assert(std::all_of(std::begin(kWgmmaShapes), std::end(kWgmmaShapes),
                          [](const WgmmaShape& shape) { return shape.shared_bytes() <= 227 * 1024; }));
static_assert(std::all_of(std::begin(kWgmmaShapes), std::end(kWgmmaShapes),
                          [](const WgmmaShape& shape) {
                              return shape.tile_tokens % kTokenBoxStep == 0 &&
                                     shape.tile_tokens <= kTokenBoxes * kTokenBoxStep;
                          }),
              "every segment has its box in TokenMaps");

/// How a layer's tiles fall on the multiprocessors of an H200, where each expert has one segment.
struct WgmmaLoad {
    std::int64_t experts, hidden_size, intermediate_size;

    static constexpr std::int64_t kMultiprocessors = 132;
    static constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
    constexpr std::int64_t up_chunks() const { return ceil_div(hidden_size, kChunk); }
    constexpr std::int64_t down_chunks() const { return ceil_div(intermediate_size, kChunk); }
    constexpr std::int64_t up_tiles(int rows) const {
        return experts * ceil_div(intermediate_size, 256) * 512 / rows;
    }
    constexpr std::int64_t down_tiles(int rows) const { return experts * ceil_div(hidden_size, rows); }

    /// Chunks of K, by tiles of so many weight rows, until the last multiprocessor has ended: waves of
    /// gate_up, the last of which is filled with items of down, then those of down that are left, or the
    /// last segment's.
    constexpr std::int64_t chunks(int rows) const {
        const std::int64_t up_waves = ceil_div(up_tiles(rows), kMultiprocessors);
        const std::int64_t idle = up_waves * kMultiprocessors - up_tiles(rows);
        const std::int64_t fit = up_chunks() / std::max<std::int64_t>(1, down_chunks());
        const std::int64_t left = down_tiles(rows) - idle * fit;
        const std::int64_t down_waves = left > 0 ? ceil_div(left, kMultiprocessors) : 1;
        return up_waves * up_chunks() + down_waves * down_chunks();
    }
    /// A chunk of 512 rows takes 1.7 times as long as one of 256.
    constexpr bool suits_512_rows() const { return 17 * chunks(512) < 10 * chunks(256); }
    /// Whether even the better one takes a tenth longer than an even share of its work.
    constexpr bool has_few_tiles() const {
        const std::int64_t best = suits_512_rows() ? 17 * chunks(512) : 10 * chunks(256);
        const std::int64_t all = up_tiles(256) * up_chunks() + down_tiles(256) * down_chunks();
        return best * kMultiprocessors > 11 * all;
    }
};

/// Permuted rows grouped by expert, in boxes 64 columns wide of kTokenBoxStep rows, of twice as many, and so
/// on up to a tile's: one copy of a slab's rows, not several small ones.
struct TokenMaps {
    CUtensorMap of_boxes[kTokenBoxes];
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
