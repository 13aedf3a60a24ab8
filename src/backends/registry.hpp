#pragma once
// What a backend gives to the list of backends. Opening and describing are all that the rest of the library
// knows of it.
#include <memory>

#include "moe4/backend.hpp"

namespace moe4::cpu {
BackendInfo backend_info();
std::unique_ptr<Backend> open_backend(const BackendOptions&);
}  // namespace moe4::cpu

namespace moe4::cuda {
BackendInfo backend_info();
std::unique_ptr<Backend> open_backend(const BackendOptions&);
}  // namespace moe4::cuda
