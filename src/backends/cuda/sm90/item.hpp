#pragma once
// What a block of either GEMM works on.
#include "backends/cuda/grouped_gemm.hpp"

namespace moe4::cuda::sm90 {

enum class Half : std::int32_t { gate_up, down, none };

/// A segment by a tile of weight rows.
struct alignas(16) Item {
    Segment segment;
    std::int32_t segment_index;
    std::int32_t tile;  // of weight rows
    Half half;          // none: there are no more
};

}  // namespace moe4::cuda::sm90
