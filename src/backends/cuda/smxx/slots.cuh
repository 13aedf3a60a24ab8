#pragma once
// What all ways of grouping slots by expert do alike.
#include "backends/cuda/k_order.hpp"
#include "backends/cuda/smxx/arrange.hpp"
#include "backends/cuda/warp.cuh"

namespace moe4::cuda {

inline constexpr int kGroupThreads = 1024;
inline constexpr int kGroupCounters = 8192;  // warps that count x experts

/// The slot's expert, counted from the first one held, or -1.
__device__ inline std::int32_t held_expert(const GroupTask& task, std::int64_t slot) {
    const std::int32_t id = __ldcg(task.top_k_ids + slot);
    const bool is_held = id >= task.first_expert && id - task.first_expert < task.num_held;
    return is_held ? id - task.first_expert : -1;
}

/// The lanes with the same expert: ballots on its bits, and on one more, which -1 alone has. match.any costs
/// a multiprocessor far more.
__device__ inline unsigned same_expert(std::int32_t expert, std::int32_t num_held) {
    unsigned same = kAllLanes;
    for (int bit = 0; bit == 0 || (num_held >> (bit - 1)) != 0; ++bit) {
        const bool is_set = (expert >> bit & 1) != 0;
        const unsigned set = __ballot_sync(kAllLanes, is_set);
        same &= is_set ? set : ~set;
    }
    return same;
}

/// Turns an expert's slots of each warp, `stride` apart, into the first row of each warp's slots.
__device__ inline void place_warps(std::int32_t* counters, int stride, int num_warps,
                                   std::int32_t first_row) {
    constexpr int kAhead = 8;  // loads in flight
    for (int first = 0; first < num_warps; first += kAhead) {
        std::int32_t counts[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i)
            counts[i] = first + i < num_warps ? counters[(first + i) * stride] : 0;
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            if (first + i < num_warps) counters[(first + i) * stride] = first_row;
            first_row += counts[i];
        }
    }
}

/// An expert's rows as segments of about equal size: fewer padded columns in all.
__device__ inline void write_segments(const GroupTask& task, std::int32_t first_segment,
                                      std::int32_t segments, std::int32_t expert, std::int32_t first_row,
                                      std::int32_t rows) {
    const auto equal = static_cast<std::int32_t>(round_up((rows + segments - 1) / segments, 8));
    const std::int32_t size = min(equal, task.largest_segment);
    for (std::int32_t s = 0; s < segments; ++s) {
        const std::int32_t done = s * size;
        task.out.segments[first_segment + s] = {expert, first_row + done, min(size, rows - done), 0};
    }
}

/// `row` of a slot, -1: none.
__device__ inline void write_row(const GroupTask& task, std::int64_t slot, std::int32_t row) {
    task.out.slot_row[slot] = row;
    if (row >= 0 && task.out.row_token != nullptr)
        task.out.row_token[row] = static_cast<std::int32_t>(slot) / task.top_k;
}

}  // namespace moe4::cuda
