// Every emulated intrinsic against its instruction, on random operands; skipped where the CPU lacks it.
#include "emulated/intrinsics.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>

#include "conformance/random_layer.hpp"

namespace moe4::testing {
namespace {

/// Bits of any kind, or floats where roundings tie, or the values at the ends of the formats.
Operands random_operands(std::mt19937_64& random) {
    constexpr float kEnds[] = {0.0F,     -0.0F,     1.0F,     0x1p-149F, 0x1p-126F,  -0x1.8p-127F,
                               0x1p31F,  -0x1p31F,  0x1p127F, -3.4e38F,  0x1.8p-63F, 65519.0F,
                               INFINITY, -INFINITY, NAN,      0x1p-14F};
    Operands x;
    for (auto& operand : x.bytes) {
        const auto kind = random() % 4;
        for (std::size_t i = 0; i < 64; i += 4) {
            float lane = std::bit_cast<float>(static_cast<std::uint32_t>(random()));
            if (kind == 1) lane = static_cast<float>(static_cast<int>(random() % 512) - 256) / 8.0F;
            if (kind == 2) lane = kEnds[random() % std::size(kEnds)];
            std::memcpy(operand + i, &lane, sizeof(lane));
        }
    }
    return x;
}

bool is_nan(float x) { return std::isnan(x); }
bool is_nan(std::uint16_t half) { return (half & 0x7FFF) > 0x7C00; }

/// A NaN's sign and payload are nobody's contract.
template <class Lane>
bool same_numbers(const unsigned char* a, const unsigned char* b) {
    for (std::size_t i = 0; i < 64; i += sizeof(Lane)) {
        Lane x;
        Lane y;
        std::memcpy(&x, a + i, sizeof(x));
        std::memcpy(&y, b + i, sizeof(y));
        if (std::memcmp(&x, &y, sizeof(x)) != 0 && !(is_nan(x) && is_nan(y))) return false;
    }
    return true;
}

bool same(Lanes lanes, const unsigned char* a, const unsigned char* b) {
    if (lanes == Lanes::floats) return same_numbers<float>(a, b);
    if (lanes == Lanes::halves) return same_numbers<std::uint16_t>(a, b);
    return std::memcmp(a, b, 64) == 0;
}

class EmulatedIntrinsics : public ::testing::TestWithParam<int> {};

TEST_P(EmulatedIntrinsics, DoWhatTheInstructionDoes) {
    const Intrinsic& instruction = instructions().list[GetParam()];
    const Intrinsic& emulation = emulations().list[GetParam()];
    if (const cpu::IsaSet missing = instruction.needs & ~cpu::detect_isa(); missing != 0)
        GTEST_SKIP() << "this CPU lacks " << cpu::isa_names(missing);
    std::mt19937_64 random(seed());
    for (int i = 0; i < 4000; ++i) {
        const Operands x = random_operands(random);
        alignas(64) unsigned char expected[64] = {};
        alignas(64) unsigned char found[64] = {};
        instruction.run(x, expected);
        emulation.run(x, found);
        ASSERT_TRUE(same(instruction.lanes, found, expected)) << instruction.call << ", " << seed_note();
    }
}

std::string intrinsic_name(const ::testing::TestParamInfo<int>& info) {
    const std::string call = emulations().list[info.param].call;
    return std::to_string(info.param) + call.substr(0, call.find('('));
}
INSTANTIATE_TEST_SUITE_P(All, EmulatedIntrinsics, ::testing::Range(0, emulations().count), intrinsic_name);

}  // namespace
}  // namespace moe4::testing
