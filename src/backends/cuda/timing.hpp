#pragma once
// How long runs take on the device, for `moe4 bench`.
#include <span>
#include <vector>

#include "moe4/backend.hpp"

namespace moe4::cuda {

/// As Backend::time_runs, on the current device.
std::vector<double> time_runs(std::span<const TimedRun> runs, int device);

}  // namespace moe4::cuda
