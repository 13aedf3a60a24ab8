#pragma once
// The routers of the supported families: one rule with settings (RouterConfig in moe4/moe.hpp says it in
// full).
#include <cstdint>
#include <optional>

#include "moe4/moe.hpp"

namespace moe4::moe {

inline constexpr int kMaxExperts = 1024;
inline constexpr int kMaxTopK = 32;

/// Throws invalid_argument for settings that no row could satisfy, unsupported above kMaxExperts or kMaxTopK.
void check_router(const MoeConfig&, const TensorView& router, const std::optional<TensorView>& bias);

/// Routes one token: hidden [hidden_size] bf16 -> ids and weights [router.top_k], best first. The logits are
/// summed in double and rounded to fp32, the rest is fp32. Allocates nothing.
void route_token(const MoeConfig&, const TensorView& router, const std::optional<TensorView>& bias,
                 const std::uint16_t* hidden, std::int32_t* top_k_ids, float* top_k_weights);

}  // namespace moe4::moe
