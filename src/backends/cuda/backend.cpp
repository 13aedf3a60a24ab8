// CUDA behind the interface of moe4/backend.hpp: planning, checking arguments, and what is left to forward().
//
// run() and route() take tensors of the backend's device and enqueue. Given tensors in host memory they work
// as well, through memory of their own and waiting for the result: for tools and tests, not for serving.
#include <cstdlib>
#include <memory>
#include <string>

#include "backends/cuda/forward.hpp"
#include "backends/cuda/kernel_list.hpp"
#include "backends/cuda/limits.hpp"
#include "backends/cuda/smxx/route.hpp"
#include "backends/cuda/staged.hpp"
#include "backends/cuda/timing.hpp"
#include "backends/registry.hpp"
#include "moe/arguments.hpp"
#include "moe4/error.hpp"

namespace moe4::cuda {

namespace {

constexpr std::size_t kAlignment = 16;  // kernels load so many bytes at once

[[noreturn]] void refuse(const std::string& sentence) { throw Error(ErrorKind::invalid_argument, sentence); }

class CudaLayer final : public Layer {
public:
    CudaLayer(Plan plan, PreparedLayer layer) : plan_(std::move(plan)), layer_(std::move(layer)) {}
    ~CudaLayer() override {
        try {
            const DeviceScope scope(layer_.device);
            layer_ = {};
        } catch (const Error&) {  // the device failed, or the process ends
        }
    }

    const Plan& plan() const override { return plan_; }

    void route(TensorView hidden, MutableTensorView ids, MutableTensorView weights,
               Stream stream) const override {
        if (layer_.router_refusal) throw Error(*layer_.router_refusal);
        const Device device = device_of(hidden);
        moe::check_route_arguments(layer_.problem.config, hidden, ids, weights, placement(device));
        const std::int64_t num_tokens = moe::num_tokens_of(hidden);
        if (num_tokens == 0) return;
        const DeviceScope scope(layer_.device);
        if (device.type == DeviceType::cuda) {
            enqueue_route(hidden.data, num_tokens, ids.data, weights.data, as_stream(stream));
            return;
        }
        const Staged staged_hidden(hidden);
        const Staged staged_ids(ids);
        const Staged staged_weights(weights);
        enqueue_route(staged_hidden.upload(hidden), num_tokens, staged_ids.data(), staged_weights.data(),
                      nullptr);
        staged_ids.download(ids);
        staged_weights.download(weights);
    }

    void run(TensorView hidden, const Routing& routing, MutableTensorView output, Workspace workspace,
             Stream stream) const override {
        const Device device = device_of(hidden);
        moe::check_run_arguments(plan_.problem, hidden, routing, output, placement(device));
        const std::int64_t num_tokens = moe::num_tokens_of(hidden);
        if (num_tokens == 0) return;
        const bool wants_f32 = output.dtype == DType::f32;
        const DeviceScope scope(layer_.device);
        if (device.type == DeviceType::cuda) {
            moe::check_workspace(plan_, workspace);
            enqueue_run(hidden.data, routing.top_k_ids.data, routing.top_k_weights.data, num_tokens,
                        output.data, wants_f32, workspace.data, as_stream(stream));
            return;
        }
        const Staged staged_hidden(hidden);
        const Staged ids(routing.top_k_ids);
        const Staged weights(routing.top_k_weights);
        const Staged staged_output(output);
        const DeviceBuffer scratch(plan_.workspace_bytes, "a workspace");
        enqueue_run(staged_hidden.upload(hidden), ids.upload(routing.top_k_ids),
                    weights.upload(routing.top_k_weights), num_tokens, staged_output.data(), wants_f32,
                    scratch.data(), nullptr);
        staged_output.download(output);
    }

private:
    static cudaStream_t as_stream(Stream stream) { return static_cast<cudaStream_t>(stream.handle); }

    /// Where all tensors of a call have to lie: where hidden does.
    Device device_of(const TensorView& hidden) const {
        return hidden.device.type == DeviceType::cpu ? Device{} : Device{DeviceType::cuda, layer_.device};
    }
    static moe::Placement placement(Device device) {
        return {device, device.type == DeviceType::cuda ? kAlignment : sizeof(std::uint16_t)};
    }

    void enqueue_run(const void* hidden, const void* ids, const void* weights, std::int64_t num_tokens,
                     void* output, bool wants_f32, void* workspace, cudaStream_t stream) const {
        forward(layer_,
                {.hidden = static_cast<const std::uint16_t*>(hidden),
                 .top_k_ids = static_cast<const std::int32_t*>(ids),
                 .top_k_weights = static_cast<const float*>(weights),
                 .num_tokens = num_tokens,
                 .output_f32 = wants_f32 ? static_cast<float*>(output) : nullptr,
                 .output_bf16 = wants_f32 ? nullptr : static_cast<std::uint16_t*>(output),
                 .workspace = static_cast<std::uint8_t*>(workspace)},
                choose_gemms(layer_, num_tokens), stream);
    }

