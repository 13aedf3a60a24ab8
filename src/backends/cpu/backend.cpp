// The CPU behind the interface of moe4/backend.hpp: planning, checking arguments, and what is left to
// forward().
#include <chrono>
#include <cstdlib>
#include <limits>
#include <memory>
#include <string>

#include "backends/cpu/forward.hpp"
#include "backends/cpu/kernel_list.hpp"
#include "backends/cpu/limits.hpp"
#include "backends/cpu/prepared_layer.hpp"
#include "backends/registry.hpp"
#include "moe/arguments.hpp"
#include "moe/problem.hpp"
#include "moe/routers.hpp"
#include "moe4/error.hpp"

namespace moe4::cpu {

namespace {

[[noreturn]] void refuse(const std::string& sentence) { throw Error(ErrorKind::invalid_argument, sentence); }

std::string describe(const Allowed& allowed, int threads) {
    return cpu_name() + ", " + isa_names(allowed.machine & allowed.ceiling) + ", " + std::to_string(threads) +
           (threads == 1 ? " thread" : " threads");
}

class CpuLayer final : public Layer {
public:
    CpuLayer(Plan plan, PreparedLayer layer, const MoeWeights& weights)
        : plan_(std::move(plan)),
          layer_(std::move(layer)),
          router_(weights.router),
          router_bias_(weights.router_bias),
          owner_(weights.owner) {}

    const Plan& plan() const override { return plan_; }

    void route(TensorView hidden, MutableTensorView top_k_ids, MutableTensorView top_k_weights,
               Stream) const override {
        const MoeConfig& config = layer_.problem.config;
        moe::check_router(config, router_, router_bias_);
        moe::check_route_arguments(config, hidden, top_k_ids, top_k_weights, {});
        const std::int64_t num_tokens = moe::num_tokens_of(hidden);
        const std::int64_t top_k = config.router.top_k;
        layer_.workers->for_each(num_tokens, [&](int, std::int64_t t) {
            moe::route_token(config, router_, router_bias_,
                             static_cast<const std::uint16_t*>(hidden.data) + t * config.hidden_size,
                             static_cast<std::int32_t*>(top_k_ids.data) + t * top_k,
                             static_cast<float*>(top_k_weights.data) + t * top_k);
        });
    }

    void run(TensorView hidden, const Routing& routing, MutableTensorView output, Workspace workspace,
             Stream) const override {
        moe::check_run_arguments(plan_.problem, hidden, routing, output, {});
        const std::int64_t num_tokens = moe::num_tokens_of(hidden);
        if (num_tokens == 0) return;
        moe::check_workspace(plan_, workspace);
        const bool wants_f32 = output.dtype == DType::f32;
        forward(layer_, {.hidden = static_cast<const std::uint16_t*>(hidden.data),
                         .top_k_ids = static_cast<const std::int32_t*>(routing.top_k_ids.data),
                         .top_k_weights = static_cast<const float*>(routing.top_k_weights.data),
                         .num_tokens = num_tokens,
                         .output_f32 = wants_f32 ? static_cast<float*>(output.data) : nullptr,
                         .output_bf16 = wants_f32 ? nullptr : static_cast<std::uint16_t*>(output.data),
                         .workspace = static_cast<std::uint8_t*>(workspace.data)});
    }

private:
    Plan plan_;
    PreparedLayer layer_;
    TensorView router_;
    std::optional<TensorView> router_bias_;
    std::shared_ptr<const void> owner_;  // of the router, and of the weights where they are read in place
};

class CpuBackend final : public Backend {
public:
    explicit CpuBackend(const BackendOptions& options)
        : allowed_(read_allowed(options)),
          workers_(std::make_shared<Workers>(options.threads > 0 ? options.threads : usable_threads(),
                                             options.parallel_for)) {}

    std::string_view name() const override { return "cpu"; }

