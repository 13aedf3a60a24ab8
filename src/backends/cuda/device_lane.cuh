#pragma once
// The vector type of moe/activations.hpp for a GPU's thread: one float. Compiled with -fmad=false, so that
// every operation rounds as it is written and results are the CPU's.
#include <bit>
#include <cstdint>

#include "moe/activations.hpp"

#define MOE4_LANE __host__ __device__ friend

namespace moe4::cuda {

struct DeviceLane {
    struct Int {
        std::uint32_t value;
        __host__ __device__ static Int set(int x) { return {static_cast<std::uint32_t>(x)}; }
        MOE4_LANE Int operator+(Int a, Int b) { return {a.value + b.value}; }
        MOE4_LANE Int operator-(Int a, Int b) { return {a.value - b.value}; }
        MOE4_LANE Int shift_left_23(Int a) { return {a.value << 23}; }
        MOE4_LANE Int shift_right_1(Int a) {
            return {static_cast<std::uint32_t>(static_cast<std::int32_t>(a.value) >> 1)};
        }
    };

    float value;
    __host__ __device__ static DeviceLane set(float x) { return {x}; }
    __host__ __device__ static DeviceLane from_bits(Int a) { return {std::bit_cast<float>(a.value)}; }
    MOE4_LANE Int bits(DeviceLane a) { return {std::bit_cast<std::uint32_t>(a.value)}; }
    MOE4_LANE DeviceLane operator+(DeviceLane a, DeviceLane b) { return {a.value + b.value}; }
    MOE4_LANE DeviceLane operator-(DeviceLane a, DeviceLane b) { return {a.value - b.value}; }
    MOE4_LANE DeviceLane operator*(DeviceLane a, DeviceLane b) { return {a.value * b.value}; }
    MOE4_LANE DeviceLane operator/(DeviceLane a, DeviceLane b) { return {a.value / b.value}; }
    MOE4_LANE DeviceLane fma(DeviceLane a, DeviceLane b, DeviceLane c) {
        return {fmaf(a.value, b.value, c.value)};
    }
    MOE4_LANE DeviceLane min(DeviceLane a, DeviceLane b) { return {a.value < b.value ? a.value : b.value}; }
    MOE4_LANE DeviceLane max(DeviceLane a, DeviceLane b) { return {a.value > b.value ? a.value : b.value}; }
};

}  // namespace moe4::cuda

#undef MOE4_LANE
