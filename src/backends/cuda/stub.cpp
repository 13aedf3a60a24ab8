// Linked in place of the CUDA backend where it is not built.
#include "backends/registry.hpp"
#include "moe4/error.hpp"

namespace moe4::cuda {

namespace {

constexpr const char* kReason = "moe4 was not built with CUDA";

}  // namespace

BackendInfo backend_info(const BackendOptions&) {
    return {.name = "cuda", .description = "", .available = {kReason}, .kernels = {}};
}

std::unique_ptr<Backend> open_backend(const BackendOptions&) { throw Error(ErrorKind::unsupported, kReason); }

void quantize_grouped_tokens(const GroupedTokens&, const BlockScaledRows&, Stream) {
    throw Error(ErrorKind::unsupported, kReason);
}

}  // namespace moe4::cuda
