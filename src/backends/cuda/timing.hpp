#pragma once
// How long work takes on the device.
#include <cuda_runtime.h>

#include <functional>
#include <span>
#include <vector>

#include "moe4/backend.hpp"

namespace moe4::cuda {

/// Seconds of what `enqueue` puts on the stream, waited for.
double time(cudaStream_t stream, const std::function<void()>& enqueue);

/// Seconds of each of so many replays of the graph of what `enqueue` puts on its stream, warmed up.
std::vector<double> time_replays(const std::function<void(cudaStream_t)>& enqueue, int replays);

/// As Backend::time_runs, on the current device.
std::vector<double> time_runs(std::span<const TimedRun> runs, int device);

}  // namespace moe4::cuda
