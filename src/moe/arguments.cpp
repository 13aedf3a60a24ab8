#include "moe/arguments.hpp"

#include <algorithm>
#include <string>

#include "moe/problem.hpp"
#include "moe4/error.hpp"

namespace moe4::moe {

namespace {

constexpr std::uintptr_t kWorkspaceAlignment = 64;

[[noreturn]] void refuse(const std::string& sentence) { throw Error(ErrorKind::invalid_argument, sentence); }

std::string describe(Device device) {
    return device.type == DeviceType::cpu ? "in host memory" : "on GPU " + std::to_string(device.index);
}

bool is_aligned(const void* data, std::size_t alignment) {
    return reinterpret_cast<std::uintptr_t>(data) % alignment == 0;
}

}  // namespace

void check_tensor(const char* name, const TensorView& tensor, DType dtype, const Shape& shape, Device device,
                  std::size_t alignment) {
    if (tensor.dtype != dtype || tensor.shape != shape || tensor.device != device) {
        refuse(std::string(name) + " is " + std::string(dtype_name(tensor.dtype)) + " " +
               tensor.shape.to_string() + " " + describe(tensor.device) + ", expected " +
               std::string(dtype_name(dtype)) + " " + shape.to_string() + " " + describe(device));
    }
    if (shape.num_elements() == 0) return;
    if (tensor.data == nullptr || !is_aligned(tensor.data, alignment)) {
        refuse(std::string(name) + (tensor.data == nullptr ? " has no data" : " is misaligned") +
               ", expected memory aligned to " + std::to_string(alignment) + " bytes");
    }
}

namespace {

/// [num_tokens, top_k] each.
void check_routing(const TensorView& ids, const TensorView& weights, const Shape& shape, Device device) {
    check_tensor("top_k_ids", ids, DType::i32, shape, device, sizeof(std::int32_t));
    check_tensor("top_k_weights", weights, DType::f32, shape, device, sizeof(float));
}

}  // namespace

std::int64_t num_tokens_of(const TensorView& hidden) {
    if (hidden.shape.rank != 2 || hidden.shape[0] < 0)
        refuse("hidden is " + hidden.shape.to_string() + ", expected [num_tokens, hidden_size]");
    return hidden.shape[0];
}

void check_route_arguments(const MoeConfig& config, const TensorView& hidden, const TensorView& top_k_ids,
                           const TensorView& top_k_weights, const Placement& placement) {
    const std::int64_t num_tokens = num_tokens_of(hidden);
    check_tensor("hidden", hidden, DType::bf16, {num_tokens, config.hidden_size}, placement.device,
                 placement.vector_alignment);
    check_routing(top_k_ids, top_k_weights, {num_tokens, config.router.top_k}, placement.device);
}

void check_run_arguments(const Problem& problem, const TensorView& hidden, const Routing& routing,
                         const TensorView& output, const Placement& placement) {
    const std::int64_t num_tokens = num_tokens_of(hidden);
    const Shape rows{num_tokens, problem.config.hidden_size};
    check_tensor("hidden", hidden, DType::bf16, rows, placement.device, placement.vector_alignment);
    if (num_tokens > problem.max_tokens) {
        refuse("hidden has " + std::to_string(num_tokens) + " tokens, expected at most the " +
               std::to_string(problem.max_tokens) + " that were planned");
    }
    check_routing(routing.top_k_ids, routing.top_k_weights, {num_tokens, slots_per_token(problem)},
                  placement.device);
    const DType dtype = output.dtype == DType::f32 ? DType::f32 : DType::bf16;
    check_tensor("output", output, dtype, rows, placement.device,
                 std::max<std::size_t>(placement.vector_alignment, dtype == DType::f32 ? 4 : 2));
}

void check_workspace(const Plan& plan, const Workspace& workspace) {
    if (workspace.data == nullptr || workspace.bytes < plan.workspace_bytes) {
        refuse("the workspace has " + std::to_string(workspace.data == nullptr ? 0 : workspace.bytes) +
               " bytes, expected " + std::to_string(plan.workspace_bytes));
    }
    if (!is_aligned(workspace.data, kWorkspaceAlignment))
        refuse("the workspace is misaligned, expected an address that is a multiple of 64");
}

}  // namespace moe4::moe
