#pragma once
// The kernels of the CUDA backend as data: what each is for, and which serve a problem.
#include <cuda_runtime.h>

#include <limits>
#include <span>
#include <string>
#include <string_view>

#include "moe4/backend.hpp"

namespace moe4::cuda {

struct Kernel {
    std::string_view name;
    Precision precision;
    std::int64_t min_rows;    // per expert on average; the next kernel of the list is faster below
    bool is_batch_invariant;  // it sums a row in the same order however many rows there are
};

std::span<const Kernel> kernel_list();  // best first for many rows

/// Of what a device is, not of a problem.
Support supports_device(const cudaDeviceProp&);
std::string describe_device(const cudaDeviceProp&);

/// The kernel that the options, or else MOE4_KERNEL, ask for; empty = none. Throws invalid_argument unless it
/// is one of the list's names.
std::string kernel_asked_for(const BackendOptions&);

/// Fills choices and rejections. Throws unsupported with every kernel's reason when none can run the problem.
Plan choose_kernels(const Problem&, int num_held, const std::string& kernel);

}  // namespace moe4::cuda
