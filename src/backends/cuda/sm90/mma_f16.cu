#include "backends/cuda/sm90/mma_gemm.cuh"

namespace moe4::cuda::sm90 {

MmaKernels mma_f16() { return mma_kernels<F16Format>(); }

}  // namespace moe4::cuda::sm90
