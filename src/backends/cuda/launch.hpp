#pragma once
// Launches a kernel that may overlap with the end of the one before it (ptx/dependent_launch.cuh).
#include <tuple>

#include "backends/cuda/runtime.hpp"

namespace moe4::cuda {

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
