#include "backends/cuda/sm90/mma_gemm.cuh"

namespace moe4::cuda::sm90 {

MmaKernels mma_bf16_down() { return mma_kernels<Bf16Format, false>(); }

}  // namespace moe4::cuda::sm90
