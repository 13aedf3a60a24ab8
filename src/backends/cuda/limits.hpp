#pragma once
// What the device can do at most, measured: reading memory, and bf16 products by cuBLAS where it is
// installed.
#include <vector>

#include "backends/cuda/runtime.hpp"
#include "moe4/backend.hpp"

namespace moe4::cuda {

/// "dram_read" [GB/s]; "cublas_bf16" (ten products of 8192^3 in a burst) and "cublas_bf16_sustained" (of the
/// hundred that follow) [GOP/s]. The device is current.
std::vector<MachineLimit> measure_limits(int num_sms);

/// Enqueues one pass over the data.
void read_memory(const void* data, std::size_t bytes, std::uint32_t* sink, int num_sms, cudaStream_t);

}  // namespace moe4::cuda
