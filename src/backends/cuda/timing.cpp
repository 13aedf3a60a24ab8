#include "backends/cuda/timing.hpp"

#include <map>
#include <memory>

#include "backends/cuda/staged.hpp"

namespace moe4::cuda {

namespace {

/// Copies on the device of host tensors, one of each however many runs share it.
class Inputs {
public:
    explicit Inputs(int device) : device_{DeviceType::cuda, device} {}

    TensorView operator()(const TensorView& host) {
        auto& copy = copies_[host.data];
        if (!copy) {
            copy = std::make_unique<Staged>(host);
            copy->upload(host);
        }
        return {copy->data(), host.dtype, host.shape, device_};
    }
    MutableTensorView operator()(const MutableTensorView& host) {
        auto& copy = copies_[host.data];
        if (!copy) copy = std::make_unique<Staged>(host);
        return {copy->data(), host.dtype, host.shape, device_};
    }

private:
    Device device_;
    std::map<const void*, std::unique_ptr<Staged>> copies_;
};

struct DestroyGraph {
    void operator()(cudaGraphExec_t graph) const { cudaGraphExecDestroy(graph); }
};
using ExecutableGraph = std::unique_ptr<CUgraphExec_st, DestroyGraph>;

ExecutableGraph capture(cudaStream_t stream, const std::function<void(cudaStream_t)>& enqueue) {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capturing a graph");
    enqueue(stream);
    check(cudaStreamEndCapture(stream, &graph), "capturing a graph");
    const cudaError_t error = cudaGraphInstantiate(&executable, graph, 0);
    cudaGraphDestroy(graph);
    check(error, "making a graph");
    return ExecutableGraph(executable);
}

}  // namespace

double time(cudaStream_t stream, const std::function<void()>& enqueue) {
    const EventHandle begin = make_event(cudaEventDefault);
    const EventHandle end = make_event(cudaEventDefault);
    check(cudaEventRecord(begin.get(), stream), "recording an event");
    enqueue();
    check(cudaEventRecord(end.get(), stream), "recording an event");
    check(cudaEventSynchronize(end.get()), "waiting for the device");
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, begin.get(), end.get()), "reading an event");
    return static_cast<double>(milliseconds) * 1e-3;
}

std::vector<double> time_replays(const std::function<void(cudaStream_t)>& enqueue, int replays) {
    constexpr int kWarmUps = 2;
    const StreamHandle stream = make_stream(cudaStreamDefault);
    const ExecutableGraph graph = capture(stream.get(), enqueue);
    const auto replay = [&] { check(cudaGraphLaunch(graph.get(), stream.get()), "running a graph"); };
    std::vector<double> seconds;
    for (int i = 0; i < kWarmUps + replays; ++i) {
        const double each = time(stream.get(), replay);
        if (i >= kWarmUps) seconds.push_back(each);
    }
    return seconds;
}

std::vector<double> time_runs(std::span<const TimedRun> runs, int device) {
    Inputs on_device(device);
    std::size_t bytes = 64;
    for (const TimedRun& run : runs) bytes = std::max(bytes, run.layer->plan().workspace_bytes);
    const DeviceBuffer workspace(bytes, "a workspace");
    std::vector<TimedRun> staged(runs.begin(), runs.end());
    for (TimedRun& run : staged) {
        run.hidden = on_device(run.hidden);
        run.routing = {on_device(run.routing.top_k_ids), on_device(run.routing.top_k_weights)};
        run.output = on_device(run.output);
    }

    constexpr int kReplays = 9;
    const auto run_all = [&](cudaStream_t stream) {
        for (const TimedRun& run : staged)
            run.layer->run(run.hidden, run.routing, run.output, {workspace.data(), bytes}, {stream});
    };
    std::vector<double> seconds = time_replays(run_all, kReplays);
    for (double& each : seconds) each /= static_cast<double>(runs.size());
    return seconds;
}

}  // namespace moe4::cuda
