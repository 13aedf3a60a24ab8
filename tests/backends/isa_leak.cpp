// A violation for isa_isolation.cmake to find: std::min<int>, compiled for one instruction set.
#include <algorithm>

namespace moe4::cpu::leak {
int smaller(int a, int b);
int smaller(int a, int b) { return std::min(a, b); }
}  // namespace moe4::cpu::leak
