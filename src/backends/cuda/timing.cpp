#include "backends/cuda/timing.hpp"

#include <map>
#include <memory>

#include "backends/cuda/staged.hpp"

namespace moe4::cuda {

namespace {

constexpr int kWarmUps = 2;
constexpr int kReplays = 9;

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

template <class Enqueue>
ExecutableGraph capture(cudaStream_t stream, const Enqueue& enqueue) {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capturing a graph");
    enqueue();
    check(cudaStreamEndCapture(stream, &graph), "capturing a graph");
    const cudaError_t error = cudaGraphInstantiate(&executable, graph, 0);
    cudaGraphDestroy(graph);
    check(error, "making a graph");
    return ExecutableGraph(executable);
}

/// Seconds of one replay, waited for.
double time_replay(const ExecutableGraph& graph, cudaStream_t stream, const EventHandle& begin,
                   const EventHandle& end) {
    float milliseconds = 0;
    check(cudaEventRecord(begin.get(), stream), "recording an event");
    check(cudaGraphLaunch(graph.get(), stream), "running a graph");
    check(cudaEventRecord(end.get(), stream), "recording an event");
    check(cudaEventSynchronize(end.get()), "waiting for the device");
    check(cudaEventElapsedTime(&milliseconds, begin.get(), end.get()), "reading an event");
    return static_cast<double>(milliseconds) * 1e-3;
}

}  // namespace

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

    const StreamHandle stream = make_stream(cudaStreamDefault);
    const ExecutableGraph graph = capture(stream.get(), [&] {
        for (const TimedRun& run : staged)
            run.layer->run(run.hidden, run.routing, run.output, {workspace.data(), bytes}, {stream.get()});
    });
    const EventHandle begin = make_event(cudaEventDefault);
    const EventHandle end = make_event(cudaEventDefault);
    std::vector<double> seconds;
    for (int i = 0; i < kWarmUps + kReplays; ++i) {
        const double replay = time_replay(graph, stream.get(), begin, end);
        if (i >= kWarmUps) seconds.push_back(replay / static_cast<double>(runs.size()));
    }
    return seconds;
}

}  // namespace moe4::cuda
