// Groups slots by expert and encodes rows.
#include "backends/cuda/smxx/arrange.hpp"

#include <algorithm>

#include "backends/cuda/launch.hpp"
#include "backends/cuda/ptx/bulk_copy.cuh"
#include "backends/cuda/ptx/dependent_launch.cuh"
#include "backends/cuda/ptx/mbarrier.cuh"
#include "backends/cuda/smxx/encode_token.cuh"
#include "backends/cuda/smxx/few_slots.cuh"
#include "backends/cuda/smxx/grouper.cuh"

namespace moe4::cuda {

namespace {

constexpr int kThreads = kGroupThreads;
constexpr int kCluster = 2;  // blocks that count slots together

/// By part `part` of `num_parts` blocks of threads.
__device__ void clear_counters(const GroupTask& task, int part, int num_parts) {
    for (std::int64_t i = std::int64_t{part} * kThreads + threadIdx.x; i < task.num_cleared;
         i += std::int64_t{num_parts} * kThreads)
        task.cleared[i] = 0;
}

/// All slots, by one block.
__device__ void group_slots(const GroupTask& task) {
    __shared__ GrouperMemory memory;
    if (task.num_slots <= kThreads && (task.num_slots + 31) / 32 * task.num_held <= kGroupCounters)
        return FewSlotsGrouper(task, memory.counters).run();
    const SlotRange all{0, static_cast<std::int32_t>(task.num_slots)};
    Grouper grouper(task, all, all, memory);
    grouper.clear();
    clear_counters(task, 0, 1);
    grouper.count();
    grouper.place();
}

/// By part `part` of `num_parts` blocks of threads.
__device__ void zero_padding(const EncodeTask& task, int part, int num_parts) {
    if (task.padded_rows == nullptr) return;
    const std::int64_t thread = std::int64_t{part} * blockDim.x + threadIdx.x;
    const std::int64_t num_threads = std::int64_t{num_parts} * blockDim.x;
    const std::int64_t width = permuted_size(task.padded_cols);
    const std::int64_t pairs = (width - task.padded_cols) / 2;
    for (std::int64_t i = thread; i < task.num_padded_rows * pairs; i += num_threads) {
        // The pairs (n, n + 4) of the eights behind the last k.
        const std::int64_t k = task.padded_cols + i % pairs / 4 * 8 + i % 4;
        auto* pair = task.padded_rows + i / pairs * width + permuted_position(static_cast<int>(k));
        *reinterpret_cast<std::uint32_t*>(pair) = 0;
    }
}

/// Part `part` of `num_parts` blocks of threads: whole tokens, a thread a block of values.
template <bool kQuantizes>
__device__ void encode_tokens(const EncodeTask& task, int part, int num_parts) {
    const std::int64_t width = permuted_size(task.cols);
    for (std::int64_t token = part; token < task.num_tokens; token += num_parts) {
        const float scale = kQuantizes ? task.scale(token, 0) : 1.0F;
        for (int i = static_cast<int>(threadIdx.x); i < width / 16; i += static_cast<int>(blockDim.x)) {
            const BlockPlace place(i);
            store_block(task.rows + token * width, place,
                        encode<kQuantizes>(load_block(task, token, place), scale));
        }
    }
    zero_padding(task, part, num_parts);
}

/// Encodes rows of a block's slots, a stage of kThreads blocks of values at a time in shared memory, and
/// copies them from there to where they belong. A token is encoded once, for all of its slots, unless its
/// codes depend on the expert: then each slot is.
class Scatter {
public:
    static constexpr int kStages = 2;
    static constexpr int kStageBytes = kThreads * 32;

    /// `stages` is shared memory: kStages of kStageBytes. Begins to load the first stage.
    __device__ Scatter(const EncodeTask& task, const GroupTask& group, SlotRange slots, std::uint16_t* stages)
        : task_(task),
          group_(group),
          first_slot_(slots.first),
          first_token_(slots.first / group.top_k),
          stages_(stages),
          slots_of_row_(task.scales_by_expert ? 1 : group.top_k),
          blocks_of_row_(static_cast<int>(permuted_size(task.cols) / 16)),
          num_blocks_(slots.size() / slots_of_row_ * blocks_of_row_),
          next_(load(static_cast<int>(threadIdx.x))) {}

    /// The blocks first.. of one stage, and loads the next one.
    template <bool kQuantizes>
    __device__ void encode_stage(int first) {
        const int i = first + static_cast<int>(threadIdx.x);
        const Bf16Block block = next_;
        next_ = load(i + kThreads);
        if (i >= num_blocks_) return;
        const int row = i / blocks_of_row_;
        const PermutedBlock encoded = encode<kQuantizes>(block, kQuantizes ? scale(row) : 1.0F);
        store_block(stage(first) + (row * blocks_of_row_ - first) * 16, BlockPlace(i % blocks_of_row_),
                    encoded);
    }

