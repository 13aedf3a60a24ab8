#pragma once
// Registers change hands between the warpgroups of a block: PTX ISA 9.0, 9.7.19.5 (setmaxnreg). All warps of
// a warpgroup call it, in one branch a role.

namespace moe4::cuda::ptx {

template <int kRegisters>
__device__ inline void raise_register_limit() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ inline void lower_register_limit() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace moe4::cuda::ptx
