#include "checkpoint/weight_format.hpp"

#include <algorithm>

namespace moe4::checkpoint {

std::string_view format_name(WeightFormat format) {
    constexpr std::string_view kNames[] = {"unknown", "nvfp4", "mxfp4", "fp8", "bf16", "f16", "f32"};
    return kNames[static_cast<std::size_t>(format)];
}

bool is_unquantized(DType dtype) {
    return dtype == DType::bf16 || dtype == DType::f16 || dtype == DType::f32;
}

const ShardEntry* find_weight(const TensorRange& linear) {
    const ShardEntry* packed = linear.find("weight_packed");
    return packed != nullptr ? packed : linear.find("weight");
}

const ShardEntry* find_block_scale(const TensorRange& linear) {
    for (const char* leaf : {"weight_scale", "scale", "weight_scale_inv"}) {
        if (const ShardEntry* scale = linear.find(leaf)) return scale;
    }
    return nullptr;
}

namespace {

/// MXFP4 has a power of two (E8M0 or its bytes) for 32 values; NVFP4 an E4M3 for 16.
bool is_mxfp4_scale(const TensorView& scale, const TensorView& codes) {
    const bool is_power_of_two = scale.dtype == DType::f8_e8m0 || scale.dtype == DType::u8;
    return is_power_of_two && scale.shape.rank == 2 && codes.shape.rank == 2 &&
           scale.shape[1] == codes.shape[1] / 16;
}

}  // namespace

WeightFormat weight_format(const TensorRange& linear) {
    const ShardEntry* weight = find_weight(linear);
    if (weight == nullptr) {
        const bool has_nvfp4_scales =
            linear.find("weight_scale_2") != nullptr || linear.find("weight_global_scale") != nullptr;
        return has_nvfp4_scales ? WeightFormat::nvfp4 : WeightFormat::unknown;
    }
    switch (weight->tensor.dtype) {
        case DType::u8:
        case DType::i8: {
            const ShardEntry* scale = find_block_scale(linear);
            const bool is_mxfp4 = scale != nullptr && is_mxfp4_scale(scale->tensor, weight->tensor);
            return is_mxfp4 ? WeightFormat::mxfp4 : WeightFormat::nvfp4;
        }
        case DType::f8_e4m3:
        case DType::f8_e5m2:
        case DType::f8_e4m3fnuz:
        case DType::f8_e5m2fnuz:
            return WeightFormat::fp8;
        case DType::bf16:
            return WeightFormat::bf16;
        case DType::f16:
            return WeightFormat::f16;
        case DType::f32:
            return WeightFormat::f32;
        default:
            return WeightFormat::unknown;
    }
}

std::optional<WeightFormat> layer_format(const LayerTensors& tensors, int num_experts) {
    std::optional<WeightFormat> found;
    for (const auto& [expert, linears] : tensors.experts) {
        if (expert >= num_experts) break;
        for (const TensorRange& linear : linears) {
            if (linear.present.empty()) continue;
            const WeightFormat format = weight_format(linear);
            if (found && *found != format) return std::nullopt;
            found = format;
        }
    }
    return found.value_or(WeightFormat::unknown);
}

}  // namespace moe4::checkpoint
