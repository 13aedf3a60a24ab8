#include "backends/cuda/sm90/wgmma_gemm.cuh"

namespace moe4::cuda::sm90 {

WgmmaKernels wgmma_f16() { return wgmma_kernels<F16Format>(); }

}  // namespace moe4::cuda::sm90
