#include "layertest_report.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace moe4::cli {

namespace {

std::string_view cause_name(Cause cause) {
    constexpr std::string_view kNames[] = {"none", "weights", "activations", "engine"};
    return kNames[static_cast<int>(cause)];
}

std::vector<std::string> cells(std::string name, const Distance& distance) {
    return {std::move(name), fmt::format("{:.6f}", distance.cosine), fmt::format("{:.3g}", distance.rel_l2),
            fmt::format("{:.3g}", distance.max_abs)};
}

Json json_of(const Distance& distance) {
    return {{"cosine", distance.cosine}, {"rel_l2", distance.rel_l2}, {"max_abs", distance.max_abs}};
}

Json json_of(const LayertestReport::Weights& weights) {
    Json document = json_of(weights.overall);
    for (const Projection p : kProjections) {
        document["projections"][std::string(name_of(p))] =
            json_of(weights.by_projection[static_cast<int>(p)]);
    }
    document["worst"] = Json::array();
    for (const MatrixDistance& matrix : weights.worst) {
        Json entry = {{"expert", matrix.expert}, {"projection", name_of(matrix.projection)}};
        entry.update(json_of(matrix.distance));
        document["worst"].push_back(entry);
    }
    document["matrices"] = weights.matrices;
    document["matrices_over_limit"] = weights.matrices_over_limit;
    return document;
}

Json json_of(const LayertestResult& result) {
    const LayertestReport& report = result.report;
    Json document = {{"layer", result.layer},
                     {"mode", name_of(result.mode.precision)},
                     {"mode_reason", result.mode.reason}};
    if (result.mode.precision == Precision::w4a4) {
        document["activation_scale"] = name_of(result.mode.activation_scale);
    }
    document["backend"] = result.backend;
    document["kernels"] = result.kernels;
    document["tokens"] = result.num_tokens;
    document["cause"] = cause_name(report.cause);
    document["verdict"] = report.verdict;
    document["weights"] = report.weights ? json_of(*report.weights) : Json();
    document["activations"] = report.activations ? json_of(*report.activations) : Json();
    if (!report.activations) document["activations_note"] = report.activations_note;
    document["engine"] = report.engine ? json_of(*report.engine) : Json();
    if (report.engine) document["engine"]["limit"] = report.engine_limit;
    return document;
}

}  // namespace

std::string text_of(const LayertestResult& result) {
    const LayertestReport& report = result.report;
    Table table({"distance", "cosine", "rel-L2", "max error"});
    if (report.weights) {
        table.add_row(cells("weights, dequantised against the reference", report.weights->overall));
        for (const Projection p : kProjections) {
            table.add_row(cells(fmt::format("    {}_proj", name_of(p)),
                                report.weights->by_projection[static_cast<int>(p)]));
        }
        for (const MatrixDistance& worst : report.weights->worst) {
            table.add_row(cells(fmt::format("    expert {} {}_proj", worst.expert, name_of(worst.projection)),
                                worst.distance));
        }
    }
    if (report.activations) table.add_row(cells("activations, w4a4 against w4a16", *report.activations));
    if (report.engine) table.add_row(cells("engine, against the oracle", *report.engine));

    std::string text = fmt::format("layer {}: {} on {} ({}), {} tokens\n", result.layer,
                                   describe(result.mode), result.backend, result.kernels, result.num_tokens);
    text += table.to_string();
    if (!report.weights) text += "  weights: not compared, there is no --reference\n";
    if (!report.activations)
        text += fmt::format("  activations: not compared, {}\n", report.activations_note);
    if (!report.engine) text += "  engine: not compared, nothing was computed\n";
    return text + fmt::format("verdict: {}\n", report.verdict);
}

const LayertestResult& first_at_fault(const std::vector<LayertestResult>& results) {
    const auto found = std::find_if(results.begin(), results.end(), [](const LayertestResult& result) {
        return result.report.cause != Cause::none;
    });
    return found == results.end() ? results.front() : *found;
}

Json json_of(const std::vector<LayertestResult>& results, const std::optional<Error>& failure) {
    if (results.size() == 1 && !failure) return json_of(results.front());
    const LayertestReport& decisive = first_at_fault(results).report;
    Json document = {
        {"cause", cause_name(decisive.cause)}, {"verdict", decisive.verdict}, {"layers", Json::array()}};
    for (const LayertestResult& result : results) document["layers"].push_back(json_of(result));
    if (failure) document.update(error_document(*failure));
    return document;
}

}  // namespace moe4::cli
