#pragma once
// The dynamic modes: A measured on the rows, and h quantised with it once all of it is there.
#include <cuda_runtime.h>

#include <cstdint>

namespace moe4::cuda {

/// row_scale[r] = largest finite magnitude of the row / 2688, or with shared_largest of all the rows, through
/// *shared_largest (bits of a float), which the stream must have zeroed.
struct RowScaleTask {
    const std::uint16_t* rows;  // bf16 [max_rows, stride], of which the first `cols` are looked at
    std::int64_t cols, stride;
    std::int64_t max_rows;
    const std::int32_t* num_rows;   // on the device; nullptr: max_rows
    std::uint32_t* shared_largest;  // nullptr: each row has its own
    float* row_scale;
};
void scale_rows(const RowScaleTask&, cudaStream_t);

/// Quantises the permuted bf16 rows [num_rows, permuted_size(cols)] in place, row r with A = row_scale[r].
struct RequantizeTask {
    std::uint16_t* rows;
    std::int64_t cols;
    std::int64_t max_rows;
    const std::int32_t* num_rows;  // on the device
    const float* row_scale;
};
void requantize(const RequantizeTask&, cudaStream_t);

}  // namespace moe4::cuda
