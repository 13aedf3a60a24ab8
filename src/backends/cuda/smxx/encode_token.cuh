#pragma once
// Blocks of the tokens that an EncodeTask names.
#include "backends/cuda/encode.cuh"
#include "backends/cuda/smxx/arrange.hpp"

namespace moe4::cuda {

__device__ inline Bf16Block load_block(const EncodeTask& task, std::int64_t token, const BlockPlace& place) {
    if (place.first_k() >= task.cols) return {};
    const auto* from = reinterpret_cast<const uint4*>(task.hidden + token * task.cols + place.first_k());
    return {__ldcg(from), __ldcg(from + 1)};
}

/// By whole quads.
template <bool kQuantizes>
__device__ PermutedBlock encode(const Bf16Block& block, float scale) {
    BlockPairs encoded[1];
    encode_blocks<kQuantizes>({block}, scale, 1.0F / scale, encoded);
    return permute_block(encoded[0]);
}

}  // namespace moe4::cuda
