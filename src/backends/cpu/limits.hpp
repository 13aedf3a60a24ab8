#pragma once
// What the machine can do at most, measured with the threads that run the layers.
#include <vector>

#include "backends/cpu/isa.hpp"
#include "backends/cpu/workers.hpp"
#include "moe4/backend.hpp"

namespace moe4::cpu {

/// Each is the median of several measurements.
/// "dram_read" [GB/s]. Throws machine when the memory to read cannot be had.
std::vector<MachineLimit> measure_memory(const Workers&, IsaSet isa);
/// The peak of every instruction in kInstructionPeaks that `isa` has [GOP/s].
std::vector<MachineLimit> measure_arithmetic(const Workers&, IsaSet isa);

/// Of this machine, as Linux tells.
MemorySizes memory_sizes();

}  // namespace moe4::cpu
