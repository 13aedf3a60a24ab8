#include "moe4/grouped_tokens.hpp"

#include "backends/cuda/runtime.hpp"
#include "backends/cuda/smxx/quantize.hpp"
#include "backends/registry.hpp"

namespace moe4::cuda {

void quantize_grouped_tokens(const GroupedTokens& in, const BlockScaledRows& out, Stream stream) {
    const DeviceScope scope(in.hidden.device.index);
    const std::int64_t max_rows = in.row_token.shape[0];
    const auto num_experts = static_cast<std::int32_t>(in.expert_scale.shape[0]);
    quantize_and_swizzle({.hidden = static_cast<const std::uint16_t*>(in.hidden.data),
                          .cols = in.hidden.shape[1],
                          .row_token = static_cast<const std::int32_t*>(in.row_token.data),
                          .row_expert = static_cast<const std::int32_t*>(in.row_expert.data),
                          .num_rows = static_cast<const std::int32_t*>(in.num_rows.data),
                          .max_padded_rows = max_padded_rows(max_rows, num_experts),
                          .num_experts = num_experts,
                          .expert_scale = static_cast<const float*>(in.expert_scale.data),
                          .codes = static_cast<std::uint8_t*>(out.codes.data),
                          .scales = static_cast<std::uint8_t*>(out.scales.data),
                          .first_padded_row = static_cast<std::int32_t*>(out.first_padded_row.data)},
                         static_cast<cudaStream_t>(stream.handle));
}

}  // namespace moe4::cuda
