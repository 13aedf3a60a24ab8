// Groups slots by expert and encodes rows.
#include "backends/cuda/smxx/arrange.hpp"

#include <algorithm>

#include "backends/cuda/encode.cuh"
#include "backends/cuda/launch.cuh"
#include "backends/cuda/ptx/dependent_launch.cuh"
#include "backends/cuda/smxx/few_slots.cuh"
#include "backends/cuda/smxx/grouper.cuh"

namespace moe4::cuda {

namespace {

constexpr int kThreads = kGroupThreads;

/// The slots first..last, by one block.
__device__ void group_slots(const GroupTask& task, std::int64_t first, std::int64_t last) {
    __shared__ std::int32_t counters[kGroupCounters];
    __shared__ std::int32_t before[kThreads];
    __shared__ std::int32_t behind[kThreads];
    const bool has_all = first == 0 && last == task.num_slots;
    if (has_all && last <= kThreads && (last + 31) / 32 * task.num_held <= kGroupCounters)
        FewSlotsGrouper(task, counters).run();
    else
        Grouper(task, first, last, counters, {before, behind}).run();
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

__device__ Bf16Block load_block(const EncodeTask& task, std::int64_t token, const BlockPlace& place) {
    if (place.first_k() >= task.cols) return {};
    const auto* from = reinterpret_cast<const uint4*>(task.hidden + token * task.cols + place.first_k());
    return {from[0], from[1]};
}

template <bool kQuantizes>
__device__ PermutedBlock encode(const Bf16Block& block, float scale) {
    PermutedBlock encoded[1];
    encode_blocks<kQuantizes>({block}, scale, 1.0F / scale, encoded);
    return encoded[0];
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

/// The blocks of tokens first..last, each to all of its token's rows: a thread has every kThreads-th block,
/// and loads the next one before it stores one, the first before it is known which rows there are.
class Scatter {
public:
    __device__ Scatter(const EncodeTask& task, std::int64_t first, std::int64_t last)
        : task_(task),
          first_(first),
          blocks_of_token_(static_cast<int>(permuted_size(task.cols) / 16)),
          num_blocks_(static_cast<int>(last - first) * blocks_of_token_),
          next_(load(static_cast<int>(threadIdx.x))) {}

    template <bool kQuantizes>
    __device__ void run(const GroupTask& group) {
        for (int i = static_cast<int>(threadIdx.x); i < num_blocks_; i += kThreads) {
            const Bf16Block block = next_;
            next_ = load(i + kThreads);
            store<kQuantizes>(group, block, i);
        }
    }

private:
    __device__ std::int64_t token(int i) const { return first_ + i / blocks_of_token_; }
    __device__ BlockPlace place(int i) const { return BlockPlace(i % blocks_of_token_); }
    __device__ Bf16Block load(int i) const {
        return i < num_blocks_ ? load_block(task_, token(i), place(i)) : Bf16Block{};
    }

    template <bool kQuantizes>
    __device__ void store(const GroupTask& group, const Bf16Block& block, int i) const {
        const std::int64_t token = this->token(i);
        const std::int64_t first_slot = token * group.top_k;
        const BlockPlace place = this->place(i);
        PermutedBlock encoded{};
        if (!kQuantizes || !task_.scales_by_expert)
            encoded = encode<kQuantizes>(block, kQuantizes ? task_.scale(token, 0) : 1.0F);
        for (int j = 0; j < group.top_k; ++j) {
            const std::int32_t row = __ldcg(group.out.slot_row + first_slot + j);  // by this block's threads
            if (row < 0) continue;
            if (kQuantizes && task_.scales_by_expert) {
                const std::int32_t expert = group.top_k_ids[first_slot + j] - group.first_expert;
                encoded = encode<kQuantizes>(block, task_.scale(token, expert));
            }
            store_block(task_.rows + row * (blocks_of_token_ * std::int64_t{16}), place, encoded);
        }
    }

    const EncodeTask& task_;
    std::int64_t first_;
    int blocks_of_token_, num_blocks_;
    Bf16Block next_;
};

template <bool kQuantizes>
__global__ void __launch_bounds__(kThreads)
    group_and_encode_kernel(const GroupTask group, const EncodeTask encode) {
    ptx::wait_for_previous_kernel();
    ptx::allow_next_kernel();
    if (blockIdx.x == 0) return group_slots(group, 0, group.num_slots);
    encode_tokens<kQuantizes>(encode, static_cast<int>(blockIdx.x) - 1, static_cast<int>(gridDim.x) - 1);
}

template <bool kQuantizes>
__global__ void __launch_bounds__(kThreads)
    group_and_scatter_kernel(const GroupTask group, const EncodeTask encode, std::int64_t tokens_per_block) {
    ptx::wait_for_previous_kernel();
    ptx::allow_next_kernel();
    const std::int64_t first = blockIdx.x * tokens_per_block;
    const std::int64_t last = min(encode.num_tokens, first + tokens_per_block);
    Scatter scatter(encode, first, last);
    group_slots(group, first * group.top_k, last * group.top_k);
    __syncthreads();
    scatter.run<kQuantizes>(group);
    zero_padding(encode, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
}

__global__ void __launch_bounds__(256) requantize_kernel(const RequantizeTask task) {
    ptx::wait_for_previous_kernel();
    ptx::allow_next_kernel();
    const std::int64_t width = permuted_size(task.cols);
    const std::int64_t blocks = width / 16;
    const std::int64_t num_rows = *task.num_rows;
    for (std::int64_t i = std::int64_t{blockIdx.x} * 256 + threadIdx.x; i < num_rows * blocks;
         i += std::int64_t{gridDim.x} * 256) {
        const BlockPlace place(i % blocks);
        std::uint16_t* row = task.rows + i / blocks * width;
        float x[1][16];
        std::uint32_t largest = 0;
#pragma unroll
        for (int word = 0; word < 2; ++word) {
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                const std::uint32_t pair = reinterpret_cast<std::uint32_t*>(row)[place.pair(word, n)];
                x[0][word * 8 + n] = __uint_as_float(pair << 16);
                x[0][word * 8 + n + 4] = __uint_as_float(pair & 0xFFFF0000U);
                largest = __vmaxu2(largest, pair & 0x7FFF7FFFU);
            }
        }
        largest = max(largest << 16, largest & 0xFFFF0000U);
        const float scale = task.row_scale[i / blocks];
        quantize_blocks(x, {largest}, scale, 1.0F / scale);
        store_block(row, place, permute_quantized(x[0]));
    }
}

__global__ void __launch_bounds__(256) row_largest_kernel(const RowScaleTask task) {
    ptx::wait_for_previous_kernel();
    ptx::allow_next_kernel();
    __shared__ std::uint32_t largest_of_warp[8];
    const std::int64_t num_rows = task.num_rows == nullptr ? task.max_rows : *task.num_rows;
    for (std::int64_t row = blockIdx.x; row < num_rows; row += gridDim.x) {
        std::uint32_t largest = 0;
        for (std::int64_t k = threadIdx.x; k < task.cols; k += 256) {
            const std::uint32_t bits = (task.rows[row * task.stride + k] & 0x7FFFU) << 16;
            if (bits < kInfinityBits) largest = max(largest, bits);
        }
        largest = __reduce_max_sync(kAllLanes, largest);
        if (threadIdx.x % 32 == 0) largest_of_warp[threadIdx.x / 32] = largest;
        __syncthreads();
        if (threadIdx.x == 0) {
            for (const std::uint32_t other : largest_of_warp) largest = max(largest, other);
            if (task.shared_largest == nullptr)
                task.row_scale[row] = __fdiv_rn(__uint_as_float(largest), 2688.0F);
            else
                atomicMax(task.shared_largest, largest);  // of integers: any order gives the same
        }
        __syncthreads();
    }
}

__global__ void __launch_bounds__(256) spread_largest_kernel(const RowScaleTask task) {
    ptx::wait_for_previous_kernel();
    ptx::allow_next_kernel();
    const std::int64_t num_rows = task.num_rows == nullptr ? task.max_rows : *task.num_rows;
    const float scale = __fdiv_rn(__uint_as_float(*task.shared_largest), 2688.0F);
    for (std::int64_t row = std::int64_t{blockIdx.x} * 256 + threadIdx.x; row < num_rows;
         row += std::int64_t{gridDim.x} * 256)
        task.row_scale[row] = scale;
}

/// Blocks for so many threads' worth of work, at most what fills a large GPU a few times over.
unsigned blocks_for(std::int64_t work, int threads) {
    const std::int64_t blocks = (work + threads - 1) / threads;
    return static_cast<unsigned>(blocks < 1 ? 1 : blocks > 2048 ? 2048 : blocks);
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
    const std::int64_t tokens_per_block = (encode.num_tokens + num_sms - 1) / num_sms;
    const std::int64_t blocks = (encode.num_tokens + tokens_per_block - 1) / tokens_per_block;
    launch(encode.quantizes ? group_and_scatter_kernel<true> : group_and_scatter_kernel<false>,
           dim3(static_cast<unsigned>(blocks)), kThreads, 0, stream, group, encode, tokens_per_block);
}

void requantize(const RequantizeTask& task, cudaStream_t stream) {
    launch(requantize_kernel, dim3(blocks_for(task.max_rows * permuted_size(task.cols) / 16, 256)), 256, 0,
           stream, task);
}

void scale_rows(const RowScaleTask& task, cudaStream_t stream) {
    launch(row_largest_kernel, dim3(blocks_for(task.max_rows, 1)), 256, 0, stream, task);
    if (task.shared_largest != nullptr)
        launch(spread_largest_kernel, dim3(blocks_for(task.max_rows, 256)), 256, 0, stream, task);
}

}  // namespace moe4::cuda
