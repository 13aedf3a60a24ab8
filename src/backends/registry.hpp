#pragma once
// What a backend gives to the list of backends. Opening and describing are all that the rest of the library
// knows of it.
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "moe4/backend.hpp"
#include "moe4/grouped_tokens.hpp"

namespace moe4 {
/// The kernel that the options, or else MOE4_KERNEL, ask for.
struct KernelRequest {
    std::string kernel;  // empty = none
    std::string source;  // "the options ask for" or "MOE4_KERNEL is", to begin a sentence with
};
KernelRequest requested_kernel(const BackendOptions&);

/// Throws invalid_argument, listing the names, where another kernel is asked for. `device`: "CPU", "CUDA".
void check_known(const KernelRequest&, const std::string& device, const std::vector<std::string_view>& names);
}  // namespace moe4

namespace moe4::cpu {
BackendInfo backend_info(const BackendOptions&);
std::unique_ptr<Backend> open_backend(const BackendOptions&);
}  // namespace moe4::cpu

namespace moe4::cuda {
BackendInfo backend_info(const BackendOptions&);
std::unique_ptr<Backend> open_backend(const BackendOptions&);
/// Checked, of tensors on a GPU.
void quantize_grouped_tokens(const GroupedTokens&, const BlockScaledRows&, Stream);
}  // namespace moe4::cuda
