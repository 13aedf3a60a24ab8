// moe4 inspect: what a checkpoint holds, layer by layer, and what run would refuse.
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <future>
#include <optional>
#include <set>
#include <thread>

#include "arguments.hpp"
#include "command.hpp"
#include "engine_options.hpp"
#include "moe4/error.hpp"
#include "output.hpp"
#include "progress.hpp"

namespace moe4::cli {

namespace {

struct Options {
    std::string folder;
    bool skips_scan = false;
    bool is_json = false;
};

std::vector<LayerInfo> inspect_layers(const Checkpoint& checkpoint, Checkpoint::Scan scan,
                                      Progress& progress) {
    const std::vector<int>& numbers = checkpoint.moe_layers();
    std::vector<LayerInfo> layers(numbers.size());
    std::atomic<std::size_t> next = 0;
    std::atomic<std::int64_t> done = 0;
    const auto work = [&] {
        for (std::size_t i = next++; i < numbers.size(); i = next++) {
            layers[i] = checkpoint.inspect_layer(numbers[i], scan);
            progress.update(++done, static_cast<std::int64_t>(numbers.size()));
        }
    };
    std::vector<std::future<void>> workers(std::max(1U, std::thread::hardware_concurrency()));
    for (auto& worker : workers) worker = std::async(std::launch::async, work);
    for (auto& worker : workers) worker.get();
    return layers;
}

std::string mode_names(const LayerInfo& info) {
    std::vector<std::string_view> names;
    for (const Precision mode : info.modes) names.push_back(name_of(mode));
    return names.empty() ? "none" : fmt::format("{}", fmt::join(names, " "));
}

std::string range_text(const ScaleRange& range) {
    if (range.min > range.max) return "-";
    return range.min == range.max ? fmt::format("{:.4g}", range.min)
                                  : fmt::format("{:.4g} .. {:.4g}", range.min, range.max);
}

std::string layer_table(const std::vector<LayerInfo>& layers) {
    Table table({"layer", "format", "experts", "shared", "hidden", "intermediate", "modes", "size"});
    for (const LayerInfo& info : layers) {
        table.add_row({std::to_string(info.layer), info.format, std::to_string(info.num_experts),
                       info.has_shared_expert ? "yes" : "no", std::to_string(info.hidden_size),
                       std::to_string(info.intermediate_size), mode_names(info), format_bytes(info.bytes)});
    }
    return table.to_string();
}

std::string block_scale_table(const std::vector<LayerInfo>& layers) {
    Table table({"layer", "block scales", "zero", "subnormal", "NaN", "negative"});
    bool is_empty = true;
    for (const LayerInfo& info : layers) {
        if (!info.block_scales || info.block_scales->total == 0) continue;
        const BlockScaleCounts& counts = *info.block_scales;
        table.add_row({std::to_string(info.layer), std::to_string(counts.total), std::to_string(counts.zero),
                       std::to_string(counts.subnormal), std::to_string(counts.nan),
                       std::to_string(counts.negative)});
        is_empty = false;
    }
    return is_empty ? "" : "\n" + table.to_string();
}

std::string scalar_table(const std::vector<LayerInfo>& layers) {
    Table table({"layer", "scale", "gate", "up", "down", "experts whose gate and up differ"});
    bool is_empty = true;
    for (const LayerInfo& info : layers) {
        if (info.format != "nvfp4") continue;
        is_empty = false;
        const auto row = [&](const char* name, const ScaleRange(&ranges)[3], const std::string& mismatches) {
            table.add_row({std::to_string(info.layer), name, range_text(ranges[0]), range_text(ranges[1]),
                           range_text(ranges[2]), mismatches});
        };
        row("global", info.global_scale, std::to_string(info.gate_up_global_mismatches));
        row("input", info.input_scale, "");
    }
    return is_empty ? "" : "\n" + table.to_string();
}

/// A heading with its count, then the lines; only so many of them, --json has all.
std::string list_text(const std::string& heading, const std::vector<std::string>& lines) {
    constexpr std::size_t kShown = 20;
    if (lines.empty()) return "";
    std::string text = fmt::format("\n{} ({}):\n", heading, lines.size());
    for (std::size_t i = 0; i < std::min(lines.size(), kShown); ++i) text += fmt::format("  {}\n", lines[i]);
    if (lines.size() > kShown) text += fmt::format("  ... and {} more, see --json\n", lines.size() - kShown);
    return text;
}

/// What the config has wrong is the same sentence in every layer, and said once.
std::vector<std::string> all_refusals(const std::vector<LayerInfo>& layers) {
    std::vector<std::string> all;
    std::set<std::string_view> said;
    for (const LayerInfo& info : layers) {
        for (const std::string& refusal : info.refusals) {
            if (said.insert(refusal).second) all.push_back(refusal);
        }
    }
    return all;
}

std::vector<std::string> all_input_scale_faults(const std::vector<LayerInfo>& layers) {
    std::vector<std::string> all;
    for (const LayerInfo& info : layers) {
        for (const ScaleRange& range : info.input_scale) {
            all.insert(all.end(), range.faults.begin(), range.faults.end());
        }
    }
    return all;
}

std::string text_of(const Options& options, const Checkpoint& checkpoint,
                    const std::vector<LayerInfo>& layers) {
    std::string text = options.folder + "\n";
    text += fmt::format("  dialect  {}\n", checkpoint.dialect());
    text += fmt::format("  made by  {}\n",
                        checkpoint.producer().empty() ? "(the files do not say)" : checkpoint.producer());
    text += fmt::format("  family   {}\n", checkpoint.family());
    text += fmt::format("  size     {} in tensors, {} MoE layers\n\n", format_bytes(checkpoint.num_bytes()),
                        layers.size());
    text += layer_table(layers) + block_scale_table(layers) + scalar_table(layers);
    text += list_text("run would refuse", all_refusals(layers));
    text += list_text("input scales that w4a4 cannot use", all_input_scale_faults(layers));
    text += list_text("config and tensors disagree, the tensors win", checkpoint.disagreements());
    text += list_text("modules of the config without tensors", checkpoint.unmatched());
    text += list_text("tensors of MoE layers that nothing reads", checkpoint.unused());
    text += list_text("warnings", checkpoint.warnings());
    return text;
}

Json json_of(const ScaleRange (&ranges)[3]) {
    Json document;
    for (const Projection p : kProjections) {
        const ScaleRange& range = ranges[static_cast<int>(p)];
        const bool is_empty = range.min > range.max;
        document[std::string(name_of(p))] = {{"min", is_empty ? Json() : Json(range.min)},
                                             {"max", is_empty ? Json() : Json(range.max)},
                                             {"faults", range.faults}};
    }
    return document;
}

Json json_of(const BlockScaleCounts& counts) {
    return {{"total", counts.total},
            {"zero", counts.zero},
            {"subnormal", counts.subnormal},
            {"nan", counts.nan},
            {"negative", counts.negative}};
}

Json json_of(const LayerInfo& info) {
    Json modes = Json::array();
    for (const Precision mode : info.modes) modes.push_back(name_of(mode));
    return {{"layer", info.layer},
            {"format", info.format},
            {"num_experts", info.num_experts},
            {"hidden_size", info.hidden_size},
            {"intermediate_size", info.intermediate_size},
            {"has_shared_expert", info.has_shared_expert},
            {"modes", modes},
            {"block_scales", info.block_scales ? json_of(*info.block_scales) : Json()},
            {"global_scale", json_of(info.global_scale)},
            {"input_scale", json_of(info.input_scale)},
            {"gate_up_global_mismatches", info.gate_up_global_mismatches},
            {"bytes", info.bytes},
            {"refusals", info.refusals}};
}

Json json_of(const Checkpoint& checkpoint, const std::vector<LayerInfo>& layers) {
    Json list = Json::array();
    for (const LayerInfo& info : layers) list.push_back(json_of(info));
    return {{"dialect", checkpoint.dialect()},
            {"producer", checkpoint.producer()},
            {"family", checkpoint.family()},
            {"bytes", checkpoint.num_bytes()},
            {"layers", list},
            {"refusals", all_refusals(layers)},
            {"disagreements", checkpoint.disagreements()},
            {"unmatched", checkpoint.unmatched()},
            {"unused", checkpoint.unused()},
            {"warnings", checkpoint.warnings()}};
}

/// A checkpoint that can be read but is of no kind that is known: what run would say is all there is to list.
int list_refusal(const Options& options, const Error& refusal) {
    if (options.is_json) {
        print_json(Json{{"dialect", nullptr},
                        {"family", nullptr},
                        {"layers", Json::array()},
                        {"refusals", {refusal.what()}},
                        {"disagreements", Json::array()},
                        {"unmatched", Json::array()},
                        {"unused", Json::array()}});
    } else {
        print(options.folder + "\n" + list_text("run would refuse", {refusal.what()}));
    }
    return kOk;
}

int inspect(const Options& options) {
    const auto scan =
        options.skips_scan ? Checkpoint::Scan::headers_and_scalars : Checkpoint::Scan::block_scales;
    Progress progress("opening " + options.folder);
    std::optional<Checkpoint> opened;
    try {
        opened = Checkpoint::open(options.folder);
    } catch (const Error& error) {
        if (error.kind() != ErrorKind::unsupported) throw;
        return list_refusal(options, error);
    }
    const Checkpoint& checkpoint = *opened;
    progress.begin("reading scales, layers");
    const std::vector<LayerInfo> layers = inspect_layers(checkpoint, scan, progress);
    progress.begin("comparing with the config");
    if (options.is_json) {
        const Json document = json_of(checkpoint, layers);
        progress.end();
        print_json(document);
    } else {
        const std::string text = text_of(options, checkpoint, layers);
        progress.end();
        print(text);
    }
    return kOk;
}

}  // namespace

void add_inspect(CLI::App& app, Action& action) {
    CLI::App* command = app.add_subcommand("inspect", "what a checkpoint holds, and what run would refuse");
    const auto options = std::make_shared<Options>();
    command
        ->add_option("DIR", options->folder, "the checkpoint: a folder of safetensors with its config.json")
        ->required();
    command->add_flag("--no-scan", options->skips_scan,
                      "read headers and scalar scales, not the block scales");
    add_json_option(*command, options->is_json);
    command->footer(
        "\nExits 0 whenever every file could be read, whatever it lists.\n\nExample: moe4 inspect DIR "
        "--no-scan");
    command->callback([&action, options] { action = [options] { return inspect(*options); }; });
}

}  // namespace moe4::cli
