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

class CapturingStream {
public:
    CapturingStream() { check(cudaStreamCreate(&stream_), "creating a stream"); }
    ~CapturingStream() { cudaStreamDestroy(stream_); }
    CapturingStream(const CapturingStream&) = delete;
    CapturingStream& operator=(const CapturingStream&) = delete;

    operator cudaStream_t() const { return stream_; }

    template <class Enqueue>
    cudaGraphExec_t capture(const Enqueue& enqueue) const {
        cudaGraph_t graph = nullptr;
        cudaGraphExec_t executable = nullptr;
        check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "capturing a graph");
        enqueue();
        check(cudaStreamEndCapture(stream_, &graph), "capturing a graph");
        const cudaError_t error = cudaGraphInstantiate(&executable, graph, 0);
        cudaGraphDestroy(graph);
        check(error, "making a graph");
        return executable;
    }

private:
    cudaStream_t stream_ = nullptr;
};

class Event {
public:
    Event() { check(cudaEventCreate(&event_), "creating an event"); }
    ~Event() { cudaEventDestroy(event_); }
    Event(const Event&) = delete;
    Event& operator=(const Event&) = delete;

    void record(cudaStream_t stream) const { check(cudaEventRecord(event_, stream), "recording an event"); }
    /// Waits for this one; seconds.
    double since(const Event& earlier) const {
        float milliseconds = 0;
        check(cudaEventSynchronize(event_), "waiting for the device");
        check(cudaEventElapsedTime(&milliseconds, earlier.event_, event_), "reading an event");
        return static_cast<double>(milliseconds) * 1e-3;
    }

private:
    cudaEvent_t event_ = nullptr;
};

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

    const CapturingStream stream;
    const cudaGraphExec_t graph = stream.capture([&] {
        for (const TimedRun& run : staged)
            run.layer->run(run.hidden, run.routing, run.output, {workspace.data(), bytes}, {stream});
    });
    const Event begin;
    const Event end;
    std::vector<double> seconds;
    for (int i = 0; i < kWarmUps + kReplays; ++i) {
        begin.record(stream);
        check(cudaGraphLaunch(graph, stream), "running a graph");
        end.record(stream);
        const double replay = end.since(begin);
        if (i >= kWarmUps) seconds.push_back(replay / static_cast<double>(runs.size()));
    }
    cudaGraphExecDestroy(graph);
    return seconds;
}

}  // namespace moe4::cuda
