#include "backends/cuda/sm90/mma_gemm.cuh"

namespace moe4::cuda::sm90 {

MmaKernels mma_bf16_gate_up() { return mma_kernels<Bf16Format, true>(); }

}  // namespace moe4::cuda::sm90
