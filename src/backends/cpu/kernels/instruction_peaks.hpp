#pragma once
// The fastest that this core executes the instructions the kernels are made of: loops of nothing else.
#include <cstdint>

#include "backends/cpu/isa.hpp"

namespace moe4::cpu {

struct InstructionPeak {
    const char* name;  // the limit's name: "vpdpbusd"
    IsaSet needs;
    double operations_per_iteration;  // a multiply and an add are two
    void (*loop)(std::int64_t iterations);
};

extern const InstructionPeak kInstructionPeaks[];
extern const int kNumInstructionPeaks;

/// Reads bytes (a multiple of 1024, aligned to 64) with the widest loads of `isa`; nothing is kept.
void read_memory(const std::uint8_t* data, std::int64_t bytes, IsaSet isa);

}  // namespace moe4::cpu
