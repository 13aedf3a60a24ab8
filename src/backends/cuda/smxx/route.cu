// The router of moe/routers.cpp, a block a token. Logits are summed in double, as there, and the sums over
// experts go in the order of the experts, so that ids and weights agree with the CPU's but for logits whose
// double sums round to different floats.
#include "backends/cuda/smxx/route.hpp"

#include "backends/cuda/device_lane.cuh"
#include "backends/cuda/launch.hpp"
#include "backends/cuda/ptx/dependent_launch.cuh"
#include "backends/cuda/warp.cuh"
#include "moe/routers.hpp"

namespace moe4::cuda {

namespace {

constexpr int kThreads = 256;

__device__ float bf16_value(std::uint16_t bits) { return __uint_as_float(std::uint32_t{bits} << 16); }
__device__ float router_value(const std::uint16_t* router, std::int64_t i) { return bf16_value(router[i]); }
__device__ float router_value(const float* router, std::int64_t i) { return router[i]; }

/// A warp's dot product; every lane gets it.
template <class Element>
__device__ float logit(const RouteTask& task, const std::uint16_t* hidden, int expert) {
    const auto* router = static_cast<const Element*>(task.router);
    double sum = 0;
    for (std::int64_t k = threadIdx.x % 32; k < task.hidden_size; k += 32) {
        sum += static_cast<double>(bf16_value(hidden[k])) *
               static_cast<double>(router_value(router, expert * task.hidden_size + k));
    }
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
    return static_cast<float>(sum);
}

__device__ float exp_of(float x) { return moe::exp(DeviceLane{x}).value; }

/// By one warp: the index of the largest value not yet taken, ties to the lowest, and marks it. A NaN is
/// largest where it is the first that is left, as a scan that starts there would have it.
__device__ int take_largest(const float* values, bool* taken, int count) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    int first = count;
    int best = count;
    for (int i = lane; i < count; i += 32) {
        if (taken[i]) continue;
        first = min(first, i);
        if (values[i] == values[i] && (best == count || values[i] > values[best])) best = i;
    }
    first = __reduce_min_sync(kAllLanes, first);
    for (int step = 16; step > 0; step /= 2) {
        const int other = __shfl_xor_sync(kAllLanes, best, step);
        if (other == count) continue;
        if (best == count || values[other] > values[best] || (values[other] == values[best] && other < best))
            best = other;
    }
    const int chosen = values[first] != values[first] ? first : best;
    __syncwarp();
    if (lane == 0) taken[chosen] = true;
    __syncwarp();
    return chosen;
}

struct Scratch {
    float scores[moe::kMaxExperts];
    float selection[moe::kMaxExperts];
    float group_scores[moe::kMaxExperts];
    bool taken[moe::kMaxExperts];
    bool kept[moe::kMaxExperts];
    int has_nan;
};

/// The sum of a group's two largest selections; of its only one where it has one.
__device__ float group_score(const float* selection, int size) {
    float first = -INFINITY;
    float second = -INFINITY;
    for (int i = 0; i < size; ++i) {
        if (selection[i] > first) {
            second = first;
            first = selection[i];
        } else {
            second = second < selection[i] ? selection[i] : second;
        }
    }
    return size > 1 ? first + second : first;
}

/// By one warp: takes the experts of all but the best groups.
__device__ void drop_groups(const RouterConfig& config, Scratch& s, int num_experts) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int size = num_experts / config.num_groups;
    for (int g = lane; g < config.num_groups; g += 32) {
        s.group_scores[g] = group_score(s.selection + g * size, size);
        s.kept[g] = false;
    }
    __syncwarp();
    for (int i = 0; i < config.top_k_groups; ++i) take_largest(s.group_scores, s.kept, config.num_groups);
    for (int e = lane; e < num_experts; e += 32) s.taken[e] = !s.kept[e / size];
    __syncwarp();
}

/// By one thread, so that the order is the CPU's.
__device__ void normalize(const RouteTask& task, Scratch& s) {
    if (task.config.score_function == ScoreFunction::sigmoid) return;
    float sum = 0;
    for (int e = 0; e < task.num_experts; ++e) sum += s.scores[e];
    s.group_scores[0] = sum;
}

__device__ void score(const RouteTask& task, Scratch& s) {
    const bool is_softmax = task.config.score_function == ScoreFunction::softmax;
    float largest = s.scores[0];
    if (is_softmax) {
        for (int e = 1; e < task.num_experts; ++e) largest = largest < s.scores[e] ? s.scores[e] : largest;
    }
    __syncthreads();
    for (int e = static_cast<int>(threadIdx.x); e < task.num_experts; e += kThreads) {
        s.scores[e] = is_softmax ? exp_of(s.scores[e] - largest) : 1.0F / (1.0F + exp_of(-s.scores[e]));
        s.taken[e] = false;
    }
    __syncthreads();
    if (threadIdx.x == 0) normalize(task, s);
    __syncthreads();
    const float sum = s.group_scores[0];
    for (int e = static_cast<int>(threadIdx.x); e < task.num_experts; e += kThreads) {
        if (is_softmax) s.scores[e] /= sum;
        s.selection[e] = task.bias == nullptr ? s.scores[e] : s.scores[e] + task.bias[e];
    }
    __syncthreads();
}

/// By one warp.
__device__ void choose(const RouteTask& task, Scratch& s, std::int64_t token) {
    const RouterConfig& config = task.config;
    std::int32_t* ids = task.top_k_ids + token * config.top_k;
    float* weights = task.top_k_weights + token * config.top_k;
    if (config.top_k_groups < config.num_groups) drop_groups(config, s, task.num_experts);
    float sum = 0;
    for (int j = 0; j < config.top_k; ++j) {
        const int chosen = take_largest(s.selection, s.taken, task.num_experts);
        sum += s.scores[chosen];
        if (threadIdx.x == 0) ids[j] = chosen;
    }
    __syncwarp();
    const float divisor = config.renormalize ? sum + 1e-20F : 1.0F;
    for (int j = static_cast<int>(threadIdx.x); j < config.top_k; j += 32)
        weights[j] = s.scores[ids[j]] / divisor * static_cast<float>(config.scaling_factor);
}

template <class Element>
__global__ void __launch_bounds__(kThreads) route_kernel(const RouteTask task) {
    ptx::wait_for_previous_kernel();
    ptx::allow_next_kernel();
    __shared__ Scratch s;
    const std::int64_t token = blockIdx.x;
    if (threadIdx.x == 0) s.has_nan = 0;
    __syncthreads();
    for (int e = static_cast<int>(threadIdx.x) / 32; e < task.num_experts; e += kThreads / 32) {
        const float value = logit<Element>(task, task.hidden + token * task.hidden_size, e);
        if (threadIdx.x % 32 != 0) continue;
        s.scores[e] = value;
        if (value != value) s.has_nan = 1;
    }
    __syncthreads();
    if (s.has_nan != 0) {
        for (int j = static_cast<int>(threadIdx.x); j < task.config.top_k; j += kThreads) {
            task.top_k_ids[token * task.config.top_k + j] = j;
            task.top_k_weights[token * task.config.top_k + j] = __int_as_float(0x7FC00000);
        }
        return;
    }
    score(task, s);
    if (threadIdx.x < 32) choose(task, s, token);
}

}  // namespace

void route(const RouteTask& task, cudaStream_t stream) {
    launch(task.router_is_f32 ? route_kernel<float> : route_kernel<std::uint16_t>,
           dim3(static_cast<unsigned>(task.num_tokens)), kThreads, 0, stream, task);
}

}  // namespace moe4::cuda
