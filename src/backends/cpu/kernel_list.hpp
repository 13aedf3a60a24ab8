#pragma once
// Which kernels exist, and which of them serve a problem on this machine.
#include <span>
#include <string>
#include <vector>

#include "backends/cpu/kernels/kernel.hpp"
#include "moe4/backend.hpp"

namespace moe4::cpu {

/// Every kernel of this build, best first.
std::span<const Kernel* const> kernel_list();

/// What may run: the machine's features under the ceiling of MOE4_ISA, and the kernel that the options or
/// MOE4_KERNEL ask for.
struct Allowed {
    IsaSet machine = 0;
    IsaSet ceiling = ~IsaSet{0};
    std::string ceiling_name;  // "MOE4_ISA=avx2"; empty = none
    std::string kernel;        // empty = the best
};

/// Reads both environment variables; an option goes before its variable. Throws invalid_argument, listing
/// the known ones, for a name that is unknown.
Allowed read_allowed(const BackendOptions&);

/// Whether the kernel can execute here.
Support availability(const Kernel&, const Allowed&);

/// The kernels that serve a problem, each from its min_rows on: the largest first, the last serves all fewer.
struct Selection {
    std::vector<const Kernel*> kernels;
    std::vector<Plan::Rejection> rejections;  // of the problem's precision, best first
};

/// Walks the list best first. Throws unsupported with every kernel's reason when none is left.
Selection select(std::span<const Kernel* const> list, const Problem&, const Allowed&);

}  // namespace moe4::cpu
