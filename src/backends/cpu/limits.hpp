#pragma once
// What the machine can do at most, measured with the threads that run the layers.
#include <vector>

#include "backends/cpu/isa.hpp"
#include "backends/cpu/workers.hpp"
#include "moe4/backend.hpp"

namespace moe4::cpu {

/// "dram_read" in GB/s, then the peak of every instruction in kInstructionPeaks that `isa` has, in GOP/s.
/// Each is the median of several measurements. Throws machine when the memory to read cannot be had.
std::vector<MachineLimit> measure_limits(const Workers&, IsaSet isa);

/// Of this machine, as Linux tells.
MemorySizes memory_sizes();

}  // namespace moe4::cpu
