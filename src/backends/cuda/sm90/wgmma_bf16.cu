#include "backends/cuda/sm90/wgmma_gemm.cuh"

namespace moe4::cuda::sm90 {

WgmmaKernels wgmma_bf16() { return wgmma_kernels<Bf16Format>(); }

}  // namespace moe4::cuda::sm90
