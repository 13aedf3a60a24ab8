#pragma once
// Work that is captured in a graph, for tests of what may be captured.
#include <cuda_runtime.h>

#include <memory>
#include <string>
#include <vector>

#include "backends/cuda/runtime.hpp"
#include "cuda/device_tensor.hpp"

namespace moe4::testing {

/// What enqueue(stream) enqueues. A call that is illegal while it is recorded, by any thread's rules, fails:
/// enqueue then throws and says which it was.
class CapturedGraph {
public:
    template <class Enqueue>
    explicit CapturedGraph(const Enqueue& enqueue) : stream_(cuda::make_stream(cudaStreamNonBlocking)) {
        check_cuda(cudaStreamBeginCapture(stream_.get(), cudaStreamCaptureModeGlobal));
        try {
            enqueue(stream_.get());
        } catch (...) {
            end_capture();  // or else nothing may be allocated any more
            cudaGetLastError();
            throw;
        }
        check_cuda(end_capture());
        cudaGraphExec_t executable = nullptr;
        check_cuda(cudaGraphInstantiate(&executable, graph_.get(), 0));
        executable_.reset(executable);
    }

    void launch() const { check_cuda(cudaGraphLaunch(executable_.get(), stream_.get())); }
    void replay() const {
        launch();
        check_cuda(cudaStreamSynchronize(stream_.get()));
    }

    /// The symbol of each kernel, "memset" of a memset; of everything else "type N" (cudaGraphNodeType).
    std::vector<std::string> nodes() const {
        std::size_t count = 0;
        check_cuda(cudaGraphGetNodes(graph_.get(), nullptr, &count));
        std::vector<cudaGraphNode_t> nodes(count);
        check_cuda(cudaGraphGetNodes(graph_.get(), nodes.data(), &count));
        std::vector<std::string> names;
        for (cudaGraphNode_t node : nodes) names.push_back(name_of(node));
        return names;
    }

private:
    struct Destroy {
        void operator()(cudaGraph_t graph) const { cudaGraphDestroy(graph); }
        void operator()(cudaGraphExec_t graph) const { cudaGraphExecDestroy(graph); }
    };

    cudaError_t end_capture() {
        cudaGraph_t graph = nullptr;
        const cudaError_t error = cudaStreamEndCapture(stream_.get(), &graph);
        graph_.reset(graph);
        return error;
    }

    static std::string name_of(cudaGraphNode_t node) {
        cudaGraphNodeType type{};
        check_cuda(cudaGraphNodeGetType(node, &type));
        if (type == cudaGraphNodeTypeMemset) return "memset";
        if (type != cudaGraphNodeTypeKernel) return "type " + std::to_string(type);
        cudaKernelNodeParams parameters{};
        check_cuda(cudaGraphKernelNodeGetParams(node, &parameters));
        const char* name = nullptr;
        check_cuda(cudaFuncGetName(&name, parameters.func));
        return name;
    }

    cuda::StreamHandle stream_;
    std::unique_ptr<CUgraph_st, Destroy> graph_;
    std::unique_ptr<CUgraphExec_st, Destroy> executable_;
};

}  // namespace moe4::testing
