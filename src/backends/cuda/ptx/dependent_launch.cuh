#pragma once
// Programmatic dependent launch: a kernel may start while the one before it in the stream still runs.
// PTX ISA 9.0, 9.7.13.13 (griddepcontrol).

namespace moe4::cuda::ptx {

/// Returns when the kernel before this one has finished and its writes are visible. Every kernel of this
/// backend calls it before it touches memory that another one writes or reads, so that "finished" reaches
/// back over the whole stream.
__device__ inline void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

/// The next kernel may start. Only after wait_for_previous_kernel: then whatever the next one reads before
/// its own wait was written at least two kernels ago.
__device__ inline void allow_next_kernel() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

}  // namespace moe4::cuda::ptx