    /// Once the first stage is encoded and the rows of slots are known.
    template <bool kQuantizes>
    __device__ void run() {
        for (int first = 0; first < num_blocks_; first += kThreads) {
            if (first > 0) {
                ptx::bulk_stores_wait<kStages - 1>();  // they have left the stage that comes next
                __syncthreads();
                encode_stage<kQuantizes>(first);
            }
            ptx::order_shared_before_async_copies();
            __syncthreads();
            copy_stage(first);
            ptx::bulk_stores_commit();
        }
        ptx::bulk_stores_wait<0>();
    }

private:
    __device__ int first_slot(int row) const { return first_slot_ + row * slots_of_row_; }
    __device__ int token(int row) const {
        return task_.scales_by_expert ? first_slot(row) / group_.top_k : first_token_ + row;
    }
    __device__ std::uint16_t* stage(int first) const {
        return stages_ + first / kThreads % kStages * (kStageBytes / 2);
    }
    __device__ Bf16Block load(int i) const {
        if (i >= num_blocks_) return {};
        return load_block(task_, token(i / blocks_of_row_), BlockPlace(i % blocks_of_row_));
    }
    __device__ float scale(int row) const {
        const std::int32_t expert = task_.scales_by_expert ? held_expert(group_, first_slot(row)) : 0;
        return task_.scale(token(row), max(expert, 0));
    }

    /// A thread a row's part in the stage and slot.
    __device__ void copy_stage(int first) const {
        const int last = min(first + kThreads, num_blocks_);
        const int first_row = first / blocks_of_row_;
        const int copies = ((last - 1) / blocks_of_row_ - first_row + 1) * slots_of_row_;
        const std::int64_t width = permuted_size(task_.cols);
        for (int i = static_cast<int>(threadIdx.x); i < copies; i += kThreads) {
            const int row = first_row + i / slots_of_row_;
            const std::int32_t to = __ldcg(group_.out.slot_row + first_slot(row) + i % slots_of_row_);
            if (to < 0) continue;
            const int begin = max(first, row * blocks_of_row_);
            const int end = min(last, (row + 1) * blocks_of_row_);
            ptx::bulk_store(task_.rows + to * width + (begin - row * blocks_of_row_) * 16,
                            ptx::shared_address(stage(first) + (begin - first) * 16), (end - begin) * 32);
        }
    }

    const EncodeTask& task_;
    const GroupTask& group_;
    int first_slot_, first_token_;
    std::uint16_t* stages_;
    int slots_of_row_, blocks_of_row_, num_blocks_;
    Bf16Block next_;
};

template <bool kQuantizes>
__global__ void __launch_bounds__(kThreads)
    group_and_encode_kernel(const GroupTask group, const EncodeTask encode) {
    ptx::wait_for_previous_kernel();
    ptx::allow_next_kernel();
    if (blockIdx.x == 0) return group_slots(group);
    encode_tokens<kQuantizes>(encode, static_cast<int>(blockIdx.x) - 1, static_cast<int>(gridDim.x) - 1);
}

template <bool kQuantizes>
__global__ void __cluster_dims__(kCluster) __launch_bounds__(kThreads)
    group_and_scatter_kernel(const GroupTask group, const EncodeTask encode, std::int32_t slots_per_block) {
    __shared__ GrouperMemory memory;
    extern __shared__ __align__(128) std::uint16_t stages[];
    const auto slots = [&](int first_block, int blocks) {
        const auto all = static_cast<std::int32_t>(group.num_slots);
        return SlotRange{min(all, first_block * slots_per_block),
                         min(all, (first_block + blocks) * slots_per_block)};
    };
    const int block = static_cast<int>(blockIdx.x);
    const SlotRange own = slots(block, 1);
    Grouper grouper(group, own, slots(block / kCluster * kCluster, kCluster), memory);
    grouper.clear();
    ptx::wait_for_previous_kernel();
    ptx::allow_next_kernel();
    grouper.count();
    Scatter scatter(encode, group, own, stages);
    clear_counters(group, block, static_cast<int>(gridDim.x));
    scatter.encode_stage<kQuantizes>(0);
    grouper.place();
    __syncthreads();
    scatter.run<kQuantizes>();
    zero_padding(encode, block, static_cast<int>(gridDim.x));
    grouper.leave();
}

}  // namespace

void group_and_encode(const GroupTask& group, const EncodeTask& encode, cudaStream_t stream) {
    const std::int64_t padding = permuted_size(encode.padded_cols) - encode.padded_cols;
    const dim3 grid(1 + std::max(blocks_for(encode.num_tokens, 1),
                                 blocks_for(encode.num_padded_rows * padding / 2, kThreads)));
    launch(encode.quantizes ? group_and_encode_kernel<true> : group_and_encode_kernel<false>, grid, kThreads,
           0, stream, group, encode);
}

void group_and_scatter(const GroupTask& group, const EncodeTask& encode, int num_sms, cudaStream_t stream) {
    const std::int64_t most_blocks = num_sms / kCluster * kCluster;
    const std::int64_t tokens_per_block = (encode.num_tokens + most_blocks - 1) / most_blocks;
    const std::int64_t blocks = (encode.num_tokens + tokens_per_block - 1) / tokens_per_block;
    launch(encode.quantizes ? group_and_scatter_kernel<true> : group_and_scatter_kernel<false>,
           dim3(static_cast<unsigned>(round_up(blocks, kCluster))), kThreads,
           Scatter::kStages * Scatter::kStageBytes, stream, group, encode,
           static_cast<std::int32_t>(tokens_per_block * group.top_k));
}

void load_scatter() {
    for (const auto kernel : {group_and_scatter_kernel<false>, group_and_scatter_kernel<true>})
        check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                   cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   Scatter::kStages * Scatter::kStageBytes),
              "reserving shared memory");
}

}  // namespace moe4::cuda