    void enqueue_route(const void* hidden, std::int64_t num_tokens, void* ids, void* weights,
                       cudaStream_t stream) const {
        const MoeConfig& config = layer_.problem.config;
        cuda::route({.hidden = static_cast<const std::uint16_t*>(hidden),
                     .router = layer_.router.weights.data(),
                     .router_is_f32 = layer_.router.dtype == DType::f32,
                     .bias = reinterpret_cast<const float*>(layer_.router.bias.data()),
                     .num_tokens = num_tokens,
                     .hidden_size = config.hidden_size,
                     .num_experts = config.num_experts,
                     .config = config.router,
                     .top_k_ids = static_cast<std::int32_t*>(ids),
                     .top_k_weights = static_cast<float*>(weights)},
                    stream);
    }

    Plan plan_;
    PreparedLayer layer_;
};

class CudaBackend final : public Backend {
public:
    explicit CudaBackend(const BackendOptions& options)
        : device_(options.device), kernel_(requested_kernel(options).kernel) {
        const DeviceScope scope(device_);
        check(cudaGetDeviceProperties(&properties_, device_), "asking for the properties of the device");
        const Support support = supports_device(properties_);
        if (!support) throw Error(ErrorKind::unsupported, support.reason);
        check_known(requested_kernel(options));
        load_kernels();
        uploads_ = std::make_unique<UploadPool>(device_);
    }

    std::string_view name() const override { return "cuda"; }

    std::string description() const override { return describe_device(properties_); }

    Plan plan(const Problem& problem) const override {
        moe::check_problem(problem);
        Selection selection = select(problem, kernel_);
        Plan plan;
        plan.problem = problem;
        plan.backend = name();
        plan.layout = WeightLayout::in_place;
        plan.choices = std::move(selection.choices);
        plan.rejections = std::move(selection.rejections);
        plan.workspace_bytes = workspace_bytes(problem, selection.wgmma_min_rows);
        plan.weight_bytes = weight_layout(problem.config, moe::held_experts(problem).count()).bytes;
        return plan;
    }

    std::unique_ptr<Layer> prepare(Plan plan, const MoeWeights& weights) const override {
        if (plan.backend != name())
            refuse("the plan is of backend \"" + std::string(plan.backend) + "\", expected cuda");
        const DeviceScope scope(device_);
        plan = this->plan(plan.problem);  // a plan is a value that anyone may have edited
        const std::int64_t min_rows = select(plan.problem, kernel_).wgmma_min_rows;
        PreparedLayer layer = prepare_layer(plan.problem, min_rows, weights, device_, *uploads_);
        return std::make_unique<CudaLayer>(std::move(plan), std::move(layer));
    }

    std::vector<MachineLimit> measure_memory() const override {
        const DeviceScope scope(device_);
        return cuda::measure_memory(properties_.multiProcessorCount);
    }
    std::vector<MachineLimit> measure_arithmetic() const override {
        const DeviceScope scope(device_);
        return cuda::measure_arithmetic();
    }

    MemorySizes memory() const override {
        const DeviceScope scope(device_);
        std::size_t free = 0;
        std::size_t total = 0;
        check(cudaMemGetInfo(&free, &total), "asking for the free memory");
        return {.last_level_cache = static_cast<std::uint64_t>(properties_.l2CacheSize), .free = free};
    }

    std::vector<double> time_runs(std::span<const TimedRun> runs) const override {
        const DeviceScope scope(device_);
        return cuda::time_runs(runs, device_);
    }

private:
    int device_;
    std::string kernel_;
    cudaDeviceProp properties_{};
    std::unique_ptr<UploadPool> uploads_;
};

/// What hides devices, if anything does.
std::string visible_devices() {
    const char* const variable = std::getenv("CUDA_VISIBLE_DEVICES");
    return variable == nullptr ? "" : ", CUDA_VISIBLE_DEVICES is \"" + std::string(variable) + "\"";
}

/// Why no device can be used, or nothing.
Support usable_device(int device) {
    int count = 0;
    const cudaError_t error = cudaGetDeviceCount(&count);
    cudaGetLastError();
    if (error == cudaErrorInsufficientDriver)
        return {"no device: the CUDA driver is missing or older than this program's CUDA"};
    if (error != cudaSuccess || count == 0)
        return {"no device: the CUDA driver shows none" + visible_devices()};
    if (device < 0 || device >= count) {
        return {"no device " + std::to_string(device) + ", expected one of the " + std::to_string(count) +
                " that are visible" + visible_devices()};
    }
    return {};
}

}  // namespace

BackendInfo backend_info(const BackendOptions& options) {
    BackendInfo info{
        .name = "cuda", .description = "", .available = usable_device(options.device), .kernels = {}};
    if (info.available) {
        cudaDeviceProp properties{};
        if (cudaGetDeviceProperties(&properties, options.device) == cudaSuccess) {
            info.description = describe_device(properties);
            info.available = supports_device(properties);
        }
    }
    for (const Kernel& kernel : kernel_list())
        info.kernels.push_back({.name = kernel.name,
                                .precision = kernel.precision,
                                .available = info.available,
                                .limit = "cublas_bf16"});
    return info;
}

std::unique_ptr<Backend> open_backend(const BackendOptions& options) {
    const Support usable = usable_device(options.device);
    if (!usable) throw Error(ErrorKind::machine, usable.reason);
    return std::make_unique<CudaBackend>(options);
}

}  // namespace moe4::cuda
