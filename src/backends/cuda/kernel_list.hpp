#pragma once
// The kernels of the CUDA backend as data: what each is for, and which serve a problem.
#include <cuda_runtime.h>

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "backends/registry.hpp"
#include "moe4/backend.hpp"

namespace moe4::cuda {

struct Kernel {
    std::string_view name;
    Precision precision;
    std::int64_t min_rows = 0;  // per expert on average; the next kernel of its precision is faster below
    // The same where tiles are too few to keep all multiprocessors busy: WgmmaLoad.
    std::int64_t min_rows_of_few_tiles = 0;
    bool is_wgmma = false;            // else mma
    bool is_batch_invariant = false;  // it sums a row in the same order however many rows there are
};

std::span<const Kernel> kernel_list();  // best first for many rows

/// Of what a device is, not of a problem.
Support supports_device(const cudaDeviceProp&);
std::string describe_device(const cudaDeviceProp&);

/// Throws invalid_argument unless no kernel is asked for or one of the list's names.
void check_known(const KernelRequest&);

/// The kernels that serve a problem, as a Plan has them.
struct Selection {
    std::vector<Plan::Choice> choices;
    std::vector<Plan::Rejection> rejections;  // of the problem's precision
    // From how many rows per expert on, on average, wgmma runs: 0 without mma, the largest without wgmma.
    std::int64_t wgmma_min_rows = 0;
};

/// `kernel`: the one asked for; empty: the best. Throws unsupported with every kernel's reason when none is
/// left.
Selection select(const Problem&, const std::string& kernel);

}  // namespace moe4::cuda
