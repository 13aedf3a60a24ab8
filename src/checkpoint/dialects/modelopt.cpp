// NVIDIA ModelOpt's unified export: weight, weight_scale, weight_scale_2 and input_scale, all of which
// multiply.
#include "checkpoint/dialects/per_expert.hpp"

namespace moe4::checkpoint {

namespace {

class Modelopt final : public Dialect {
public:
    std::string_view name() const override { return "modelopt"; }
    const TensorLeaves& leaves() const override { return leaves_; }
    bool recognises(const TensorRange& block) const override {
        return has_expert_leaf(block, leaves_.global_scale);
    }
    bool is_called(std::string_view name) const override {
        return name.starts_with("modelopt");  // also modelopt_fp4, modelopt_mixed
    }
    Experts read_experts(const ExpertSource& source, Refusals& refusals) const override {
        return read_per_expert(source, leaves_, refusals);
    }

private:
    TensorLeaves leaves_ = {.packed = "weight",
                            .block_scale = "weight_scale",
                            .global_scale = "weight_scale_2",
                            .input_scale = "input_scale",
                            .scales_divide = false};
};

}  // namespace

const Dialect& modelopt() {
    static const Modelopt kDialect;
    return kDialect;
}

}  // namespace moe4::checkpoint
