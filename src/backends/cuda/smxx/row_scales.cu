#include "backends/cuda/smxx/row_scales.hpp"

#include "backends/cuda/encode.cuh"
#include "backends/cuda/launch.hpp"
#include "backends/cuda/ptx/dependent_launch.cuh"
#include "backends/cuda/warp.cuh"

namespace moe4::cuda {

namespace {

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

__global__ void __launch_bounds__(256) requantize_kernel(const RequantizeTask task) {
    ptx::wait_for_previous_kernel();
    ptx::allow_next_kernel();
    const std::int64_t width = permuted_size(task.cols);
    const std::int64_t blocks_of_row = width / 16;
    const std::int64_t num_rows = *task.num_rows;
    for (std::int64_t i = std::int64_t{blockIdx.x} * 256 + threadIdx.x; i < num_rows * blocks_of_row;
         i += std::int64_t{gridDim.x} * 256) {
        const BlockPlace place(i % blocks_of_row);
        std::uint16_t* row = task.rows + i / blocks_of_row * width;
        BlockPairs blocks[1];
#pragma unroll
        for (int j = 0; j < 8; ++j)
            blocks[0][j / 4][j % 4] = reinterpret_cast<std::uint32_t*>(row)[place.pair(j / 4, j % 4)];
        const float scale = task.row_scale[i / blocks_of_row];
        quantize_blocks(blocks, scale, 1.0F / scale);
        store_block(row, place, permute_block(blocks[0]));
    }
}

}  // namespace

void scale_rows(const RowScaleTask& task, cudaStream_t stream) {
    launch(row_largest_kernel, dim3(blocks_for(task.max_rows, 1)), 256, 0, stream, task);
    if (task.shared_largest != nullptr)
        launch(spread_largest_kernel, dim3(blocks_for(task.max_rows, 256)), 256, 0, stream, task);
}

void requantize(const RequantizeTask& task, cudaStream_t stream) {
    launch(requantize_kernel, dim3(blocks_for(task.max_rows * permuted_size(task.cols) / 16, 256)), 256, 0,
           stream, task);
}

}  // namespace moe4::cuda
