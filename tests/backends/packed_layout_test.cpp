// Of every packer what packed_elements.hpp asks, where the CPU has its instructions.
#include "backends/packed_elements.hpp"

namespace moe4::cpu {
namespace {

using testing::expect_every_element_and_zeros;

TEST(PackedLayout, OfAvx512HoldsEveryElementAndZeros) {
    if ((detect_isa() & kAvx512) == 0) GTEST_SKIP() << "this CPU lacks avx512";
    expect_every_element_and_zeros(kPackedLayout);
}

TEST(PackedLayout, OfAvx2HoldsEveryElementAndZeros) {
    if ((detect_isa() & kAvx2) == 0) GTEST_SKIP() << "this CPU lacks avx2";
    expect_every_element_and_zeros(kAvx2PackedLayout);
}

}  // namespace
}  // namespace moe4::cpu
