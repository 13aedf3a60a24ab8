#pragma once
// What the warps of both GEMMs need: rings of stages, finished tiles, shared memory, factors.
#include "backends/cuda/decode.cuh"
#include "backends/cuda/ptx/bulk_copy.cuh"
#include "backends/cuda/ptx/dependent_launch.cuh"
#include "backends/cuda/ptx/mbarrier.cuh"
#include "backends/cuda/sm90/item.hpp"

namespace moe4::cuda::sm90 {

/// Which stage of the ring comes next, and the parity of its barrier's phase.
struct RingPosition {
    int stage = 0;
    std::uint32_t parity = 0;
    __device__ void advance(int num_stages, int by = 1) {
        stage += by;
        if (stage < num_stages) return;
        stage = 0;
        parity ^= 1;
    }
};

__device__ inline Segment load_segment(const Segment* at) {
    const int4 bits = __ldcg(reinterpret_cast<const int4*>(at));  // not L1: an earlier layer's may lie there
    return {bits.x, bits.y, bits.z, bits.w};
}

/// Returns when so many of a segment's tiles are finished.
__device__ inline void await_tiles(const std::int32_t* finished, int num_tiles) {
    int now = 0;
    do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(finished) : "memory");
    while (now < num_tiles);
}

__device__ inline std::uint32_t load_shared_word(std::uint32_t address) {
    std::uint32_t word;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
    return word;
}
__device__ inline void load_shared_vector(std::uint32_t (&out)[4], std::uint32_t address) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(address)
                 : "memory");
}
__device__ inline void load_shared_vector(std::uint32_t (&out)[2], std::uint32_t address) {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(out[0]), "=r"(out[1]) : "r"(address) : "memory");
}

__device__ inline uint4 load_shared_vector(std::uint32_t address) {
    std::uint32_t v[4];
    load_shared_vector(v, address);
    return {v[0], v[1], v[2], v[3]};
}

__device__ inline void store_shared_pair(std::uint32_t address, float x, float y) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}

__device__ inline void store_shared_vector(std::uint32_t address, const uint4& v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z),
                 "r"(v.w)
                 : "memory");
}

/// Where a consumer warp's lane stands: the quad's number and the lane in it.
struct Lane {
    int index, g, t;
    __device__ explicit Lane(int lane) : index(lane), g(lane / 4), t(lane % 4) {}
};

/// What an expert's sums are multiplied by, loaded before the sums are made.
template <bool kGateUp>
struct ExpertFactors {
    float factor[2];
    float out_scale, out_reciprocal;  // A2 and 1 / A2, where h is quantised

    __device__ ExpertFactors(const GroupedGemm& gemm, int expert)
        : factor{gemm.factor[0][expert], kGateUp ? gemm.factor[1][expert] : 0.0F},
          out_scale(kGateUp && gemm.out_scale != nullptr ? gemm.out_scale[expert] : 0.0F),
          out_reciprocal(1.0F / out_scale) {}

    /// A * G, in double where A belongs to the row.
    __device__ float of_row(const GroupedGemm& gemm, int which, int expert, int row) const {
        if (gemm.row_scale == nullptr) return factor[which];
        const int at = gemm.scale_row == nullptr ? row : __ldcg(gemm.scale_row + row);
        const double row_scale = __ldcg(gemm.row_scale + at);
        return static_cast<float>(row_scale * gemm.global_scale[which][expert]);
    }
};

}  // namespace moe4::cuda::sm90
