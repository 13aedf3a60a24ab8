#include "checkpoint/dialects/per_expert.hpp"

#include <algorithm>
#include <cstring>
#include <optional>

#include "checkpoint/quantization_claims.hpp"
#include "checkpoint/weight_format.hpp"
#include "moe/routers.hpp"

namespace moe4::checkpoint {

namespace {

/// One linear's size, and what its columns are called in a message.
struct LinearSize {
    std::int64_t rows;
    std::int64_t cols;
    const char* cols_name;
};

LinearSize linear_size(const MoeConfig& moe, Projection projection) {
    if (projection == Projection::down) return {moe.hidden_size, moe.intermediate_size, "intermediate_size"};
    return {moe.intermediate_size, moe.hidden_size, "hidden_size"};
}

/// Whether the weights are there and are no NVFP4.
bool is_other_format(WeightFormat format) {
    return format != WeightFormat::nvfp4 && format != WeightFormat::unknown;
}

/// "labelled NVFP4 (config.json: ...) but ...gate_proj.weight is BF16 [32, 64] (bf16), expected U8 [32, 32]"
std::string other_format(const TensorRange& linear, const LinearSize& size, const ModelConfig& config) {
    const WeightFormat format = weight_format(linear);
    const bool is_mxfp4 = format == WeightFormat::mxfp4;  // its codes look the same, the scales tell
    const ShardEntry& told_by = is_mxfp4 ? *find_block_scale(linear) : *find_weight(linear);
    const std::string found = std::string(told_by.name) + " is " + describe(told_by.tensor) + " (" +
                              std::string(format_name(format)) + ")";
    const std::string expected = is_mxfp4 ? describe(DType::f8_e4m3, {size.rows, size.cols / kNvfp4BlockSize})
                                          : describe(DType::u8, {size.rows, size.cols / 2});
    const std::string label = nvfp4_label(config, linear.module());
    return (label.empty() ? "" : "labelled NVFP4 (" + label + ") but ") + found + ", expected " + expected +
           (label.empty() ? " (NVFP4)" : "");
}

class LinearReader {
public:
    LinearReader(const TensorRange& linear, const LinearSize& size, const TensorLeaves& leaves,
                 const ModelConfig& config, Refusals& refusals)
        : linear_(linear), size_(size), leaves_(leaves), config_(config), refusals_(refusals) {}

    ExpertMatrix read(Read read) {
        ExpertMatrix matrix;
        matrix.name = linear_.module();
        const std::size_t known_refusals = refusals_.size();
        if (is_other_format(weight_format(linear_))) {
            refuse_unsupported(refusals_, other_format(linear_, size_, config_));
            return matrix;
        }
        refuse_unknown_leaves();
        const TensorView* packed = blocks(leaves_.packed, DType::u8, 2);
        const TensorView* block_scale = blocks(leaves_.block_scale, DType::f8_e4m3, kNvfp4BlockSize);
        const TensorView* global_scale = scalar(leaves_.global_scale, refusals_);
        if (refusals_.size() != known_refusals) return matrix;

        matrix.weight = {.packed = static_cast<const std::uint8_t*>(packed->data),
                         .block_scale = static_cast<const std::uint8_t*>(block_scale->data),
                         .global_scale = read == Read::headers ? 1.0 : multiplier(*global_scale),
                         .rows = size_.rows,
                         .cols = size_.cols,
                         .packed_stride = size_.cols / 2,
                         .scale_stride = size_.cols / kNvfp4BlockSize};
        read_input_scale(matrix, read);
        return matrix;
    }

private:
    /// w4a16 and the dynamic scales do without it: what is wrong with it is told to those who need it.
    void read_input_scale(ExpertMatrix& matrix, Read read) {
        if (linear_.find(leaves_.input_scale) == nullptr &&
            linear_.find_absent(leaves_.input_scale) == nullptr)
            return;
        Refusals faults;
        if (const TensorView* input_scale = scalar(leaves_.input_scale, faults)) {
            matrix.input_scale = read == Read::headers ? 1.0 : multiplier(*input_scale);
        } else {
            matrix.input_scale_fault = faults.front().what();
        }
    }

    double multiplier(const TensorView& tensor) const {
        float stored = 0.0F;
        std::memcpy(&stored, tensor.data, sizeof stored);
        const auto value = static_cast<double>(stored);
        return leaves_.scales_divide ? 1.0 / value : value;
    }

    void refuse_unknown_leaves() {
        const auto check = [&](std::string_view name) {
            const std::string_view leaf = name.substr(linear_.prefix.size());
            if (leaf == leaves_.packed || leaf == leaves_.block_scale || leaf == leaves_.global_scale ||
                leaf == leaves_.input_scale)
                return;
            refuse_unsupported(refusals_,
                               std::string(name) +
                                   " is not known and may change the result of its expert, expected " +
                                   leaves_.packed + ", " + leaves_.block_scale + ", " + leaves_.global_scale +
                                   " and " + leaves_.input_scale + " alone");
        };
        for (const ShardEntry& entry : linear_.present) check(entry.name);
        for (const MissingEntry& entry : linear_.absent) check(entry.name);
    }

