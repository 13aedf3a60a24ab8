#include "backends/cuda/smxx/quantize.hpp"

#include <algorithm>
#include <cub/block/block_scan.cuh>

#include "backends/cuda/k_order.hpp"
#include "backends/cuda/launch.hpp"
#include "backends/cuda/ptx/dependent_launch.cuh"
#include "backends/cuda/quantize.cuh"

namespace moe4::cuda {

namespace {

constexpr int kThreads = 1024;
constexpr int kRowThreads = 128;

/// The first of the rows, ascending by expert, that belongs to `expert` or one behind it.
__device__ std::int32_t first_row_of(const SwizzleTask& task, std::int32_t expert) {
    std::int32_t low = 0;
    std::int32_t high = *task.num_rows;
    while (low < high) {
        const std::int32_t middle = (low + high) / 2;
        if (task.row_expert[middle] < expert)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

__global__ void __launch_bounds__(kThreads) place_experts_kernel(const SwizzleTask task) {
    ptx::wait_for_previous_kernel();
    ptx::allow_next_kernel();
    using Scan = cub::BlockScan<std::int32_t, kThreads>;
    __shared__ typename Scan::TempStorage storage;
    const auto expert = static_cast<std::int32_t>(threadIdx.x);
    std::int32_t padded = 0;
    if (expert < task.num_experts) {
        const std::int32_t rows = first_row_of(task, expert + 1) - first_row_of(task, expert);
        padded = static_cast<std::int32_t>(round_up(rows, 128));
    }
    std::int32_t first = 0;
    std::int32_t all = 0;
    Scan(storage).ExclusiveSum(padded, first, all);
    if (expert < task.num_experts) task.first_padded_row[expert] = first;
    if (expert == 0) task.first_padded_row[task.num_experts] = all;
}

/// Where block `block` of a padded row lies: swizzled_scale_offset of moe4/nvfp4.hpp.
__device__ std::int64_t blocked_offset(std::int64_t row, std::int64_t block, std::int64_t num_blocks) {
    const std::int64_t tiles_across = (num_blocks + 3) / 4;
    return ((row / 128) * tiles_across + block / 4) * 512 + row % 32 * 16 + row % 128 / 32 * 4 + block % 4;
}

__device__ std::uint8_t encode_block(const std::uint16_t* from, float global_scale, std::uint8_t* codes) {
    float x[16];
    std::uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        x[i] = __uint_as_float(std::uint32_t{from[i]} << 16);
        largest = max(largest, magnitude_bits(x[i]));
    }
    const BlockQuantizer quantizer = BlockQuantizer::of_any(largest, global_scale, 1.0F / global_scale);
#pragma unroll
    for (int i = 0; i < 8; ++i)
        codes[i] = static_cast<std::uint8_t>(quantizer.code(x[2 * i]) | quantizer.code(x[2 * i + 1]) << 4);
    return quantizer.scale_byte();
}

__global__ void __launch_bounds__(kRowThreads) quantize_and_swizzle_kernel(const SwizzleTask task) {
    ptx::wait_for_previous_kernel();
    ptx::allow_next_kernel();
    const std::int64_t num_blocks = task.cols / 16;
    const std::int64_t blocks_across = round_up(num_blocks, 4);
    const std::int32_t num_padded_rows = task.first_padded_row[task.num_experts];
    for (std::int32_t padded_row = static_cast<std::int32_t>(blockIdx.x); padded_row < num_padded_rows;
         padded_row += static_cast<std::int32_t>(gridDim.x)) {
        std::int32_t expert = 0;
        for (std::int32_t step = 512; step > 0; step /= 2) {
            const std::int32_t next = expert + step;
            if (next < task.num_experts && task.first_padded_row[next] <= padded_row) expert = next;
        }
        const std::int32_t row = first_row_of(task, expert) + padded_row - task.first_padded_row[expert];
        const bool is_padding = row >= first_row_of(task, expert + 1);
        for (std::int64_t block = threadIdx.x; block < blocks_across; block += kRowThreads) {
            std::uint8_t scale = 0;
            if (!is_padding && block < num_blocks) {
                scale =
                    encode_block(task.hidden + task.row_token[row] * task.cols + block * 16,
                                 task.expert_scale[expert], task.codes + row * (task.cols / 2) + block * 8);
            }
            task.scales[blocked_offset(padded_row, block, num_blocks)] = scale;
        }
    }
}

}  // namespace

void quantize_and_swizzle(const SwizzleTask& task, cudaStream_t stream) {
    launch(place_experts_kernel, dim3(1), kThreads, 0, stream, task);
    const std::int64_t blocks = std::clamp<std::int64_t>(task.max_padded_rows, 1, 4096);
    launch(quantize_and_swizzle_kernel, dim3(static_cast<unsigned>(blocks)), kRowThreads, 0, stream, task);
}

}  // namespace moe4::cuda
