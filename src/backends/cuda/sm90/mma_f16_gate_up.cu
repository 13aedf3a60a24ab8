#include "backends/cuda/sm90/mma_gemm.cuh"

namespace moe4::cuda::sm90 {

MmaKernels mma_f16_gate_up() { return mma_kernels<F16Format, true>(); }

}  // namespace moe4::cuda::sm90
