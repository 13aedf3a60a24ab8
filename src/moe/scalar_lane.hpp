#pragma once
// The vector type of activations.hpp with one lane: plain float.
#include <bit>
#include <cmath>
#include <cstdint>

namespace moe4::moe {

struct ScalarLane {
    struct Int {
        std::uint32_t value;  // two's complement that wraps, as vector lanes do
        static Int set(int x) { return {static_cast<std::uint32_t>(x)}; }
        friend Int operator+(Int a, Int b) { return {a.value + b.value}; }
        friend Int operator-(Int a, Int b) { return {a.value - b.value}; }
        friend Int shift_left_23(Int a) { return {a.value << 23}; }
        friend Int shift_right_1(Int a) {
            return {static_cast<std::uint32_t>(static_cast<std::int32_t>(a.value) >> 1)};
        }
    };

    float value;
    static ScalarLane set(float x) { return {x}; }
    static ScalarLane from_bits(Int a) { return {std::bit_cast<float>(a.value)}; }
    friend Int bits(ScalarLane a) { return {std::bit_cast<std::uint32_t>(a.value)}; }
    friend ScalarLane operator+(ScalarLane a, ScalarLane b) { return {a.value + b.value}; }
    friend ScalarLane operator-(ScalarLane a, ScalarLane b) { return {a.value - b.value}; }
    friend ScalarLane operator*(ScalarLane a, ScalarLane b) { return {a.value * b.value}; }
    friend ScalarLane operator/(ScalarLane a, ScalarLane b) { return {a.value / b.value}; }
    friend ScalarLane fma(ScalarLane a, ScalarLane b, ScalarLane c) {
        return {std::fma(a.value, b.value, c.value)};
    }
    friend ScalarLane min(ScalarLane a, ScalarLane b) { return {a.value < b.value ? a.value : b.value}; }
    friend ScalarLane max(ScalarLane a, ScalarLane b) { return {a.value > b.value ? a.value : b.value}; }
};

}  // namespace moe4::moe
