#pragma once
// What the device can do at most, measured: reading memory, and bf16 products by cuBLAS where it is
// installed.
#include <vector>

#include "backends/cuda/runtime.hpp"
#include "moe4/backend.hpp"

namespace moe4::cuda {

/// "dram_read" [GB/s]. The device is current, as for what follows.
std::vector<MachineLimit> measure_memory(int num_sms);
/// "cublas_bf16" (ten products of 8192^3 in a burst) and "cublas_bf16_sustained" (of the hundred that follow)
/// [GOP/s].
std::vector<MachineLimit> measure_arithmetic();

/// Enqueues one pass over the data.
void read_memory(const void* data, std::size_t bytes, std::uint32_t* sink, int num_sms, cudaStream_t);

}  // namespace moe4::cuda
