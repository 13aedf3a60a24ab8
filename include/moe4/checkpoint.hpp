#pragma once
// A folder of safetensors shards with its config.json: recognised, checked, mapped and never copied.
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "moe4/backend.hpp"
#include "moe4/moe.hpp"

namespace moe4 {

/// Counts over the block scales of a layer's experts.
struct BlockScaleCounts {
    std::uint64_t total = 0;
    std::uint64_t zero = 0;       // legal: the block is exactly 0
    std::uint64_t subnormal = 0;  // legal: below 2^-6
    std::uint64_t nan = 0;        // refused by prepare
    std::uint64_t negative = 0;   // refused by prepare; -0 counts, NaN does not
};

/// The scalar scales of one projection over all experts, as they multiply.
struct ScaleRange {
    double min = 0.0;  // over the usable ones; min > max when there is none
    double max = 0.0;
    std::vector<std::string>
        faults;  // one sentence a NaN, zero, negative, infinite, subnormal or missing scale
};

/// What `moe4 inspect` says of one MoE layer. Made from headers and scalars; block scales only when scanned.
struct LayerInfo {
    int layer = 0;
    std::string
        format;  // of the routed experts: "nvfp4", "bf16", "f32", "fp8", "mxfp4", "mixed" or "unknown"
    int num_experts = 0;
    std::int64_t hidden_size = 0;
    std::int64_t intermediate_size = 0;
    bool has_shared_expert = false;  // listed here; a layer runs its routed experts alone
    std::vector<Precision> modes;  // that this layer can run; w4a4 only with usable input scales (layer_max)
    std::optional<BlockScaleCounts> block_scales;
    ScaleRange global_scale[3], input_scale[3];  // by Projection
    int gate_up_global_mismatches = 0;           // experts whose gate and up differ; both are used exactly
    std::uint64_t bytes = 0;                     // of the routed experts' tensors
    /// Everything that moe_layer or prepare would refuse: tensor, found, expected. Block scales when scanned.
    /// Input scales, which w4a4's dynamic scales and w4a16 do without, come as one sentence that says so.
    std::vector<std::string> refusals;
};

/// Which precision the checkpoint asks for, and the sentence that says why.
struct PrecisionChoice {
    Precision precision = Precision::w4a16;
    std::string reason;
};

/// Opening reads every header and no tensor. A shard that is absent matters only to a layer that needs it.
class Checkpoint {
public:
    /// Throws broken_file, unsupported or machine.
    static Checkpoint open(const std::filesystem::path& folder);

    std::string_view dialect() const;   // "modelopt", "compressed-tensors", "unquantized" or "unknown"
    std::string_view producer() const;  // "modelopt 0.47.0", or "" when the files do not say
    std::string_view family() const;    // "qwen3_moe", ...
    const std::vector<int>& moe_layers() const;             // ascending
    const std::vector<std::string>& warnings() const;       // index and shards disagree, and the like
    const std::vector<std::string>& disagreements() const;  // between configs and tensors; tensors win
    const std::vector<std::string>& unmatched() const;      // modules that the config names and no tensor has
    const std::vector<std::string>& unused() const;         // tensors of MoE blocks that nothing here knows
    std::uint64_t num_bytes() const;                        // of all tensors of all shards that are there

    enum class Scan { headers_and_scalars, block_scales };
    LayerInfo inspect_layer(int layer, Scan) const;

    /// The layer's configuration from headers alone: no tensor is touched. Throws as moe_layer.
    MoeConfig moe_config(int layer) const;
    /// Throws invalid_argument (no such MoE layer), broken_file (a tensor is missing or has another shape or
    /// dtype), unsupported (experts are not NVFP4; activation, algorithm or a tensor that changes the result
    /// is unknown).
    MoeWeights moe_layer(int layer) const;
    PrecisionChoice preferred_precision(int layer) const;

    /// An expert's unquantised matrix (BF16, F16 or F32), the reference of layertest, named as the file
    /// spells it. Throws as moe_layer.
    NamedTensor unquantized_matrix(int layer, int expert, Projection) const;
    std::optional<TensorView> find(
        std::string_view tensor_name) const;  // empty also when its shard is absent

private:
    struct State;
    std::shared_ptr<const State> state_;
};

}  // namespace moe4
