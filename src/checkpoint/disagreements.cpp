// What the files claim and the tensors deny: tensors win, and this says so.
#include <algorithm>
#include <map>
#include <set>

#include "checkpoint/inspect.hpp"
#include "checkpoint/quantization_claims.hpp"
#include "checkpoint/weight_format.hpp"

namespace moe4::checkpoint {

namespace {

using LayersBySentence = std::map<std::string, std::vector<int>>;

void compare_layer_kinds(const OpenedCheckpoint& checkpoint, std::vector<std::string>& sentences) {
    std::vector<int> without_experts;
    std::vector<int> with_experts;
    for (int layer = 0; layer < checkpoint.config.num_hidden_layers.value_or(0); ++layer) {
        const bool is_moe = checkpoint.blocks.contains(layer);
        if (says_moe(checkpoint.config, layer).value_or(is_moe) == is_moe) continue;
        (is_moe ? with_experts : without_experts).push_back(layer);
    }
    if (!without_experts.empty()) {
        sentences.push_back(checkpoint.config.file + " makes layers " + list_of_layers(without_experts) +
                            " MoE layers, but no tensor of an expert is there");
    }
    if (!with_experts.empty()) {
        sentences.push_back(checkpoint.config.file + " makes layers " + list_of_layers(with_experts) +
                            " dense, but experts are there");
    }
}

void compare_methods(const OpenedCheckpoint& checkpoint, std::vector<std::string>& sentences) {
    if (checkpoint.dialect == nullptr) return;
    for (const Quantization& quantization : checkpoint.config.quantizations) {
        if (quantization.method.empty() || checkpoint.dialect->is_called(quantization.method)) continue;
        sentences.push_back(quantization.where + ".quant_method is " + quantization.method +
                            ", but the tensors are spelled as by " + std::string(checkpoint.dialect->name()));
    }
}

/// config.json and hf_quant_config.json about the same linear.
void compare_files(const ModelConfig& config, const std::string& module, std::set<std::string>& found) {
    if (config.quantizations.size() < 2) return;
    const auto first = stated_algorithm(config.quantizations[0], module);
    const auto second = stated_algorithm(config.quantizations[1], module);
    if (!first || !second || first->value == second->value) return;
    found.insert(first->where + " is " + first->value + ", but " + second->where + " is " + second->value);
}

/// Appends what one file's claim of a linear gets wrong; nothing where it fits the tensors.
void compare_claim(const Quantization& quantization, const TensorRange& linear, int layer,
                   LayersBySentence& found) {
    const WeightFormat format = weight_format(linear);
    if (format == WeightFormat::unknown) return;
    const std::string module = linear.module();
    const bool is_nvfp4 = format == WeightFormat::nvfp4;
    const std::string are = ", but experts are " + std::string(format_name(format));
    if (is_excluded(quantization, module)) {
        if (is_nvfp4) found[quantization.where + " leaves experts unquantised" + are].push_back(layer);
        return;
    }
    if (const std::string scheme = other_scheme(quantization); is_nvfp4 && !scheme.empty())
        found[scheme + are].push_back(layer);
    const auto algorithm = stated_algorithm(quantization, module);
    const auto& claim = algorithm ? algorithm : quantization.format;
    if (!claim) {
        const bool lists_layers = !quantization.layer_algorithms.empty();
        if (is_nvfp4 && lists_layers)
            found[quantization.where + ".quantized_layers leaves experts out" + are].push_back(layer);
        return;
    }
    const bool claims_nvfp4 =
        claim->value.find("NVFP4") != std::string::npos || claim->value == "nvfp4-pack-quantized";
    if (is_nvfp4 ? looks_unlike_nvfp4(claim->value) : claims_nvfp4)
        found[claim->where + " is " + claim->value + are].push_back(layer);
}

void compare_tensors(const OpenedCheckpoint& checkpoint, std::vector<std::string>& sentences) {
    LayersBySentence by_layer;
    std::set<std::string> of_files;
    for (const auto& [layer, block] : checkpoint.blocks) {
        const LayerTensors tensors = group_tensors(layer, block, *checkpoint.family);
        const int last_expert = tensors.experts.empty() ? -1 : tensors.experts.rbegin()->first;
        if (checkpoint.config.num_experts && last_expert >= checkpoint.num_experts()) {
            by_layer[checkpoint.config.num_experts->where + " is " +
                     std::to_string(checkpoint.num_experts()) + ", but expert " +
                     std::to_string(last_expert) + " has tensors"]
                .push_back(layer);
        }
        std::set<WeightFormat> seen;
        for (const auto& [expert, linears] : tensors.experts) {
            for (const TensorRange& linear : linears) {
                // One linear of each format stands for the others.
                if (!seen.insert(weight_format(linear)).second) continue;
                for (const Quantization& quantization : checkpoint.config.quantizations)
                    compare_claim(quantization, linear, layer, by_layer);
                compare_files(checkpoint.config, linear.module(), of_files);
            }
        }
    }
    sentences.insert(sentences.end(), of_files.begin(), of_files.end());
    for (auto& [sentence, layers] : by_layer) {
        layers.erase(std::unique(layers.begin(), layers.end()), layers.end());
        sentences.push_back(sentence + " (layers " + list_of_layers(layers) + ")");
    }
}

template <class Entry>
bool holds_module(std::span<const Entry> entries, std::string_view pattern) {
    const std::string_view literal = pattern.substr(0, pattern.find_first_of("*?"));
    const bool is_literal = literal.size() == pattern.size();
    auto entry = std::lower_bound(entries.begin(), entries.end(), literal,
                                  [](const Entry& e, std::string_view text) { return e.name < text; });
    for (; entry != entries.end() && entry->name.starts_with(literal); ++entry) {
        const std::string_view name = entry->name;
        if (is_literal) {
            if (name.size() == literal.size() || name[literal.size()] == '.') return true;
            continue;
        }
        for (std::size_t end = name.size(); end != std::string_view::npos && end > 0;
             end = name.rfind('.', end - 1)) {
            if (matches_glob(pattern, name.substr(0, end))) return true;
        }
    }
    return false;
}

/// compared-tensors' lists hold classes ("Linear") and regular expressions beside modules.
bool is_module(std::string_view name) {
    const bool is_class = !name.empty() && name.front() >= 'A' && name.front() <= 'Z';
    return !name.empty() && !is_class && !name.starts_with("re:");
}

}  // namespace

std::string list_of_layers(const std::vector<int>& layers) {
    std::string text;
    for (std::size_t first = 0; first < layers.size();) {
        std::size_t last = first;
        while (last + 1 < layers.size() && layers[last + 1] == layers[last] + 1) ++last;
        text += (text.empty() ? "" : ", ") + std::to_string(layers[first]);
        if (last > first) text += (last == first + 1 ? ", " : " to ") + std::to_string(layers[last]);
        first = last + 1;
    }
    return text;
}

std::vector<std::string> find_disagreements(const OpenedCheckpoint& checkpoint) {
    std::vector<std::string> sentences;
    compare_methods(checkpoint, sentences);
    compare_layer_kinds(checkpoint, sentences);
    compare_tensors(checkpoint, sentences);
    return sentences;
}

std::vector<std::string> find_unmatched(const OpenedCheckpoint& checkpoint) {
    std::set<std::string> named;
    for (const Quantization& quantization : checkpoint.config.quantizations) {
        named.insert(quantization.excluded.begin(), quantization.excluded.end());
        for (const auto& [module, algorithm] : quantization.layer_algorithms) named.insert(module);
    }
    std::vector<std::string> unmatched;
    for (const std::string& name : named) {
        if (is_module(name) && !holds_module(checkpoint.tensors->entries(), name) &&
            !holds_module(checkpoint.tensors->missing(), name))
            unmatched.push_back(name);
    }
    return unmatched;
}

std::vector<std::string> find_unused(const OpenedCheckpoint& checkpoint) {
    std::vector<std::string> unused;
    for (const auto& [layer, block] : checkpoint.blocks) {
        const LayerTensors tensors = group_tensors(layer, block, *checkpoint.family);
        for (const ShardEntry& entry : block.present) {
            const std::string_view name = entry.name.substr(block.prefix.size());
            const bool is_known = name.starts_with("experts.") || name.starts_with("gate.") ||
                                  name.starts_with("shared_expert") || name == checkpoint.family->router_bias;
            if (!is_known) unused.emplace_back(entry.name);
        }
        for (const auto& [expert, linears] : tensors.experts) {
            if (expert < checkpoint.num_experts()) continue;
            for (const TensorRange& linear : linears) {
                for (const ShardEntry& entry : linear.present) unused.emplace_back(entry.name);
            }
        }
    }
    return unused;
}

}  // namespace moe4::checkpoint
