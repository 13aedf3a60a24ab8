#pragma once
// What the configuration claims of an expert's linear: whether it can be run, and which precision it asks
// for.
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/model_config.hpp"
#include "checkpoint/refusal.hpp"
#include "moe4/checkpoint.hpp"

namespace moe4::checkpoint {

/// The algorithm that a file states for `module`, also through a container of it in quantized_layers.
std::optional<Stated<std::string>> stated_algorithm(const Quantization&, std::string_view module);

/// Whether a list of exact names and of globs (exclude_modules, ignore) covers `module` or a container of
/// it. Regular expressions ("re:") are not evaluated and cover nothing.
bool is_excluded(const Quantization&, std::string_view module);

/// fnmatch's * and ?; everything else stands for itself.
bool matches_glob(std::string_view pattern, std::string_view text);

/// Who labels `module` NVFP4: "hf_quant_config.json: quantization.quant_algo"; empty: nobody.
std::string nvfp4_label(const ModelConfig&, std::string_view module);

/// Refuses, for a layer's linears: an algorithm or format that is not known or that other tensors than these
/// would change (NVFP4_AWQ), a group size other than 16, a scheme that is no NVFP4. An algorithm whose
/// tensors look different (FP8) is no refusal: there the tensors decide.
void check_claims(const ModelConfig&, const std::vector<std::string>& modules, Refusals&);

/// Whether the tensors of `claim` would look unlike NVFP4's: an algorithm or format such as FP8.
bool looks_unlike_nvfp4(std::string_view claim);

/// What config_groups say of weights where none of them is of 4-bit floats, "...weights.num_bits is 8"; else
/// empty.
std::string other_scheme(const Quantization&);

/// w4a4 where a file asks for quantised activations in all `modules` and no file says otherwise.
PrecisionChoice requested_precision(const ModelConfig&, const std::vector<std::string>& modules);

}  // namespace moe4::checkpoint
