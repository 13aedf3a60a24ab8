// moe4 info: this build on this machine.
#include <fmt/format.h>

#include "arguments.hpp"
#include "command.hpp"
#include "engine_options.hpp"
#include "moe4/backend.hpp"
#include "moe4/error.hpp"
#include "moe4/version.hpp"
#include "output.hpp"

namespace moe4::cli {

namespace {

/// The kernels that a layer of common shape would get here, or why none.
struct Use {
    Precision precision;
    std::string kernels;
    std::string reason;
};

Use would_use(const BackendInfo& info, Precision precision) {
    constexpr MoeConfig kTypical{.hidden_size = 2048,
                                 .intermediate_size = 768,
                                 .num_experts = 128,
                                 .activation = Activation::silu,
                                 .router = {.top_k = 8}};
    try {
        const auto backend = moe4::open_backend(info.name);
        const Plan plan = backend->plan({.config = kTypical, .precision = precision, .max_tokens = 512});
        return {precision, kernel_names(plan), ""};
    } catch (const Error& error) {
        return {precision, "", error.what()};
    }
}

std::vector<Use> would_use(const BackendInfo& info) {
    if (!info.available) return {};
    return {would_use(info, Precision::w4a16), would_use(info, Precision::w4a4)};
}

std::string text_of(const BackendInfo& info) {
    if (!info.available) return fmt::format("{}: not available: {}\n", info.name, info.available.reason);
    std::string text = fmt::format("{}: {}\n", info.name, info.description);
    Table kernels({"kernel", "mode", "here"});
    for (const KernelInfo& kernel : info.kernels) {
        kernels.add_row({std::string(kernel.name), std::string(name_of(kernel.precision)),
                         kernel.available ? "yes" : "no: " + kernel.available.reason});
    }
    text += kernels.to_string();
    for (const Use& use : would_use(info)) {
        text += fmt::format("  {} would use {}\n", name_of(use.precision),
                            use.kernels.empty() ? "none: " + use.reason : use.kernels);
    }
    return text;
}

Json json_of(const BackendInfo& info) {
    Json kernels = Json::array();
    for (const KernelInfo& kernel : info.kernels) {
        kernels.push_back({{"name", kernel.name},
                           {"mode", name_of(kernel.precision)},
                           {"available", static_cast<bool>(kernel.available)},
                           {"reason", kernel.available.reason}});
    }
    Json uses = Json::object();
    for (const Use& use : would_use(info)) {
        uses[std::string(name_of(use.precision))] = {{"kernels", use.kernels}, {"reason", use.reason}};
    }
    return {{"name", info.name},
            {"description", info.description},
            {"available", static_cast<bool>(info.available)},
            {"reason", info.available.reason},
            {"kernels", kernels},
            {"would_use", uses}};
}

int info(bool is_json) {
    const std::vector<BackendInfo> all = backends();
    if (is_json) {
        Json list = Json::array();
        for (const BackendInfo& backend : all) list.push_back(json_of(backend));
        print_json(Json{{"version", MOE4_VERSION}, {"backends", list}});
        return kOk;
    }
    std::string text = "moe4 " MOE4_VERSION "\n";
    for (const BackendInfo& backend : all) text += "\n" + text_of(backend);
    print(text);
    return kOk;
}

}  // namespace

void add_info(CLI::App& app, Action& action) {
    CLI::App* command =
        app.add_subcommand("info", "this machine: backends, kernels, and which would be used");
    const auto is_json = std::make_shared<bool>(false);
    add_json_option(*command, *is_json);
    command->footer("\nExample: moe4 info");
    command->callback([&action, is_json] { action = [is_json] { return info(*is_json); }; });
}

}  // namespace moe4::cli
