#include "moe4/grouped_tokens.hpp"

#include <algorithm>
#include <vector>

#include "backends/registry.hpp"
#include "format/bf16.hpp"
#include "format/quantize.hpp"
#include "moe/arguments.hpp"
#include "moe4/error.hpp"
#include "moe4/nvfp4.hpp"

namespace moe4 {

namespace {

constexpr std::int64_t kPaddedRows = 128;
constexpr std::int64_t kMostExperts = 1024;

std::int64_t pad(std::int64_t rows) { return (rows + kPaddedRows - 1) / kPaddedRows * kPaddedRows; }

void check_arguments(const GroupedTokens& in, const BlockScaledRows& out) {
    const std::int64_t num_tokens = moe::num_tokens_of(in.hidden);
    const std::int64_t hidden_size = in.hidden.shape[1];
    const std::int64_t max_rows = in.row_token.shape.num_elements();
    const std::int64_t num_experts = in.expert_scale.shape.num_elements();
    if (hidden_size <= 0 || hidden_size % kNvfp4BlockSize != 0) {
        throw Error(ErrorKind::invalid_argument, "hidden is " + in.hidden.shape.to_string() +
                                                     ", expected a hidden_size that is a multiple of 16");
    }
    if (num_experts < 1 || num_experts > kMostExperts) {
        throw Error(ErrorKind::invalid_argument,
                    "expert_scale is " + in.expert_scale.shape.to_string() + ", expected 1 to 1024 experts");
    }
    const Device device = in.hidden.device;
    const auto check = [&](const char* name, const TensorView& tensor, DType dtype, const Shape& shape) {
        moe::check_tensor(name, tensor, dtype, shape, device,
                          static_cast<std::size_t>(dtype_bits(dtype)) / 8);
    };
    const std::size_t scale_bytes =
        swizzled_scale_bytes(max_padded_rows(max_rows, num_experts), hidden_size / kNvfp4BlockSize);
    check("hidden", in.hidden, DType::bf16, {num_tokens, hidden_size});
    check("row_token", in.row_token, DType::i32, {max_rows});
    check("row_expert", in.row_expert, DType::i32, {max_rows});
    check("num_rows", in.num_rows, DType::i32, {1});
    check("expert_scale", in.expert_scale, DType::f32, {num_experts});
    check("codes", out.codes, DType::u8, {max_rows, hidden_size / 2});
    check("scales", out.scales, DType::u8, {static_cast<std::int64_t>(scale_bytes)});
    check("first_padded_row", out.first_padded_row, DType::i32, {num_experts + 1});
}

/// Codes of a row, and its scales in order.
void quantize_row(const std::uint16_t* hidden, std::int64_t num_blocks, float global_scale,
                  std::uint8_t* codes, std::uint8_t* scales) {
    for (std::int64_t block = 0; block < num_blocks; ++block) {
        float x[kNvfp4BlockSize];
        std::uint8_t block_codes[kNvfp4BlockSize];
        std::transform(hidden, hidden + kNvfp4BlockSize, x, format::bf16_to_float);
        scales[block] = format::quantize_activation_block(x, global_scale, block_codes);
        for (std::size_t i = 0; i < kNvfp4BlockSize / 2; ++i)
            *codes++ = static_cast<std::uint8_t>(block_codes[2 * i] | block_codes[2 * i + 1] << 4);
        hidden += kNvfp4BlockSize;
    }
}

void quantize_on_host(const GroupedTokens& in, const BlockScaledRows& out) {
    const std::int64_t hidden_size = in.hidden.shape[1];
    const std::int64_t num_blocks = hidden_size / kNvfp4BlockSize;
    const auto* hidden = static_cast<const std::uint16_t*>(in.hidden.data);
    const auto* row_token = static_cast<const std::int32_t*>(in.row_token.data);
    const auto* row_expert = static_cast<const std::int32_t*>(in.row_expert.data);
    const auto* expert_scale = static_cast<const float*>(in.expert_scale.data);
    const std::int64_t num_rows = *static_cast<const std::int32_t*>(in.num_rows.data);
    auto* codes = static_cast<std::uint8_t*>(out.codes.data);
    auto* scales = static_cast<std::uint8_t*>(out.scales.data);
    auto* first_padded_row = static_cast<std::int32_t*>(out.first_padded_row.data);
    std::vector<std::uint8_t> linear;
    std::int64_t row = 0;
    std::int64_t padded_row = 0;
    for (std::int64_t e = 0; e < in.expert_scale.shape[0]; ++e) {
        first_padded_row[e] = static_cast<std::int32_t>(padded_row);
        const std::int64_t first = row;
        while (row < num_rows && row_expert[row] == e) ++row;
        linear.resize(static_cast<std::size_t>((row - first) * num_blocks));
        for (std::int64_t r = first; r < row; ++r) {
            quantize_row(hidden + row_token[r] * hidden_size, num_blocks, expert_scale[e],
                         codes + r * (hidden_size / 2), linear.data() + (r - first) * num_blocks);
        }
        swizzle_scales(linear.data(), row - first, num_blocks,
                       scales + swizzled_scale_bytes(padded_row, num_blocks));
        padded_row += pad(row - first);
    }
    first_padded_row[in.expert_scale.shape[0]] = static_cast<std::int32_t>(padded_row);
}

}  // namespace

std::int64_t max_padded_rows(std::int64_t max_rows, std::int64_t num_experts) {
    return pad(max_rows) + std::min(max_rows, num_experts) * kPaddedRows;
}

void quantize_grouped_tokens(const GroupedTokens& in, const BlockScaledRows& out, Stream stream) {
    check_arguments(in, out);
    if (in.hidden.device.type == DeviceType::cpu)
        quantize_on_host(in, out);
    else
        cuda::quantize_grouped_tokens(in, out, stream);
}

}  // namespace moe4
