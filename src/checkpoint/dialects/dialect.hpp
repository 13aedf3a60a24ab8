#pragma once
// A dialect: one way in which a tool spells NVFP4 experts. A file each in this folder, listed in
// dialects.cpp.
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "checkpoint/layer_tensors.hpp"
#include "checkpoint/model_config.hpp"
#include "checkpoint/refusal.hpp"
#include "moe4/moe.hpp"

namespace moe4::checkpoint {

enum class Read : std::uint8_t {
    headers,  // touches no tensor: global_scale and input_scale of the result mean nothing
    scalars,
    values,  // of the router too, so that it can be refused
};

/// What a layer's experts are read from. Sizes are positive and multiples of 16.
struct ExpertSource {
    const LayerTensors& tensors;
    const MoeConfig& moe;
    const ModelConfig& config;
    const Family& family;
    Read read = Read::scalars;
};

struct Experts {
    std::vector<ExpertWeights> weights;  // [num_experts]; a matrix that was refused has no packed
    std::shared_ptr<const void> owner;  // of what a dialect had to rearrange; null: all views are of the file
};

class Dialect {
public:
    virtual ~Dialect() = default;
    virtual std::string_view name() const = 0;
    virtual const TensorLeaves& leaves() const = 0;
    /// Whether tensors of a MoE block are spelled this way.
    virtual bool recognises(const TensorRange& block) const = 0;
    /// Whether a quant_method, or a producer with its version, means this dialect.
    virtual bool is_called(std::string_view name) const = 0;
    /// All experts; whatever is missing, of another shape, dtype or format, or unknown, is refused.
    virtual Experts read_experts(const ExpertSource&, Refusals&) const = 0;
};

std::span<const Dialect* const> dialects();  // most specific first
const Dialect& compressed_tensors();
const Dialect& modelopt();

}  // namespace moe4::checkpoint
