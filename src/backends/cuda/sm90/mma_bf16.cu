#include "backends/cuda/sm90/mma_gemm.cuh"

namespace moe4::cuda::sm90 {

MmaKernels mma_bf16() { return mma_kernels<Bf16Format>(); }

}  // namespace moe4::cuda::sm90
