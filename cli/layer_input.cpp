#include "layer_input.hpp"

#include <fmt/format.h>

#include <cstring>
#include <limits>

#include "moe4/error.hpp"

namespace moe4::cli {

namespace {

[[noreturn]] void refuse(const std::filesystem::path& path, const std::string& sentence) {
    throw Error(ErrorKind::invalid_argument, path.string() + ": " + sentence);
}

std::string describe(const TensorView& tensor) {
    return fmt::format("{} {}", dtype_name(tensor.dtype), tensor.shape.to_string());
}

TensorView checked_hidden(const std::filesystem::path& path, const SafetensorsFile& file,
                          std::int64_t hidden_size) {
    const auto hidden = file.find("hidden");
    if (!hidden)
        refuse(path, fmt::format("has no tensor hidden, expected BF16 or F32 [tokens, {}]", hidden_size));
    const bool is_float = hidden->dtype == DType::bf16 || hidden->dtype == DType::f32;
    if (!is_float || hidden->shape.rank != 2 || hidden->shape[1] != hidden_size) {
        refuse(path, fmt::format("hidden is {}, expected BF16 or F32 [tokens, {}]", describe(*hidden),
                                 hidden_size));
    }
    return *hidden;
}

void check_routing(const std::filesystem::path& path, std::int64_t num_tokens, const TensorView& ids,
                   const TensorView& weights) {
    const bool is_integer = ids.dtype == DType::i32 || ids.dtype == DType::i64;
    const bool has_slots =
        ids.shape.rank == 2 && ids.shape[1] >= 1 && ids.shape[1] <= std::numeric_limits<std::int32_t>::max();
    if (!is_integer || !has_slots || ids.shape[0] != num_tokens) {
        refuse(path, fmt::format("top_k_ids is {}, expected I32 or I64 [{}, k]", describe(ids), num_tokens));
    }
    if (weights.dtype != DType::f32 || weights.shape != ids.shape) {
        refuse(path, fmt::format("top_k_weights is {}, expected F32 {} as top_k_ids", describe(weights),
                                 ids.shape.to_string()));
    }
}

}  // namespace

LayerInput::LayerInput(const std::filesystem::path& path, const MoeConfig& config)
    : file_(SafetensorsFile::open(path)),
      hidden_(checked_hidden(path, file_, config.hidden_size)),
      ids_(file_.find("top_k_ids")),
      weights_(file_.find("top_k_weights")) {
    if (ids_.has_value() != weights_.has_value()) {
        refuse(path, ids_ ? "has top_k_ids without top_k_weights, expected both or neither"
                          : "has top_k_weights without top_k_ids, expected both or neither");
    }
    if (ids_) check_routing(path, num_tokens(), *ids_, *weights_);
}

TensorView LayerInput::hidden(std::int64_t first, std::int64_t count,
                              std::vector<std::uint16_t>& buffer) const {
    const std::int64_t hidden_size = hidden_.shape[1];
    const auto num_values = static_cast<std::size_t>(count * hidden_size);
    const auto offset = static_cast<std::size_t>(first * hidden_size);
    const auto* bytes = static_cast<const std::byte*>(hidden_.data) +
                        offset * static_cast<std::size_t>(dtype_bits(hidden_.dtype)) / 8;
    const Shape shape{count, hidden_size};
    const bool is_aligned = reinterpret_cast<std::uintptr_t>(bytes) % alignof(std::uint16_t) == 0;
    if (hidden_.dtype == DType::bf16 && is_aligned) return {bytes, DType::bf16, shape, {}};

    buffer.resize(num_values);
    if (hidden_.dtype == DType::bf16) {
        if (num_values > 0) std::memcpy(buffer.data(), bytes, 2 * num_values);
    } else {
        for (std::size_t i = 0; i < num_values; ++i) {
            float x = 0.0F;
            std::memcpy(&x, bytes + 4 * i, 4);
            buffer[i] = round_to_bf16(x);
        }
    }
    return {buffer.data(), DType::bf16, shape, {}};
}

std::int64_t LayerInput::id(std::int64_t index) const {
    const auto* bytes = static_cast<const std::byte*>(ids_->data);
    if (ids_->dtype == DType::i64) {
        std::int64_t wide = 0;
        std::memcpy(&wide, bytes + 8 * index, 8);
        return wide;
    }
    std::int32_t narrow = 0;
    std::memcpy(&narrow, bytes + 4 * index, 4);
    return narrow;
}

void LayerInput::read_routing(std::int64_t first, std::int64_t count, std::int32_t* ids,
                              float* weights) const {
    const std::int64_t begin = first * top_k();
    const std::int64_t num_slots = count * top_k();
    for (std::int64_t i = 0; i < num_slots; ++i) {
        const std::int64_t wide = id(begin + i);
        const bool fits = static_cast<std::int32_t>(wide) == wide;
        ids[i] = fits ? static_cast<std::int32_t>(wide) : -1;
    }
    if (num_slots > 0) {
        std::memcpy(weights, static_cast<const std::byte*>(weights_->data) + 4 * begin,
                    4 * static_cast<std::size_t>(num_slots));
    }
}

std::int64_t LayerInput::num_unknown_ids(int num_experts) const {
    std::int64_t count = 0;
    for (std::int64_t i = 0; i < num_tokens() * top_k(); ++i) count += id(i) < -1 || id(i) >= num_experts;
    return count;
}

}  // namespace moe4::cli
