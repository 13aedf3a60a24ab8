#pragma once
// The file given to --input: the tokens of one layer, and their routing where it is brought along.
#include <filesystem>
#include <optional>
#include <vector>

#include "moe4/moe.hpp"
#include "moe4/safetensors.hpp"

namespace moe4::cli {

/// `hidden` [num_tokens, hidden_size] BF16 or F32; `top_k_ids` [num_tokens, k] I32 or I64 and `top_k_weights`
/// [num_tokens, k] F32, both or neither. Reads rows on demand, so that memory holds no second copy.
class LayerInput {
public:
    /// Throws invalid_argument for tensors that do not fit, broken_file for the file.
    LayerInput(const std::filesystem::path& path, const MoeConfig& config);

    std::int64_t num_tokens() const { return hidden_.shape[0]; }
    bool has_routing() const { return ids_.has_value(); }
    int top_k() const { return static_cast<int>(ids_->shape[1]); }

    /// Rows [first, first + count) as BF16: in place where the file allows it, else in `buffer`.
    TensorView hidden(std::int64_t first, std::int64_t count, std::vector<std::uint16_t>& buffer) const;
    /// [count, top_k] each. An id that no i32 holds becomes -1: both add nothing.
    void read_routing(std::int64_t first, std::int64_t count, std::int32_t* ids, float* weights) const;
    /// Ids other than -1 that name none of the layer's experts.
    std::int64_t num_unknown_ids(int num_experts) const;

private:
    std::int64_t id(std::int64_t index) const;

    SafetensorsFile file_;
    TensorView hidden_;
    std::optional<TensorView> ids_, weights_;
};

}  // namespace moe4::cli