    std::string description() const override { return describe(allowed_, workers_->count()); }

    Plan plan(const Problem& problem) const override {
        moe::check_problem(problem);
        const Selection selection = select(kernel_list(), problem, allowed_);
        Plan plan;
        plan.problem = problem;
        plan.backend = name();
        plan.rejections = selection.rejections;
        const PackedLayout* layout = selection.kernels.front()->layout;
        plan.layout = layout == nullptr ? WeightLayout::in_place : WeightLayout::packed;
        std::int64_t up_to = std::numeric_limits<std::int64_t>::max();
        for (const Kernel* kernel : selection.kernels) {
            plan.choices.insert(plan.choices.begin(),
                                {.up_to_tokens_per_expert = up_to, .kernel = kernel->name});
            up_to = kernel->min_rows - 1;
        }
        plan.workspace_bytes =
            workspace_layout(problem, moe::slots_per_token(problem), moe::held_experts(problem).count(),
                             selection.kernels, workers_->count())
                .bytes;
        plan.weight_bytes = packed_bytes(problem, layout);
        return plan;
    }

    std::unique_ptr<Layer> prepare(Plan plan, const MoeWeights& weights) const override {
        if (plan.backend != name())
            refuse("the plan is of backend \"" + std::string(plan.backend) + "\", expected cpu");
        plan = this->plan(plan.problem);  // a plan is a value that anyone may have edited
        std::vector<const Kernel*> kernels = select(kernel_list(), plan.problem, allowed_).kernels;
        PreparedLayer layer = prepare_layer(plan.problem, std::move(kernels), weights, workers_);
        return std::make_unique<CpuLayer>(std::move(plan), std::move(layer), weights);
    }

    int num_threads() const override { return workers_->count(); }

    std::vector<MachineLimit> measure_memory() const override {
        return cpu::measure_memory(*workers_, allowed_.machine);
    }
    std::vector<MachineLimit> measure_arithmetic() const override {
        return cpu::measure_arithmetic(*workers_, allowed_.machine);
    }

    MemorySizes memory() const override { return memory_sizes(); }

    std::vector<double> time_runs(std::span<const TimedRun> runs) const override {
        std::size_t bytes = 64;
        for (const TimedRun& run : runs)
            bytes = std::max(bytes, round_up(run.layer->plan().workspace_bytes, 64));
        const std::unique_ptr<void, void (*)(void*)> workspace(std::aligned_alloc(64, bytes), std::free);
        if (!workspace) {
            throw Error(ErrorKind::machine,
                        "no memory for a workspace of " + std::to_string(bytes) + " bytes");
        }
        std::vector<double> seconds;
        for (const TimedRun& run : runs) {
            const auto start = std::chrono::steady_clock::now();
            run.layer->run(run.hidden, run.routing, run.output, {workspace.get(), bytes});
            seconds.push_back(
                std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
        }
        return seconds;
    }

private:
    Allowed allowed_;
    std::shared_ptr<const Workers> workers_;
};

}  // namespace

BackendInfo backend_info(const BackendOptions& options) {
    BackendInfo info{.name = "cpu", .description = cpu_name(), .available = {}, .kernels = {}};
    Allowed allowed;
    try {
        allowed = read_allowed(options);
        info.description = describe(allowed, usable_threads());
    } catch (const Error& error) {
        info.available.reason = error.what();
    }
    for (const Kernel* kernel : kernel_list()) {
        info.kernels.push_back({.name = kernel->name,
                                .precision = kernel->precision,
                                .available = availability(*kernel, allowed),
                                .limit = kernel->peak == nullptr ? "" : kernel->peak,
                                .limit_share = is_amd() ? kernel->peak_share_amd : kernel->peak_share_intel});
    }
    return info;
}

std::unique_ptr<Backend> open_backend(const BackendOptions& options) {
    return std::make_unique<CpuBackend>(options);
}

}  // namespace moe4::cpu