    /// A tensor of [rows, cols / divisor]; null: refused.
    const TensorView* blocks(const std::string& leaf, DType dtype, int divisor) {
        const Shape expected = {size_.rows, size_.cols / divisor};
        const TensorView* tensor = present(leaf, describe(dtype, expected), refusals_);
        if (tensor == nullptr || (tensor->dtype == dtype && tensor->shape == expected)) return tensor;
        refuse_broken(refusals_, linear_.name(leaf) + " is " + describe(*tensor) + ", expected " +
                                     describe(dtype, expected) + " (" + size_.cols_name + " " +
                                     std::to_string(size_.cols) + " / " + std::to_string(divisor) + ")");
        return nullptr;
    }

    const TensorView* scalar(const std::string& leaf, Refusals& refusals) const {
        const TensorView* tensor = present(leaf, "F32 [] or [1]", refusals);
        if (tensor == nullptr) return nullptr;
        if (tensor->dtype == DType::f32 && (tensor->shape == Shape{} || tensor->shape == Shape{1}))
            return tensor;
        refuse_broken(refusals, linear_.name(leaf) + " is " + describe(*tensor) + ", expected F32 [] or [1]");
        return nullptr;
    }

    const TensorView* present(const std::string& leaf, const std::string& expected,
                              Refusals& refusals) const {
        if (const ShardEntry* entry = linear_.find(leaf)) return &entry->tensor;
        refuse_broken(refusals, missing(linear_, leaf, expected));
        return nullptr;
    }

    const TensorRange& linear_;
    const LinearSize& size_;
    const TensorLeaves& leaves_;
    const ModelConfig& config_;
    Refusals& refusals_;
};

/// Where all experts are of one other format, one sentence says it.
bool refuse_layer_of_other_format(const ExpertSource& source, Refusals& refusals) {
    const std::optional<WeightFormat> format = layer_format(source.tensors, source.moe.num_experts);
    if (!format || !is_other_format(*format)) return false;
    for (const auto& [expert, linears] : source.tensors.experts) {
        for (const Projection projection : kProjections) {
            const TensorRange& linear = linears[static_cast<std::size_t>(projection)];
            if (find_weight(linear) == nullptr) continue;
            refuse_unsupported(refusals,
                               other_format(linear, linear_size(source.moe, projection), source.config) +
                                   ", as in all experts of layer " + std::to_string(source.tensors.layer));
            return true;
        }
    }
    return false;
}

/// The tensors of an expert's linear; null: none is there.
const TensorRange* find_linear(const LayerTensors& tensors, int expert, Projection projection) {
    const auto found = tensors.experts.find(expert);
    if (found == tensors.experts.end()) return nullptr;
    const TensorRange& linear = found->second[static_cast<std::size_t>(projection)];
    return linear.present.empty() ? nullptr : &linear;
}

/// One sentence for all linears of which nothing is there.
void refuse_absent_linears(const ExpertSource& source, const TensorLeaves& leaves, Refusals& refusals) {
    std::optional<std::pair<int, Projection>> first;
    int num_absent = 0;
    for (int expert = 0; expert < source.moe.num_experts; ++expert) {
        for (const Projection projection : kProjections) {
            if (find_linear(source.tensors, expert, projection) != nullptr) continue;
            if (num_absent++ == 0) first = {expert, projection};
        }
    }
    if (!first) return;
    const auto [expert, projection] = *first;
    const LinearSize size = linear_size(source.moe, projection);
    std::string sentence =
        missing(source.tensors.block, expert_leaf(source.family, expert, projection, leaves.packed),
                describe(DType::u8, {size.rows, size.cols / 2}));
    if (num_absent > 1) {
        sentence += "; so are " + std::to_string(num_absent - 1) + " more matrices of layer " +
                    std::to_string(source.tensors.layer);
    }
    refuse_broken(refusals, sentence);
}

}  // namespace

Experts read_per_expert(const ExpertSource& source, const TensorLeaves& leaves, Refusals& refusals) {
    for (const std::string_view stranger : source.tensors.strangers) {
        refuse_unsupported(refusals, std::string(stranger) +
                                         " is not known, expected under experts. the tensors of the linears "
                                         "of experts 0 to " +
                                         std::to_string(moe::kMaxExperts - 1) + " alone");
    }
    const auto count = static_cast<std::size_t>(source.moe.num_experts);
    Experts experts{.weights = std::vector<ExpertWeights>(count), .owner = nullptr};
    const bool is_all_strangers = !source.tensors.strangers.empty() && source.tensors.experts.empty();
    if (is_all_strangers || refuse_layer_of_other_format(source, refusals)) return experts;
    refuse_absent_linears(source, leaves, refusals);
    for (int expert = 0; expert < source.moe.num_experts; ++expert) {
        const auto read = [&](Projection projection) {
            const TensorRange* linear = find_linear(source.tensors, expert, projection);
            if (linear == nullptr) return ExpertMatrix{};
            const LinearSize size = linear_size(source.moe, projection);
            return LinearReader(*linear, size, leaves, source.config, refusals).read(source.read);
        };
        experts.weights[static_cast<std::size_t>(expert)] = {
            .gate = read(Projection::gate), .up = read(Projection::up), .down = read(Projection::down)};
    }
    return experts;
}

bool has_expert_leaf(const TensorRange& block, std::string_view leaf) {
    const std::string experts = block.name("experts.");
    const auto is_called_so = [&](const auto& entry) {
        return entry.name.starts_with(experts) && entry.name.ends_with(leaf) &&
               entry.name[entry.name.size() - leaf.size() - 1] == '.';
    };
    return std::any_of(block.present.begin(), block.present.end(), is_called_so) ||
           std::any_of(block.absent.begin(), block.absent.end(), is_called_so);
}

}  // namespace moe4::checkpoint
