// compressed-tensors (llm-compressor): the globals are stored as reciprocals of what multiplies.
#include "checkpoint/dialects/per_expert.hpp"

namespace moe4::checkpoint {

namespace {

class CompressedTensors final : public Dialect {
public:
    std::string_view name() const override { return "compressed-tensors"; }
    const TensorLeaves& leaves() const override { return leaves_; }
    bool recognises(const TensorRange& block) const override {
        return has_expert_leaf(block, leaves_.packed) || has_expert_leaf(block, leaves_.global_scale);
    }
    bool is_called(std::string_view name) const override { return name.starts_with("compressed-tensors"); }
    Experts read_experts(const ExpertSource& source, Refusals& refusals) const override {
        return read_per_expert(source, leaves_, refusals);
    }

private:
    TensorLeaves leaves_ = {.packed = "weight_packed",
                            .block_scale = "weight_scale",
                            .global_scale = "weight_global_scale",
                            .input_scale = "input_global_scale",
                            .scales_divide = true};
};

}  // namespace

const Dialect& compressed_tensors() {
    static const CompressedTensors kDialect;
    return kDialect;
}

}  // namespace moe4::checkpoint
