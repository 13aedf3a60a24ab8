#include "checkpoint/quantization_claims.hpp"

#include <algorithm>
#include <set>
#include <span>

#include "moe4/nvfp4.hpp"

namespace moe4::checkpoint {

namespace {

constexpr std::string_view kMixed = "MIXED_PRECISION";
constexpr std::string_view kW4A4 = "NVFP4";
constexpr std::string_view kW4A16 = "W4A16_NVFP4";

// Their tensors cannot be taken for NVFP4 with [N, K/16] scales, so that tensors which are say more.
constexpr std::string_view kOtherAlgorithms[] = {"FP8",
                                                 "FP8_PER_CHANNEL_PER_TOKEN",
                                                 "FP8_PB_WO",
                                                 "FP8_PB_REAL",
                                                 "MXFP4",
                                                 "W4A8_MXFP4_FP8",
                                                 "MXFP8",
                                                 "W4A16_AWQ",
                                                 "W4A8_AWQ",
                                                 "W8A16",
                                                 "W8A8_SQ_PER_CHANNEL"};
constexpr std::string_view kNvfp4Formats[] = {"nvfp4-pack-quantized", "mixed-precision"};
constexpr std::string_view kOtherFormats[] = {"dense",           "float-quantized", "int-quantized",
                                              "pack-quantized",  "naive-quantized", "mxfp4-pack-quantized",
                                              "mxfp8-quantized", "marlin-24"};

bool is_one_of(std::string_view name, std::span<const std::string_view> names) {
    return std::find(names.begin(), names.end(), name) != names.end();
}

/// module, then each container of it; visit returns true to stop.
template <class Visit>
bool any_of_containers(std::string_view module, Visit visit) {
    for (;;) {
        if (visit(module)) return true;
        const std::size_t dot = module.rfind('.');
        if (dot == std::string_view::npos) return false;
        module = module.substr(0, dot);
    }
}

bool is_four_bit_float(const QuantizationGroup& group) {
    return group.weights && group.weights->num_bits == 4 &&
           (group.weights->type == "float" || group.weights->type.empty());
}

/// Why a scheme of 4-bit floats is not NVFP4's; empty: it is.
std::string scheme_fault(const NumberScheme& scheme, const std::string& where) {
    if (scheme.num_bits && *scheme.num_bits != 4)
        return where + ".num_bits is " + std::to_string(*scheme.num_bits) + ", expected 4";
    if (!scheme.type.empty() && scheme.type != "float")
        return where + ".type is " + scheme.type + ", expected float";
    if (scheme.group_size && *scheme.group_size != kNvfp4BlockSize)
        return where + ".group_size is " + std::to_string(*scheme.group_size) + ", expected 16";
    if (!scheme.strategy.empty() && scheme.strategy != "tensor_group")
        return where + ".strategy is " + scheme.strategy + ", expected tensor_group";
    if (scheme.symmetric == false) return where + ".symmetric is false, expected true";
    if (!scheme.dynamic.empty() && scheme.dynamic != "true" && scheme.dynamic != "false" &&
        scheme.dynamic != "local")
        return where + ".dynamic is " + scheme.dynamic + ", expected true, false or local";
    return "";
}

std::string group_fault(const QuantizationGroup& group) {
    const std::string where = group.where + ".weights";
    if (const std::string fault = scheme_fault(*group.weights, where); !fault.empty()) return fault;
    if (!group.weights->dynamic.empty() && group.weights->dynamic != "false")
        return where + ".dynamic is " + group.weights->dynamic + ", expected false";
    if (!group.input_activations) return "";
    return scheme_fault(*group.input_activations, group.where + ".input_activations");
}

/// The group of config_groups that describes NVFP4 weights; null: none does.
const QuantizationGroup* nvfp4_group(const Quantization& quantization) {
    for (const QuantizationGroup& group : quantization.groups) {
        if (is_four_bit_float(group) && group_fault(group).empty()) return &group;
    }
    return nullptr;
}

void check_groups(const Quantization& quantization, Refusals& refusals) {
    for (const QuantizationGroup& group : quantization.groups) {
        if (!group.format.empty() && !is_one_of(group.format, kNvfp4Formats) &&
            !is_one_of(group.format, kOtherFormats)) {
            refuse_unsupported(
                refusals, group.where + ".format is " + group.format + ", expected nvfp4-pack-quantized");
        }
    }
    if (nvfp4_group(quantization) != nullptr) return;
    const auto nearly =
        std::find_if(quantization.groups.begin(), quantization.groups.end(), is_four_bit_float);
    if (nearly != quantization.groups.end()) refuse_unsupported(refusals, group_fault(*nearly));
}

void check_format(const Quantization& quantization, Refusals& refusals) {
    const auto& format = quantization.format;
    if (!format || is_one_of(format->value, kNvfp4Formats) || is_one_of(format->value, kOtherFormats)) return;
    refuse_unsupported(refusals, format->where + " is " + format->value + ", expected nvfp4-pack-quantized");
}

bool is_known_algorithm(std::string_view name) {
    return name == kW4A4 || name == kW4A16 || is_one_of(name, kOtherAlgorithms);
}

void check_algorithms(const Quantization& quantization, const std::vector<std::string>& modules,
                      Refusals& refusals) {
    std::set<std::string> reported;
    for (const std::string& module : modules) {
        const auto algorithm = stated_algorithm(quantization, module);
        if (!algorithm || is_known_algorithm(algorithm->value) || is_excluded(quantization, module)) continue;
        if (!reported.insert(algorithm->where + algorithm->value).second) continue;
        refuse_unsupported(refusals,
                           algorithm->where + " is " + algorithm->value + ", expected NVFP4 or W4A16_NVFP4");
    }
}

PrecisionChoice chosen(Precision precision, const std::string& where, const std::string& found) {
    return {precision, where + " " + found};
}

PrecisionChoice requested_by_group(const QuantizationGroup& group) {
    const std::string where = group.where + ".input_activations";
    const auto& scheme = group.input_activations;
    if (!scheme) return chosen(Precision::w4a16, where, "is missing");
    if (!scheme->num_bits) return chosen(Precision::w4a16, where + ".num_bits", "is missing");
    if (scheme->dynamic == "true") return chosen(Precision::w4a16, where + ".dynamic", "is true");
    return chosen(Precision::w4a4, where + ".num_bits", "is 4");
}

/// What one file asks for, in every sentence that it has on the matter.
std::vector<PrecisionChoice> requested_by(const Quantization& quantization,
                                          const std::vector<std::string>& modules) {
    std::vector<PrecisionChoice> requests;
    std::set<std::string> seen;
    for (const std::string& module : modules) {
        const auto algorithm = stated_algorithm(quantization, module);
        if (!algorithm || !seen.insert(algorithm->where).second) continue;
        const auto precision = algorithm->value == kW4A4 ? Precision::w4a4 : Precision::w4a16;
        requests.push_back(chosen(precision, algorithm->where, "is " + algorithm->value));
    }
    const bool groups_may_be_of_others = quantization.algorithm && quantization.algorithm->value == kMixed;
    if (groups_may_be_of_others && !requests.empty()) return requests;
    for (const QuantizationGroup& group : quantization.groups) {
        if (is_four_bit_float(group) && group_fault(group).empty())
            requests.push_back(requested_by_group(group));
    }
    return requests;
}

}  // namespace

std::string other_scheme(const Quantization& quantization) {
    const auto& groups = quantization.groups;
    const bool are_of_others = quantization.algorithm && quantization.algorithm->value == kMixed;
    if (are_of_others || std::any_of(groups.begin(), groups.end(), is_four_bit_float)) return "";
    for (const QuantizationGroup& group : groups) {
        if (!group.weights) continue;
        const std::string where = group.where + ".weights.";
        if (group.weights->num_bits.value_or(4) != 4)
            return where + "num_bits is " + std::to_string(*group.weights->num_bits);
        if (!group.weights->type.empty() && group.weights->type != "float")
            return where + "type is " + group.weights->type;
    }
    return "";
}

bool looks_unlike_nvfp4(std::string_view claim) {
    return is_one_of(claim, kOtherAlgorithms) || is_one_of(claim, kOtherFormats);
}

std::optional<Stated<std::string>> stated_algorithm(const Quantization& quantization,
                                                    std::string_view module) {
    if (!quantization.algorithm || quantization.algorithm->value != kMixed) return quantization.algorithm;
    std::optional<Stated<std::string>> found;
    any_of_containers(module, [&](std::string_view name) {
        const auto layer = quantization.layer_algorithms.find(name);
        if (layer == quantization.layer_algorithms.end()) return false;
        found = {layer->second, quantization.where + ".quantized_layers." + layer->first + ".quant_algo"};
        return true;
    });
    return found;
}

bool matches_glob(std::string_view pattern, std::string_view text) {
    std::size_t p = 0;
    std::size_t t = 0;
    std::size_t star = std::string_view::npos;  // the last one seen, and the text that it has taken so far
    std::size_t taken = 0;
    while (t < text.size()) {
        if (p < pattern.size() && pattern[p] == '*') {
            star = p++;
            taken = t;
        } else if (p < pattern.size() && (pattern[p] == '?' || pattern[p] == text[t])) {
            ++p;
            ++t;
        } else if (star != std::string_view::npos) {
            p = star + 1;
            t = ++taken;
        } else {
            return false;
        }
    }
    return pattern.find_first_not_of('*', p) == std::string_view::npos;
}

bool is_excluded(const Quantization& quantization, std::string_view module) {
    return any_of_containers(module, [&](std::string_view name) {
        return std::any_of(quantization.excluded.begin(), quantization.excluded.end(),
                           [&](const std::string& pattern) { return matches_glob(pattern, name); });
    });
}

std::string nvfp4_label(const ModelConfig& config, std::string_view module) {
    for (const Quantization& quantization : config.quantizations) {
        if (is_excluded(quantization, module)) continue;
        const auto algorithm = stated_algorithm(quantization, module);
        if (algorithm && algorithm->value.find("NVFP4") != std::string::npos) return algorithm->where;
        if (algorithm) continue;
        if (quantization.format && quantization.format->value == kNvfp4Formats[0])
            return quantization.format->where;
        if (const QuantizationGroup* group = nvfp4_group(quantization)) return group->where;
    }
    return "";
}

void check_claims(const ModelConfig& config, const std::vector<std::string>& modules, Refusals& refusals) {
    for (const Quantization& quantization : config.quantizations) {
        check_algorithms(quantization, modules, refusals);
        check_format(quantization, refusals);
        check_groups(quantization, refusals);
        if (!quantization.transform.empty()) {
            refuse_unsupported(refusals, quantization.transform +
                                             " transforms weights and activations, expected none (or {})");
        }
        const auto& size = quantization.group_size;
        const std::string_view module = modules.empty() ? "" : std::string_view(modules.front());
        if (size && size->value != kNvfp4BlockSize && !nvfp4_label(config, module).empty()) {
            refuse_unsupported(refusals,
                               size->where + " is " + std::to_string(size->value) + ", expected 16");
        }
    }
}

PrecisionChoice requested_precision(const ModelConfig& config, const std::vector<std::string>& modules) {
    std::optional<PrecisionChoice> w4a4;
    for (const Quantization& quantization : config.quantizations) {
        for (PrecisionChoice& request : requested_by(quantization, modules)) {
            if (request.precision == Precision::w4a16) return request;
            if (!w4a4) w4a4 = std::move(request);
        }
    }
    return w4a4.value_or(PrecisionChoice{Precision::w4a16, "no file asks for quantised activations"});
}

}  // namespace moe4::checkpoint
