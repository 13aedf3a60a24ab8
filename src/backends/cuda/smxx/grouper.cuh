#pragma once
// A counting sort of slots by expert: each warp of a block owns a stretch of slots and counts them by expert,
// two prefix sums turn the counts into places. No order of atomics shows, so the order of rows is the same in
// every run. Blocks that share the work need the counts of all slots: the two blocks of a cluster count one
// half each, and each block places its own.
#include <cooperative_groups.h>

#include "backends/cuda/smxx/slots.cuh"

namespace moe4::cuda {

struct SlotRange {
    std::int32_t first, last;
    __device__ bool contains(std::int32_t slot) const { return slot >= first && slot < last; }
    __device__ std::int32_t size() const { return last - first; }
};

/// Shared memory of a block that groups.
struct GrouperMemory {
    struct Places {
        std::int32_t rows, segments;
    };
    std::int32_t counters[kGroupCounters];  // [warps][experts held]
    // The slots that this block has counted, by expert: of other clusters, and its own.
    std::int32_t before[kGroupThreads], behind[kGroupThreads], own[kGroupThreads];
    Places of_warp[kGroupThreads / 32];
};

/// By all threads of a block of kGroupThreads, and of its cluster: clear(), count(), place(), leave().
class Grouper {
public:
    /// Places the slots `own`; `cluster` are those of the block's cluster, a stretch of which each block
    /// owns, in order.
    __device__ Grouper(const GroupTask& task, SlotRange own, SlotRange cluster, GrouperMemory& memory)
        : task_(task),
          own_(own),
          cluster_(cluster),
          memory_(memory),
          num_warps_(min(min(kGroupThreads / 32, kGroupCounters / task.num_held), (own.size() + 31) / 32)),
          thread_(static_cast<int>(threadIdx.x)),
          warp_(thread_ / 32),
          lane_(thread_ % 32) {}

    /// Of shared memory alone.
    __device__ void clear() {
        for (int i = thread_; i < num_warps_ * task_.num_held; i += kGroupThreads) memory_.counters[i] = 0;
        memory_.before[thread_] = memory_.behind[thread_] = memory_.own[thread_] = 0;
        __syncthreads();
    }

    __device__ void count() {
        count_others();
        if (warp_ < num_warps_) count_own();
        cluster().barrier_arrive();
    }

    __device__ void place() {
        cluster().barrier_wait();
        place_experts();
        __syncthreads();
        if (warp_ < num_warps_) place_slots();
    }

    /// Until then the other block may read this one's counts.
    __device__ void leave() { cluster().sync(); }

private:
    __device__ static cooperative_groups::cluster_group cluster() {
        return cooperative_groups::this_cluster();
    }

    __device__ std::int32_t expert_before(std::int32_t slot, std::int32_t last) const {
        return slot < last ? held_expert(task_, slot) : -1;
    }

    /// visit(slot, its expert or -1, whether it is one) by all lanes for this warp's slots, in order.
    template <class Visit>
    __device__ void for_each_slot(const Visit& visit) {
        constexpr int kAhead = 4;  // loads in flight
        const auto stretch =
            static_cast<std::int32_t>(round_up((own_.size() + num_warps_ - 1) / num_warps_, 32));
        const std::int32_t last = min(own_.last, own_.first + (warp_ + 1) * stretch);
        for (std::int32_t first = own_.first + warp_ * stretch; first < last; first += 32 * kAhead) {
            std::int32_t experts[kAhead];
#pragma unroll
            for (int i = 0; i < kAhead; ++i) experts[i] = expert_before(first + i * 32 + lane_, last);
#pragma unroll
            for (int i = 0; i < kAhead; ++i) {
                const std::int32_t slot = first + i * 32 + lane_;
                if (slot - lane_ < last) visit(slot, experts[i], slot < last);
            }
        }
    }

