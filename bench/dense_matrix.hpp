#pragma once
#include "moe4/nvfp4.hpp"

namespace moe4 {

/// A matrix whose scales follow its codes, rows and all without gaps.
inline Nvfp4View dense_matrix(const std::uint8_t* bytes, std::int64_t rows, std::int64_t cols) {
    return {bytes, bytes + rows * cols / 2, 1.0, rows, cols, cols / 2, cols / 16};
}

}  // namespace moe4
