#pragma once
// The specification as code: what a layer computes, in plain loops. Every kernel and backend is judged by it.
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "moe4/backend.hpp"

namespace moe4::moe {

/// The order of one fp32 sum of w4a16. Every kernel states its own, and the reference follows it to the bit.
struct SumOrder {
    enum Kind : std::uint8_t {
        plain,              // k ascending, one multiply-add each
        second_then_first,  // pairs ascending, of each the second product first (vdpbf16ps)
        two_chains,         // per 16 pairs a chain of multiply-adds from zero over the first of each pair and
                            // one over the second; their sum is added (tdpbf16ps)
        scaled_blocks,      // per 16 values a chain from zero as second_then_first, over codes / 128; times
                            // 128 s_w it is added by one multiply-add
        fixed_blocks,  // per 16 values x becomes integers: multiples, to nearest even, of the least power
                       // of two (2^-126 at least) of which the largest is at most 127 * 2^16; NaN where
                       // one is not finite. Their exact sum times codes is rounded once; times the power
                       // of two and s_w it is added by one multiply-add
    };
    Kind kind = plain;
    int pair_distance = 1;  // pairs are (k, k + pair_distance), within every 2 * pair_distance values
    friend bool operator==(const SumOrder&, const SumOrder&) = default;
};

/// What to compute; the layer's shapes and scales come from the weights.
struct ReferenceProblem {
    Precision precision = Precision::w4a16;
    ActivationScale activation_scale = ActivationScale::layer_max;
    ExpertRange experts = {};
    SumOrder order = {};  // of w4a16; w4a4 has one alone
};

/// hidden [num_tokens, hidden_size] bf16 bits; ids and weights [num_tokens, top_k].
struct ReferenceInput {
    std::span<const std::uint16_t> hidden;
    std::span<const std::int32_t> top_k_ids;
    std::span<const float> top_k_weights;
    std::int64_t num_tokens = 0;
    int top_k = 0;
};

/// The fp32 contract, operation by operation: the f32 output, before the last rounding, [num_tokens,
/// hidden_size]. Throws as Backend::prepare does for scales that are missing or impossible.
std::vector<float> reference_layer(const MoeWeights&, const ReferenceProblem&, const ReferenceInput&);

/// The same with sums, activation and combine in double, keeping the contract's rounding points (the
/// quantiser's fp32 arithmetic, h to bf16). Experts in parallel through `parallel_for` when it is given;
/// progress(done, total) counts experts, twice over, and is called from one thread at a time.
std::vector<double> oracle_layer(const MoeWeights&, const ReferenceProblem&, const ReferenceInput&,
                                 const ParallelFor& parallel_for = {},
                                 const std::function<void(int, int)>& progress = {});

}  // namespace moe4::moe
