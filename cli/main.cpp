// moe4, the command line: reads the arguments, runs one subcommand, turns errors into sentences and exit
// codes.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <csignal>
#include <new>
#include <string_view>
#include <system_error>

#include "arguments.hpp"
#include "command.hpp"
#include "moe4/error.hpp"
#include "moe4/version.hpp"
#include "output.hpp"

namespace moe4::cli {

namespace {

constexpr const char* kDescription =
    "moe4 runs NVFP4 Mixture-of-Experts layers natively, straight from checkpoint bytes, and says\n"
    "whether a layer's weights, its activation scales or the engine that runs it are at fault.";

constexpr const char* kFooter = R"(
A checkpoint is a folder of *.safetensors with its config.json, as ModelOpt or llm-compressor wrote it.
Start with:
  moe4 inspect DIR                                         what is in it, and what would be refused
  moe4 layertest DIR --layer 0                             does the engine compute the layer right?
  moe4 layertest DIR --layer 0 --reference BF16_DIR        and are the weights what they should be?
  moe4 run DIR --layer 0 --input x.safetensors --output y.safetensors
`moe4 COMMAND --help` has the options and an example of each.

Results are on stdout, notes, progress and errors on stderr. With --json stdout holds one JSON document, also
for a failure: {"error": {"kind", "message", "exit_code"}}.

Exit codes: 0 ok, 1 the check failed, 2 usage (arguments, or input files that do not fit the layer),
3 unsupported, 4 a broken file, 5 the machine failed (memory, device, output not writable).

Environment: MOE4_ISA=LEVEL lowers which instruction sets are used, MOE4_KERNEL=NAME asks for one kernel;
`moe4 info` lists both.)";

/// The one place where a failure is told. Returns the exit code.
int report(const Error& error, bool is_json) {
    const int exit_code = static_cast<int>(error.kind());
    note(error.what());
    if (!is_json) return exit_code;
    try {
        print_json(error_document(error));
    } catch (const Error& unwritable) {
        note(unwritable.what());
    }
    return exit_code;
}

int run_command_line(int argc, char** argv) {
    if (std::any_of(argv, argv + argc, [](std::string_view arg) { return arg.starts_with("--json="); }))
        throw Error(ErrorKind::invalid_argument, "--json takes no value");
    CLI::App app(kDescription, "moe4");
    app.footer(kFooter);
    app.set_version_flag("--version", "moe4 " MOE4_VERSION);
    app.require_subcommand(0, 1);
    Action action;
    for (const auto add :
         {add_info, add_inspect, add_plan, add_run, add_dequantize, add_layertest, add_bench}) {
        add(app, action);  // add yours above
    }
    for (CLI::App* command : app.get_subcommands({})) refuse_empty_arguments(*command);
    try {
        app.parse(argc, argv);
    } catch (const CLI::CallForHelp&) {
        print(app.help());
        return kOk;
    } catch (const CLI::CallForVersion& version) {
        print(std::string(version.what()) + "\n");
        return kOk;
    } catch (const CLI::ParseError& error) {
        throw usage_error(app, error);
    }
    if (action) return action();
    print(app.help());
    return kUsage;
}

}  // namespace

}  // namespace moe4::cli

int main(int argc, char** argv) {
    using moe4::Error;
    using moe4::ErrorKind;
    std::signal(SIGPIPE, SIG_IGN);  // a closed stdout is an error like another
    const bool is_json =
        std::any_of(argv, argv + argc, [](std::string_view arg) { return arg.starts_with("--json"); });
    try {
        return moe4::cli::run_command_line(argc, argv);
    } catch (const Error& error) {
        return moe4::cli::report(error, is_json);
    } catch (const std::bad_alloc&) {
        return moe4::cli::report({ErrorKind::machine, "there is not enough memory"}, is_json);
    } catch (const std::exception& error) {
        return moe4::cli::report({ErrorKind::machine, error.what()}, is_json);
    }
}
