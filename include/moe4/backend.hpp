#pragma once
// Open a backend, plan a problem, prepare the weights, run.
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "moe4/moe.hpp"

namespace moe4 {

/// How many bits weights and activations have where they enter the two GEMMs.
enum class Precision : std::uint8_t { w4a16, w4a4 };

/// Where the global scale of w4a4's activations comes from.
enum class ActivationScale : std::uint8_t {
    layer_max,   // the largest calibrated scale of all experts of the layer, one for gate+up and one for down
    per_expert,  // the expert's own calibrated scale
    dynamic,     // largest finite magnitude of the batch / 2688: a row then depends on its batch
    dynamic_token,  // largest finite magnitude of the row / 2688
};

/// Which form of the weights the kernels read.
enum class WeightLayout : std::uint8_t {
    automatic,  // packed where a kernel has a layout of its own
    packed,     // rearranged once by prepare(), same size; cuda has no such kernel
    in_place,   // the checkpoint's bytes: on the CPU borrowed, with MoeWeights::owner; on a GPU a copy, its
                // block scales by chunks of 256 k
};

/// The experts this process holds: [first, first + count). Ids outside contribute exactly 0.
struct ExpertRange {
    int first = 0;
    int count = -1;  // -1 = all that follow
};

struct Problem {
    MoeConfig config = {};
    Precision precision = Precision::w4a16;
    ActivationScale activation_scale = ActivationScale::layer_max;  // w4a4 only
    std::int64_t max_tokens = 1;
    int top_k = 0;  // slots per token given to run(); 0 = config.router.top_k
    ExpertRange experts = {};
    WeightLayout layout = WeightLayout::automatic;
    // A token's bits do not depend on the tokens beside it: refused with ActivationScale::dynamic, else
    // always so on the CPU. cuda gives up its kernels for few tokens (docs/measurements/h200.md says what
    // that costs).
    bool batch_invariant = false;
};

/// Yes, or no and why.
struct Support {
    std::string reason;  // empty = supported
    explicit operator bool() const { return reason.empty(); }
};

/// What will run, what it needs, and why the other kernels were passed over.
struct Plan {
    struct Choice {
        std::int64_t up_to_tokens_per_expert = 0;  // this kernel serves experts with that many rows or fewer
        std::string_view kernel;
    };
    struct Rejection {
        std::string_view kernel;
        std::string reason;
    };
    Problem problem;
    std::string_view backend;
    WeightLayout layout = WeightLayout::in_place;  // the one chosen, never automatic
    std::vector<Choice> choices;                   // ascending; the last one serves all larger counts
    std::vector<Rejection> rejections;             // best first
    std::size_t workspace_bytes = 0;
    std::size_t weight_bytes = 0;  // owned by the prepared layer; 0 when it borrows the checkpoint's
    std::string explain() const;   // a few lines for people
};

/// Scratch memory, owned by the caller, aligned to 64 bytes; any layer whose plan needs no more may reuse it.
/// Two runs at the same time need two. On a GPU a layer runs few tokens fastest in the first 16 it is given.
struct Workspace {
    void* data = nullptr;
    std::size_t bytes = 0;
};

struct Routing {
    TensorView top_k_ids;      // [num_tokens, top_k] i32; -1 or an id outside the held range adds exactly 0
    TensorView top_k_weights;  // [num_tokens, top_k] f32
};

/// A cudaStream_t; unused on the CPU.
struct Stream {
    void* handle = nullptr;
};

/// A layer whose weights lie as its kernels read them. Immutable: run() may be called from many threads.
class Layer {
public:
    virtual ~Layer() = default;
    virtual const Plan& plan() const = 0;

    /// hidden [num_tokens, hidden_size] bf16 -> top_k_ids [num_tokens, router.top_k] i32, top_k_weights f32.
    /// Throws invalid_argument for shapes, unsupported when the weights came without a router or it has more
    /// than 1024 experts or 32 slots.
    virtual void route(TensorView hidden, MutableTensorView top_k_ids, MutableTensorView top_k_weights,
                       Stream = {}) const = 0;

