#pragma once
// The verdict: are a layer's weights, its activation format, or the engine that runs it at fault?
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "moe4/backend.hpp"

namespace moe4 {

/// How far `found` lies from `expected`, accumulated in double. Two zeros are equal: 1, 0, 0.
struct Distance {
    double cosine = 1.0;   // of the angle between them; 0 where there is none (a zero or a NaN)
    double rel_l2 = 0.0;   // |found - expected| / |expected|; infinite for a NaN or a zero expectation
    double max_abs = 0.0;  // largest |found - expected|; infinite for a NaN
};

enum class Cause { none, weights, activations, engine };

struct MatrixDistance {
    int expert = 0;
    Projection projection = Projection::gate;
    Distance distance;
};

struct LayertestReport {
    Cause cause = Cause::none;  // of several the first of engine, weights, activations; the verdict tells all
    std::string verdict;        // one sentence

    struct Weights {
        Distance overall;
        Distance by_projection[3];          // by Projection
        std::vector<MatrixDistance> worst;  // largest rel_l2 first, at most 8
        int matrices = 0;
        int matrices_over_limit = 0;
        int matrices_of_another = 0;  // over other_layer_rel_l2
    };
    std::optional<Weights> weights;       // empty without a reference
    std::optional<Distance> activations;  // w4a4 oracle against w4a16 oracle; empty: see the note
    std::string activations_note;         // why w4a4 cannot run, or as for engine
    std::optional<Distance> engine;       // the layer's output against the oracle of the same bytes and mode;
                                          // empty: no token goes to an expert held, nothing was compared
    double engine_limit = 0.0;            // docs/NUMERICS.md: rel-L2 1e-3 for w4a16, 3e-3 for w4a4
};

struct LayertestLimits {
    double weight_rel_l2 = 0.16;      // normal is 0.06 to 0.12
    double other_layer_rel_l2 = 1.2;  // nearly all above it: the reference may be of another layer or model
    double activation_rel_l2 = 0.35;
};

/// hidden [num_tokens, hidden_size] bf16 and routing in host memory, all finite. `layer` was prepared from
/// `weights`; its expert range is what is tested. reference(expert, projection) gives the unquantised matrix
/// (BF16, F16 or F32) and what messages call it; an empty function leaves the first distance out.
/// progress(done, total) is called from one thread at a time; num_threads run the comparisons (0: as many as
/// the machine has). Throws invalid_argument for inputs or references that do not fit, broken_file for a
/// reference that is not finite, else what `layer` and `reference` throw.
LayertestReport layertest(const Layer& layer, const MoeWeights& weights,
                          const std::function<NamedTensor(int expert, Projection)>& reference,
                          TensorView hidden, const Routing& routing,
                          const std::function<void(int, int)>& progress = {}, LayertestLimits = {},
                          int num_threads = 0);

/// The input when there is none better: [num_tokens, hidden_size] bf16 bits, N(0, 1) of the seed alone, each
/// row scaled down where its largest value would exceed the calibrated one (2688 times the layer's largest
/// gate or up input scale; unscaled where no scale is usable).
std::vector<std::uint16_t> default_hidden(const MoeWeights&, std::int64_t num_tokens, std::uint64_t seed);

}  // namespace moe4
