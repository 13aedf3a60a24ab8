#include "backends/cuda/sm90/wgmma_gemm.cuh"

namespace moe4::cuda::sm90 {

WgmmaKernel wgmma_f16_gate_up() { return wgmma_gemm<WgmmaTile<F16Format, true>>; }

}  // namespace moe4::cuda::sm90