    /// hidden [num_tokens, hidden_size] bf16 -> output [num_tokens, hidden_size] bf16 or f32 (the sum before
    /// the last rounding); num_tokens may be 0 to max_tokens. Allocates nothing; throws
    /// invalid_argument, or machine where a device fails. A GPU's layer takes tensors of its GPU; given all
    /// of them in host memory, run() and route() take memory of their own (the workspace too), copy and wait:
    /// for tools, not for serving.
    virtual void run(TensorView hidden, const Routing&, MutableTensorView output, Workspace,
                     Stream = {}) const = 0;
};

/// A rate of this machine with the threads of its backend, measured when asked for.
struct MachineLimit {
    std::string_view name;  // "dram_read", "vpdpbusd", "avx512_fma", "amx_bf16_k32", ...
    double value =
        0.0;  // GB/s (10^9 bytes) of memory, GOP/s (10^9 operations, a multiply-add is two) of others
};

/// How much memory stands behind a backend, bytes.
struct MemorySizes {
    std::uint64_t last_level_cache = 0;
    std::uint64_t free = 0;
};

/// One call of Layer::run to be timed; its tensors lie in host memory.
struct TimedRun {
    const Layer* layer = nullptr;
    TensorView hidden;
    Routing routing;
    MutableTensorView output;
};

/// One kind of device.
class Backend {
public:
    virtual ~Backend() = default;
    virtual std::string_view name() const = 0;     // "cpu", "cuda"
    virtual std::string description() const = 0;   // "AMD EPYC, avx512_vnni, 16 threads"
    virtual int num_threads() const { return 0; }  // cpu: that run a layer
    /// Throws unsupported with every kernel's reason when none can run the problem.
    virtual Plan plan(const Problem&) const = 0;
    /// Throws broken_file naming the tensor for weights that cannot mean anything (a NaN or negative block
    /// scale, a global scale that is not positive and finite), in any expert held; for w4a4 with layer_max
    /// or per_expert, unsupported for a missing input scale and broken_file for an impossible one, in any
    /// expert of the layer.
    virtual std::unique_ptr<Layer> prepare(Plan, const MoeWeights&) const = 0;
    /// "dram_read", GB/s. Takes a second at most and, on the CPU, memory for the time: 1 GB, or eight times
    /// the last cache. Throws machine.
    virtual std::vector<MachineLimit> measure_memory() const { return {}; }
    /// GOP/s. On a GPU it draws the power cap, and what is measured right behind it is slower.
    virtual std::vector<MachineLimit> measure_arithmetic() const { return {}; }
    virtual MemorySizes memory() const = 0;
    /// Seconds a run, several samples, of these runs one after the other. On the CPU a sample is a run; on a
    /// GPU it is a replay of the graph of all of them, their inputs there already, divided by their number.
    /// Throws machine.
    virtual std::vector<double> time_runs(std::span<const TimedRun> runs) const = 0;
};

/// Throws what prepare() of a w4a4 problem throws for input scales: unsupported for a missing one,
/// broken_file for an impossible one. The dynamic scales need none.
void check_input_scales(const MoeWeights&, ActivationScale);

/// Runs body(context, i) for every i in [0, count), in any order, on any threads, and returns when all are
/// done. A body may block until others that have begun go on, never for one that has not begun.
using ParallelFor = std::function<void(int count, void (*body)(void* context, int index), void* context)>;

struct BackendOptions {
    int threads = 0;           // cpu: 0 = as many as this process may use
    ParallelFor parallel_for;  // cpu: run on the caller's threads instead of a pool of our own
    int device = 0;            // cuda: which GPU
    std::string kernel;        // this kernel or an error; empty = the best that supports the problem
};

/// A kernel that exists in this build.
struct KernelInfo {
    std::string_view name;
    Precision precision;
    Support available;            // on this machine
    std::string_view limit = {};  // of its arithmetic: limit_share of this MachineLimit; empty = not stated
    double limit_share = 1.0;
};

struct BackendInfo {
    std::string_view name;
    std::string description;
    Support available;  // here and now, or why not
    std::vector<KernelInfo> kernels;
};

std::vector<BackendInfo> backends();  // all of them, best first, built in or not; cuda's of the first GPU
/// "auto" = the best that is available and has the kernel asked for. Where the options name no kernel the
/// environment's MOE4_KERNEL does. Throws invalid_argument (unknown kernel or ISA), unsupported (not
/// built) or machine (no device).
std::unique_ptr<Backend> open_backend(std::string_view name = "auto", const BackendOptions& = {});

}  // namespace moe4
