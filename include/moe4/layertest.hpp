#pragma once
// The verdict: are a layer's weights, its activation format, or the engine that runs it at fault?
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "moe4/backend.hpp"

namespace moe4 {

/// How far `found` lies from `expected`, accumulated in double.
struct Distance {
    double cosine = 1.0;   // of the angle between them; 1 when both are zero
    double rel_l2 = 0.0;   // |found - expected| / |expected|; NaN and a zero expectation count as infinite
    double max_abs = 0.0;  // largest |found - expected|
};

enum class Cause { none, weights, activations, engine };

struct MatrixDistance {
    int expert = 0;
    Projection projection = Projection::gate;
    Distance distance;
};

struct LayertestReport {
    Cause cause = Cause::none;
    std::string verdict;  // one sentence

    struct Weights {
        Distance overall;
        Distance by_projection[3];          // by Projection
        std::vector<MatrixDistance> worst;  // largest rel_l2 first, at most 8
        int matrices = 0;
        int matrices_over_limit = 0;
    };
    std::optional<Weights> weights;  // empty without a reference
    std::optional<Distance>
        activations;  // w4a4 oracle against w4a16 oracle; empty: w4a4 cannot run, see note
    std::string activations_note;
    Distance engine;            // the layer's output against the oracle of the same bytes and precision
    double engine_limit = 0.0;  // NUMERICS: rel-L2 1e-3 for w4a16, 3e-3 for w4a4
};

struct LayertestLimits {
    double weight_rel_l2 = 0.16;  // normal is 0.06 to 0.12
    double other_layer_rel_l2 =
        1.2;  // nearly all matrices above it: the reference is of another layer or model
    double activation_rel_l2 = 0.35;
};

/// hidden [num_tokens, hidden_size] bf16 on the host, routing likewise. `layer` was prepared from `weights`.
/// reference(expert, projection) gives the unquantised matrix; an empty function leaves the first distance
/// out. progress(done, total) is called now and then from this thread; may be empty.
LayertestReport layertest(const Layer& layer, const MoeWeights& weights,
                          const std::function<TensorView(int expert, Projection)>& reference,
                          TensorView hidden, const Routing& routing,
                          const std::function<void(int, int)>& progress = {}, LayertestLimits = {});

}  // namespace moe4
