#pragma once
// Layers of the CPU backend for tests.
#include <memory>

#include "moe4/backend.hpp"

namespace moe4::testing {

inline BackendOptions threads(int count) {
    BackendOptions options;
    options.threads = count;
    return options;
}

inline Problem problem_of(const MoeWeights& weights, Precision precision, std::int64_t max_tokens,
                          int top_k) {
    Problem problem;
    problem.config = weights.config;
    problem.precision = precision;
    problem.max_tokens = max_tokens;
    problem.top_k = top_k;
    return problem;
}

inline std::unique_ptr<Layer> make_layer(const MoeWeights& weights, const Problem& problem,
                                         const BackendOptions& options = threads(2)) {
    const auto backend = open_backend("cpu", options);
    return backend->prepare(backend->plan(problem), weights);
}

}  // namespace moe4::testing
