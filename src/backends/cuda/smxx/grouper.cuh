#pragma once
// A counting sort of slots by expert: each warp of a block owns a stretch of slots and counts them by expert,
// two prefix sums turn the counts into places. No order of atomics shows, so the order of rows is the same in
// every run. Several blocks share the work by each counting all slots and placing its own.
#include <cub/block/block_scan.cuh>

#include "backends/cuda/smxx/slots.cuh"

namespace moe4::cuda {

struct ExpertPlace {
    std::int32_t rows, segments;
};
struct SumPlaces {
    __device__ ExpertPlace operator()(ExpertPlace a, ExpertPlace b) const {
        return {a.rows + b.rows, a.segments + b.segments};
    }
};

/// Slots of all blocks by expert: [experts held] each.
struct SlotCounts {
    std::int32_t* before;  // in front of this block's slots
    std::int32_t* behind;
};

class Grouper {
public:
    /// A block of kGroupThreads; places the slots first..last, `counters` and `counts` are shared memory.
    __device__ Grouper(const GroupTask& task, std::int64_t first, std::int64_t last, std::int32_t* counters,
                       SlotCounts counts)
        : task_(task),
          first_(first),
          last_(last),
          counters_(counters),
          counts_(counts),
          num_warps_(min(min(kGroupThreads / 32, kGroupCounters / task.num_held),
                         static_cast<int>((last - first + 31) / 32))),
          warp_(static_cast<int>(threadIdx.x) / 32),
          lane_(static_cast<int>(threadIdx.x) % 32) {}

    __device__ void run() {
        for (int i = static_cast<int>(threadIdx.x); i < num_warps_ * task_.num_held; i += kGroupThreads)
            counters_[i] = 0;
        for (int i = static_cast<int>(threadIdx.x); i < task_.num_held; i += kGroupThreads)
            counts_.before[i] = counts_.behind[i] = 0;
        for (std::int64_t i = threadIdx.x; first_ == 0 && i < task_.num_cleared; i += kGroupThreads)
            task_.cleared[i] = 0;
        __syncthreads();
        count_others();
        if (warp_ < num_warps_) count();
        __syncthreads();
        place_experts();
        __syncthreads();
        if (warp_ < num_warps_) place_slots();
    }

private:
    __device__ std::int32_t expert_before(std::int64_t slot, std::int64_t last) const {
        return slot < last ? held_expert(task_, slot) : -1;
    }

    /// visit(slot, its expert or -1, whether it is one) by all lanes for this warp's slots, in order.
    template <class Visit>
    __device__ void for_each_slot(const Visit& visit) {
        constexpr int kAhead = 8;  // loads in flight
        const std::int64_t stretch = round_up((last_ - first_ + num_warps_ - 1) / num_warps_, 32);
        const std::int64_t last = min(last_, first_ + (warp_ + 1) * stretch);
        for (std::int64_t first = first_ + warp_ * stretch; first < last; first += 32 * kAhead) {
            std::int32_t experts[kAhead];
#pragma unroll
            for (int i = 0; i < kAhead; ++i) experts[i] = expert_before(first + i * 32 + lane_, last);
#pragma unroll
            for (int i = 0; i < kAhead; ++i) {
                const std::int64_t slot = first + i * 32 + lane_;
                if (slot - lane_ < last) visit(slot, experts[i], slot < last);
            }
        }
    }

    /// Blocks begin at different slots: all at once would ask one slice of L2 for the same line.
    __device__ void count_others() {
        constexpr int kAhead = 8;
        constexpr std::int64_t kStep = kGroupThreads * kAhead;
        if (last_ - first_ == task_.num_slots) return;
        const std::int64_t num_steps = (task_.num_slots + kStep - 1) / kStep;
        for (std::int64_t i = 0; i < num_steps; ++i) {
            const std::int64_t step = (i + blockIdx.x) % num_steps;
            std::int32_t experts[kAhead];
#pragma unroll
            for (int j = 0; j < kAhead; ++j)
                experts[j] = expert_before(step * kStep + j * kGroupThreads + threadIdx.x, task_.num_slots);
#pragma unroll
            for (int j = 0; j < kAhead; ++j) {
                const std::int64_t slot = step * kStep + j * kGroupThreads + threadIdx.x;
                if (experts[j] < 0 || (slot >= first_ && slot < last_)) continue;
                atomicAdd((slot < first_ ? counts_.before : counts_.behind) + experts[j], 1);
            }
        }
    }

    /// The order of these additions does not show in the sums.
    __device__ void count() {
        std::int32_t* counters = counters_ + warp_ * task_.num_held;
        for_each_slot([&](std::int64_t, std::int32_t expert, bool) {
            if (expert >= 0) atomicAdd(counters + expert, 1);
        });
    }

    __device__ void place_slots() {
        std::int32_t* places = counters_ + warp_ * task_.num_held;
        for_each_slot([&](std::int64_t slot, std::int32_t expert, bool is_slot) {
            const unsigned same = same_expert(expert, task_.num_held);
            const int rank = __popc(same & ((1U << lane_) - 1U));
            const std::int32_t row = expert >= 0 ? places[expert] + rank : -1;
            __syncwarp();
            if (expert >= 0 && rank == 0) places[expert] += __popc(same);
            __syncwarp();
            if (is_slot) write_row(task_, slot, row);
        });
    }

    /// Turns the counters into the first place of each (warp, expert), and writes the segments.
    __device__ void place_experts() {
        // Not cub's default, whose memory and these counters are more than the 48 KB of a block.
        using Scan = cub::BlockScan<ExpertPlace, kGroupThreads, cub::BLOCK_SCAN_WARP_SCANS>;
        __shared__ typename Scan::TempStorage storage;
        const int expert = static_cast<int>(threadIdx.x);
        ExpertPlace mine{0, 0};
        if (expert < task_.num_held) {
            mine.rows = counts_.before[expert] + counts_.behind[expert];
            for (int w = 0; w < num_warps_; ++w) mine.rows += counters_[w * task_.num_held + expert];
            mine.segments = (mine.rows + task_.largest_segment - 1) / task_.largest_segment;
        }
        ExpertPlace before{0, 0};
        ExpertPlace all{0, 0};
        Scan(storage).ExclusiveScan(mine, before, ExpertPlace{0, 0}, SumPlaces{}, all);
        if (first_ == 0 && threadIdx.x == 0) {
            *task_.out.num_rows = all.rows;
            *task_.out.num_segments = all.segments;
        }
        if (expert >= task_.num_held || mine.rows == 0) return;
        std::int32_t place = before.rows + counts_.before[expert];
        for (int w = 0; w < num_warps_; ++w) {
            const std::int32_t count = counters_[w * task_.num_held + expert];
            counters_[w * task_.num_held + expert] = place;
            place += count;
        }
        if (first_ > 0) return;
        write_segments(task_, before.segments, mine.segments, expert, before.rows, mine.rows);
    }

    const GroupTask& task_;
    std::int64_t first_, last_;
    std::int32_t* counters_;  // [num_warps][num_held]
    SlotCounts counts_;
    int num_warps_, warp_, lane_;
};

}  // namespace moe4::cuda