    /// This block's share of the slots of other clusters.
    __device__ void count_others() {
        constexpr int kAhead = 8;
        if (cluster_.size() == task_.num_slots) return;
        const int step = kGroupThreads * static_cast<int>(cluster().num_blocks());
        std::int32_t slot = kGroupThreads * static_cast<int>(cluster().block_rank()) + thread_;
        while (slot - thread_ < task_.num_slots) {
            std::int32_t experts[kAhead];
#pragma unroll
            for (int i = 0; i < kAhead; ++i) experts[i] = expert_before(slot + i * step, task_.num_slots);
#pragma unroll
            for (int i = 0; i < kAhead; ++i, slot += step) {
                if (experts[i] < 0 || cluster_.contains(slot)) continue;
                atomicAdd((slot < cluster_.first ? memory_.before : memory_.behind) + experts[i], 1);
            }
        }
    }

    /// The order of these additions does not show in the sums.
    __device__ void count_own() {
        std::int32_t* counters = memory_.counters + warp_ * task_.num_held;
        for_each_slot([&](std::int32_t, std::int32_t expert, bool) {
            if (expert < 0) return;
            atomicAdd(counters + expert, 1);
            atomicAdd(memory_.own + expert, 1);
        });
    }

    __device__ void place_slots() {
        std::int32_t* places = memory_.counters + warp_ * task_.num_held;
        for_each_slot([&](std::int32_t slot, std::int32_t expert, bool is_slot) {
            const unsigned same = same_expert(expert, task_.num_held);
            const int rank = __popc(same & ((1U << lane_) - 1U));
            const std::int32_t row = expert >= 0 ? places[expert] + rank : -1;
            __syncwarp();
            if (expert >= 0 && rank == 0) places[expert] += __popc(same);
            __syncwarp();
            if (is_slot) write_row(task_, slot, row);
        });
    }

    /// Turns the counters into the first place of each (warp, expert), and writes the segments. A thread an
    /// expert.
    __device__ void place_experts() {
        const int expert = thread_;
        std::int32_t rows = 0;
        std::int32_t in_front = 0;  // of this block's slots
        if (expert < task_.num_held) {
            const unsigned rank = cluster().block_rank();
            for (unsigned block = 0; block < cluster().num_blocks(); ++block) {
                const GrouperMemory& its = *cluster().map_shared_rank(&memory_, block);
                const std::int32_t before = its.before[expert];
                const std::int32_t own = its.own[expert];
                in_front += before + (block < rank ? own : 0);
                rows += before + own + its.behind[expert];
            }
        }
        const std::int32_t segments = (rows + task_.largest_segment - 1) / task_.largest_segment;
        std::int32_t up_to_rows = rows;
        std::int32_t up_to_segments = segments;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const std::int32_t below_rows = __shfl_up_sync(kAllLanes, up_to_rows, step);
            const std::int32_t below_segments = __shfl_up_sync(kAllLanes, up_to_segments, step);
            if (lane_ < step) continue;
            up_to_rows += below_rows;
            up_to_segments += below_segments;
        }
        if (lane_ == 31) memory_.of_warp[warp_] = {up_to_rows, up_to_segments};
        __syncthreads();
        const GrouperMemory::Places below = memory_.of_warp[lane_];
        up_to_rows += __reduce_add_sync(kAllLanes, lane_ < warp_ ? below.rows : 0);
        up_to_segments += __reduce_add_sync(kAllLanes, lane_ < warp_ ? below.segments : 0);
        const bool is_first = own_.first == 0;
        if (is_first && thread_ == kGroupThreads - 1) {
            *task_.out.num_rows = up_to_rows;
            *task_.out.num_segments = up_to_segments;
        }
        if (rows == 0) return;
        place_warps(memory_.counters + expert, task_.num_held, num_warps_, up_to_rows - rows + in_front);
        if (is_first)
            write_segments(task_, up_to_segments - segments, segments, expert, up_to_rows - rows, rows);
    }

    const GroupTask& task_;
    SlotRange own_, cluster_;
    GrouperMemory& memory_;
    int num_warps_, thread_, warp_, lane_;
};

}  // namespace moe4::cuda
