#pragma once
// Groups up to kWarpSlots slots in one warp: 0.3 us, so that every block does it for itself.
#include "backends/cuda/smxx/slots.cuh"
#include "moe/routers.hpp"

namespace moe4::cuda {

/// A lane a slot. The experts that are hit become segments, in the order of their first slots; a row is a
/// token that hits one, whatever number of its slots do.
struct WarpGrouping {
    std::int32_t expert;               // counted from the first one held, or -1
    std::int32_t row;                  // -1: none
    bool is_row;                       // the first slot of its row
    bool leads;                        // the first slot of its segment
    int segment, first_row, num_rows;  // that this lane leads
    int num_segments;

    __device__ WarpGrouping(const GroupTask& task, int lane)
        : expert(lane < task.num_slots ? held_expert(task, lane) : -1) {
        const unsigned same =
            same_expert(expert, moe::kMaxExperts);  // a constant: no ballot waits for another
        const unsigned slots_of_token = (task.top_k < 32 ? (1U << task.top_k) - 1U : kAllLanes)
                                        << lane / task.top_k * task.top_k;
        const auto first_of = [](unsigned lanes) { return __ffs(static_cast<int>(lanes)) - 1; };
        const auto below = [](int i) { return (1U << i) - 1U; };
        const int row_slot = first_of(same & slots_of_token);
        const int leader = first_of(same);
        is_row = expert >= 0 && lane == row_slot;
        leads = expert >= 0 && lane == leader;
        const unsigned rows = __ballot_sync(kAllLanes, is_row) & same;
        const unsigned leaders = __ballot_sync(kAllLanes, leads);
        segment = __popc(leaders & below(lane));
        num_segments = __popc(leaders);
        num_rows = __popc(rows);
        int up_to = leads ? num_rows : 0;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int before = __shfl_up_sync(kAllLanes, up_to, step);
            if (lane >= step) up_to += before;
        }
        first_row = __shfl_sync(kAllLanes, up_to - num_rows, leader);
        row = expert < 0 ? -1 : first_row + __popc(rows & below(row_slot));
    }
};

}  // namespace moe4::cuda
