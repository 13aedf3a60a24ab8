#pragma once
// Groups so few slots by expert that each has a thread of one block: a counting sort of which no step waits
// for memory but the first. The order of rows is the same in every run.
#include "backends/cuda/smxx/slots.cuh"

namespace moe4::cuda {

class FewSlotsGrouper {
public:
    /// `counters` is shared memory: warps that have slots x experts held.
    __device__ FewSlotsGrouper(const GroupTask& task, std::int32_t* counters)
        : task_(task),
          counters_(counters),
          num_warps_(static_cast<int>((task.num_slots + 31) / 32)),
          thread_(static_cast<int>(threadIdx.x)),
          warp_(thread_ / 32),
          lane_(thread_ % 32) {}

    __device__ void run() {
        const std::int32_t expert = thread_ < task_.num_slots ? held_expert(task_, thread_) : -1;
        for (int i = thread_; i < num_warps_ * task_.num_held; i += kGroupThreads) counters_[i] = 0;
        for (std::int64_t i = thread_; i < task_.num_cleared; i += kGroupThreads) task_.cleared[i] = 0;
        __syncthreads();
        const unsigned same = same_expert(expert, task_.num_held);
        const int rank = __popc(same & ((1U << lane_) - 1U));
        if (expert >= 0 && rank == 0) counters_[warp_ * task_.num_held + expert] = __popc(same);
        __syncthreads();
        place_experts();
        __syncthreads();
        if (thread_ >= task_.num_slots) return;
        const std::int32_t row = expert < 0 ? -1 : counters_[warp_ * task_.num_held + expert] + rank;
        write_row(task_, thread_, row);
    }

private:
    /// Turns the counters into the first row of each (warp, expert), and writes the segments. A thread an
    /// expert; rows and segments are added up as one number.
    __device__ void place_experts() {
        __shared__ std::int32_t sum_of_warp[kGroupThreads / 32];
        std::int32_t rows = 0;
        if (thread_ < task_.num_held) {
            for (int w = 0; w < num_warps_; ++w) rows += counters_[w * task_.num_held + thread_];
        }
        const std::int32_t segments = (rows + task_.largest_segment - 1) / task_.largest_segment;
        const std::int32_t mine = segments << 16 | rows;
        std::int32_t up_to = mine;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const std::int32_t below = __shfl_up_sync(kAllLanes, up_to, step);
            if (lane_ >= step) up_to += below;
        }
        if (lane_ == 31) sum_of_warp[warp_] = up_to;
        __syncthreads();
        up_to += __reduce_add_sync(kAllLanes, lane_ < warp_ ? sum_of_warp[lane_] : 0);
        if (thread_ == kGroupThreads - 1) {
            *task_.out.num_rows = up_to & 0xFFFF;
            *task_.out.num_segments = up_to >> 16;
        }
        if (rows == 0) return;
        const std::int32_t first_row = (up_to - mine) & 0xFFFF;
        place_warps(counters_ + thread_, task_.num_held, num_warps_, first_row);
        write_segments(task_, (up_to - mine) >> 16, segments, thread_, first_row, rows);
    }

    const GroupTask& task_;
    std::int32_t* counters_;  // [num_warps][num_held]
    int num_warps_, thread_, warp_, lane_;
};

}  // namespace moe4::cuda
