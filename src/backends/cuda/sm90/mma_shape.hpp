#pragma once
// The tile shapes of the mma.sync GEMMs: what the host needs to know of them.
#include <algorithm>
#include <cstdint>

#include "backends/cuda/k_order.hpp"
#include "backends/cuda/sm90/item.hpp"

namespace moe4::cuda::sm90 {

inline constexpr int kMaxStages = 8;
inline constexpr int kMaxItems = 4;        // of a block, between the claim of one and its end
inline constexpr int kFirstSegments = 32;  // a lane each; the workspace is always larger

struct MmaShape {
    int row_warps;    // groups of 32 weight rows
    int split;        // parts of K, 256 k each a stage
    int token_tiles;  // of 8 tokens
    int blocks_per_sm;

    constexpr int half_rows() const { return 16 * row_warps; }
    constexpr int consumers() const { return row_warps * split; }
    constexpr int warps() const { return consumers() + 4; }  // a warpgroup of producers
    constexpr int threads() const { return warps() * 32; }
    /// A thread's at launch: a quarter of a multiprocessor has 16384 for its warps, in steps of 8 a thread.
    constexpr int launch_registers() const {
        const int warps_of_quarter = (warps() * blocks_per_sm + 3) / 4;
        return std::min(16384 / 32 / warps_of_quarter / 8 * 8, 248);
    }
    static constexpr int kProducerRegisters = 40;
    constexpr int consumer_registers() const {
        return std::min((launch_registers() * warps() - 4 * kProducerRegisters) / consumers() / 8 * 8, 240);
    }
    constexpr int code_bytes() const { return split * 2 * half_rows() * kChunk / 2; }  // a stage
    constexpr int scale_bytes() const { return split * 2 * half_rows() * kChunk / 16; }
    /// 16 bytes more than the data, so that ldmatrix meets eight different groups of banks.
    constexpr int row_pitch() const { return split * kChunk * 2 + 16; }
    constexpr int token_offset() const { return code_bytes() + scale_bytes(); }
    constexpr int partial_bytes() const { return (split - 1) * row_warps * 2 * token_tiles * 32 * 16; }
    constexpr int stage_bytes(int token_rows) const {
        return static_cast<int>(round_up(token_offset() + token_rows * row_pitch(), 1024));
    }
};

/// Behind the stages and the partial sums.
struct MmaShared {
    std::uint64_t full[kMaxStages], empty[kMaxStages];                  // barriers of stages
    std::uint64_t posted[kMaxItems], done[kMaxItems], free[kMaxItems];  // and of items
    Item items[kMaxItems];
    Segment first_segments[kFirstSegments];
};

/// Behind that where tokens are few, and behind it x of all of them.
struct FewTokens {
    std::uint8_t row_token[kWarpSlots];
};

/// A launch: both GEMMs of a layer, or one of them.
struct MmaTask {
    GroupedGemm gate_up, down;
    bool runs_gate_up, runs_down;
    std::int32_t* next_item;       // 0 at the start
    std::int32_t* finished_tiles;  // [segments] of gate_up; 0 before it starts
    std::int32_t num_stages;       // the ring in shared memory
    std::int32_t stage_bytes;
    std::int32_t token_rows;  // of a stage
};

/// A launch for few tokens, which each block groups and encodes for itself: memory for the grouping and for x
/// is not used.
struct MmaFewTokensTask : MmaTask {
    GroupTask group;
    EncodeTask encode;

    static constexpr int kPad =
        8;  // elements behind a row of x: ldmatrix meets eight different groups of banks
    constexpr int x_pitch() const { return static_cast<int>(permuted_size(encode.cols)) + kPad; }
    constexpr int shared_bytes() const {
        return static_cast<int>(sizeof(FewTokens) + encode.num_tokens * x_pitch() * 2);
    }
};

/// Of such a launch, 0 at the start; combine_few_tokens clears them.
struct RunCounters {
    static constexpr int kStride = 32;  // a line of L2 each: all blocks ask for them at the same time
    std::int32_t next_item[kStride];
    std::int32_t finished_tiles[kWarpSlots * kStride];
};

using MmaKernel = void (*)(WeightMaps gate_up, WeightMaps down, MmaTask);
using MmaFewTokensKernel = void (*)(WeightMaps gate_up, WeightMaps down, MmaFewTokensTask);

/// Ordered by how many tokens they are good for; choose_mma says which runs when.
inline constexpr MmaShape kMmaShapes[] = {{2, 4, 1, 2}, {4, 2, 1, 2}, {8, 1, 2, 2}, {6, 2, 4, 1}};
inline constexpr int kNumMmaShapes = 4;
static_assert(sizeof(kMmaShapes) / sizeof(MmaShape) == kNumMmaShapes);

/// [shape]; one file each, so that they compile side by side.
struct MmaKernels {
    MmaKernel of_shape[kNumMmaShapes];
    MmaFewTokensKernel few_tokens;  // of shape 0
};
MmaKernels mma_bf16();
MmaKernels mma_f16();

}  // namespace moe4::cuda::sm90
