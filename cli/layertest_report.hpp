#pragma once
// What `moe4 layertest` found, as text and JSON.
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "engine_options.hpp"
#include "moe4/layertest.hpp"
#include "output.hpp"

namespace moe4::cli {

struct LayertestResult {
    int layer = 0;
    Mode mode;
    std::int64_t num_tokens = 0;
    std::string backend;
    std::string kernels;
    LayertestReport report;
};

/// The first whose report names a cause, else the first; `results` holds one or more.
const LayertestResult& first_at_fault(const std::vector<LayertestResult>& results);

std::string text_of(const LayertestResult&);
/// One layer is the document; of several, `cause` and `verdict` are those of the first at fault. A failure
/// stands beside the results of the layers before it.
Json json_of(const std::vector<LayertestResult>& results, const std::optional<Error>& failure);

}  // namespace moe4::cli
