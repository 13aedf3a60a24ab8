#include "backends/cuda/sm90/wgmma_gemm.cuh"

namespace moe4::cuda::sm90 {

WgmmaKernel wgmma_bf16_gate_up() { return wgmma_gemm<WgmmaTile<Bf16Format, true>>; }

}  // namespace moe4::cuda::sm90
