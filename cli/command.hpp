#pragma once
// A subcommand as main() sees it, and the exit codes.
#include <functional>

namespace CLI {
class App;
}

namespace moe4::cli {

/// 2 to 5 are the values of ErrorKind.
enum ExitCode : int { kOk = 0, kCheckFailed = 1, kUsage = 2, kMachineFailed = 5 };

/// What the chosen subcommand does once its arguments have been read: prints, returns the exit code or
/// throws.
using Action = std::function<int()>;

/// Each adds one subcommand, which sets `action` when it is chosen.
void add_info(CLI::App& app, Action& action);
void add_inspect(CLI::App& app, Action& action);
void add_plan(CLI::App& app, Action& action);
void add_run(CLI::App& app, Action& action);
void add_dequantize(CLI::App& app, Action& action);
void add_layertest(CLI::App& app, Action& action);
void add_bench(CLI::App& app, Action& action);

}  // namespace moe4::cli
