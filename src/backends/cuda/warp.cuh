#pragma once
namespace moe4::cuda {

inline constexpr unsigned kAllLanes = 0xFFFFFFFFU;  // of a warp, for what its lanes do together

}  // namespace moe4::cuda
