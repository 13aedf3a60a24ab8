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

/// Sixteen values of a token, in a thread's registers.
struct TokenBlock {
    uint4 bf16[2];
    BlockPlace place;

    __device__ TokenBlock(const EncodeTask& task, std::int64_t token, int index) : bf16{}, place(index) {
        if (place.first_k() >= task.cols) return;
        const auto* from = reinterpret_cast<const uint4*>(task.hidden + token * task.cols + place.first_k());
        bf16[0] = from[0];
        bf16[1] = from[1];
    }

    template <bool kQuantizes>
    __device__ PermutedBlock encode(float scale) const {
        return encode_block<kQuantizes>(bf16, scale, 1.0F / scale);
    }
};

/// Part `part` of `num_parts` blocks of threads: whole tokens, a thread a block of values.
template <bool kQuantizes>
__device__ void encode_tokens(const EncodeTask& task, int part, int num_parts) {
    const std::int64_t width = permuted_size(task.cols);
    for (std::int64_t token = part; token < task.num_tokens; token += num_parts) {
        const float scale = kQuantizes ? task.scale(token, 0) : 1.0F;
        for (int i = static_cast<int>(threadIdx.x); i < width / 16; i += static_cast<int>(blockDim.x)) {
            const TokenBlock block(task, token, i);
            store_block(task.rows + token * width, block.place, block.encode<kQuantizes>(scale));
        }
    }
    zero_padding(task, part, num_parts);
}

/// Tokens first..last, each to all of its rows.
template <bool kQuantizes>
__device__ void scatter_tokens(const GroupTask& group, const EncodeTask& task, std::int64_t first,
                               std::int64_t last) {
    const std::int64_t width = permuted_size(task.cols);
    const int blocks = static_cast<int>(width / 16);
    const int top_k = group.top_k;
    for (std::int64_t i = threadIdx.x; i < (last - first) * blocks; i += kThreads) {
        const std::int64_t token = first + i / blocks;
        const TokenBlock block(task, token, static_cast<int>(i % blocks));
        const std::int32_t* const slot_row = group.out.slot_row + token * top_k;
        PermutedBlock encoded{};
        if (!kQuantizes || !task.scales_by_expert)
            encoded = block.encode<kQuantizes>(kQuantizes ? task.scale(token, 0) : 1.0F);
        for (int j = 0; j < top_k; ++j) {
            const std::int32_t row = __ldcg(slot_row + j);  // by this block's other threads
            if (row < 0) continue;
            if (kQuantizes && task.scales_by_expert) {
                const std::int32_t expert = group.top_k_ids[token * top_k + j] - group.first_expert;
                encoded = block.encode<kQuantizes>(task.scale(token, expert));
            }
            store_block(task.rows + row * width, block.place, encoded);
        }
    }
}

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
    group_slots(group, first * group.top_k, last * group.top_k);
    __syncthreads();
    scatter_tokens<kQuantizes>(group, encode, first, last);
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
        float x[16];
        std::uint32_t largest = 0;
#pragma unroll
        for (int word = 0; word < 2; ++word) {
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                const std::uint32_t pair = reinterpret_cast<std::uint32_t*>(row)[place.pair(word, n)];
                x[word * 8 + n] = __uint_as_float(pair << 16);
                x[word * 8 + n + 4] = __uint_as_float(pair & 0xFFFF0000U);
                largest = __vmaxu2(largest, pair & 0x7FFF7FFFU);
            }
        }
        largest = max(largest << 16, largest & 0xFFFF0000U);
        const float scale = task.row_scale[i / blocks];
        quantize_block(x, largest, scale, 1.0F / scale);
        store_block(row, place, permute_quantized(x));
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
