#pragma once
// What the tensors of a linear say of its number format, whatever any configuration says.
#include <cstdint>
#include <optional>
#include <string_view>

#include "checkpoint/layer_tensors.hpp"

namespace moe4::checkpoint {

enum class WeightFormat : std::uint8_t { unknown, nvfp4, mxfp4, fp8, bf16, f16, f32 };

std::string_view format_name(WeightFormat);  // "nvfp4", ...
bool is_unquantized(DType);                  // bf16, f16 or f32

/// By dtypes, so that a tensor of the wrong shape is still a tensor of its format. A linear of 4-bit codes
/// whose scales are missing counts as nvfp4.
WeightFormat weight_format(const TensorRange& linear);

/// The matrix or its codes: "weight" or "weight_packed"; null when neither is there.
const ShardEntry* find_weight(const TensorRange& linear);

/// The scales of blocks under any of their names; null when there are none.
const ShardEntry* find_block_scale(const TensorRange& linear);

/// The one format of the layer's first `num_experts` experts, linears without any tensor left out; empty
/// when there are two.
std::optional<WeightFormat> layer_format(const LayerTensors&, int num_experts);

}  // namespace moe4::checkpoint
