#pragma once
// Launches a kernel that may overlap with the end of the one before it (ptx/dependent_launch.cuh).
#include <tuple>

#include "backends/cuda/runtime.hpp"

namespace moe4::cuda {

/// Blocks for so many threads' worth of work, at most what fills a large GPU a few times over.
inline unsigned blocks_for(std::int64_t work, int threads) {
    const std::int64_t blocks = (work + threads - 1) / threads;
    return static_cast<unsigned>(blocks < 1 ? 1 : blocks > 2048 ? 2048 : blocks);
}

template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, int threads, std::size_t shared_bytes,
            cudaStream_t stream, const Arguments&... arguments) {
    cudaLaunchAttribute overlap{};
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = &overlap;
    config.numAttrs = 1;
    std::tuple<Parameters...> values(arguments...);
    std::apply(
        [&](Parameters&... each) {
            void* pointers[] = {&each...};
            check(cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), pointers),
                  "launching a kernel");
        },
        values);
}

}  // namespace moe4::cuda
