#pragma once
// The cases that every kernel of every backend is put through, and how near it must come.
#include <vector>

#include "conformance/random_layer.hpp"
#include "moe4/backend.hpp"

namespace moe4::testing {

struct Case {
    const char* name;
    LayerOptions layer;
    std::int64_t num_tokens = 5;
    int top_k = 2;
    Ids ids = Ids::distinct;
    ExpertRange experts = {};
    bool has_special_values = false;  // rows with NaN, infinities, zeros and subnormals
};

/// Sizes: K = 16 * odd is no multiple of any kernel's step, N = 48 and 80 of no tile of 32 rows, 1856, 704,
/// 2880 and 192 of none of 128, 1408 of none of 256.
inline const std::vector<Case>& cases() {
    static const std::vector<Case> list = {
        {.name = "one_token", .layer = {256, 128, 8}, .num_tokens = 1},
        {.name = "no_tokens", .layer = {64, 32, 4}, .num_tokens = 0},
        {.name = "smallest", .layer = {16, 16, 1}, .num_tokens = 1, .top_k = 1},
        {.name = "odd_sizes", .layer = {208, 80, 4}},
        {.name = "hidden_2880", .layer = {2880, 48, 3}},
        {.name = "intermediate_1408", .layer = {48, 1408, 3}},
        {.name = "intermediate_1856", .layer = {48, 1856, 3}},
        {.name = "hidden_704_intermediate_192", .layer = {704, 192, 3}, .num_tokens = 9},
        {.name = "top_1", .layer = {80, 48, 6}, .top_k = 1},
        {.name = "top_3", .layer = {80, 48, 6}, .top_k = 3},
        {.name = "top_4", .layer = {80, 48, 6}, .top_k = 4},
        {.name = "top_5", .layer = {80, 48, 6}, .top_k = 5},
        {.name = "top_6", .layer = {80, 48, 6}, .top_k = 6},
        {.name = "top_7", .layer = {80, 48, 9}, .top_k = 7},
        {.name = "top_8", .layer = {80, 48, 9}, .top_k = 8},
        {.name = "batch_64", .layer = {256, 192, 8}, .num_tokens = 64, .top_k = 4},
        {.name = "batch_200_zipf", .layer = {192, 80, 16}, .num_tokens = 200, .top_k = 8, .ids = Ids::zipf},
        {.name = "batch_64_one_expert",
         .layer = {256, 48, 8},
         .num_tokens = 64,
         .top_k = 1,
         .ids = Ids::one_expert},
        {.name = "batch_133_of_300_experts", .layer = {64, 32, 300}, .num_tokens = 133, .top_k = 8},
        {.name = "batch_200_of_300_experts", .layer = {64, 32, 300}, .num_tokens = 200, .top_k = 8},
        {.name = "batch_33_of_1024_experts", .layer = {64, 32, 1024}, .num_tokens = 33, .top_k = 8},
        {.name = "batch_64_of_264_experts",
         .layer = {272, 16, 264},
         .num_tokens = 64,
         .top_k = 8,
         .ids = Ids::zipf},
        {.name = "batch_64_of_132_experts",
         .layer = {32, 272, 132},
         .num_tokens = 64,
         .top_k = 8,
         .ids = Ids::zipf},
        {.name = "same_expert_in_every_slot", .layer = {64, 48, 4}, .top_k = 4, .ids = Ids::one_expert},
        {.name = "ids_of_nobody_with_nan_weights",
         .layer = {96, 48, 6},
         .num_tokens = 33,
         .top_k = 3,
         .ids = Ids::ragged},
        {.name = "expert_range", .layer = {96, 48, 8}, .num_tokens = 33, .top_k = 4, .experts = {2, 3}},
        {.name = "last_expert_alone", .layer = {96, 48, 8}, .num_tokens = 9, .top_k = 4, .experts = {7, 1}},
        {.name = "few_tokens_ids_of_nobody",
         .layer = {208, 80, 8},
         .num_tokens = 3,
         .top_k = 5,
         .ids = Ids::ragged},
        {.name = "few_tokens_same_expert_in_every_slot",
         .layer = {272, 48, 8},
         .num_tokens = 4,
         .top_k = 4,
         .ids = Ids::one_expert},
        {.name = "few_tokens_expert_range",
         .layer = {96, 208, 8},
         .num_tokens = 2,
         .top_k = 4,
         .experts = {2, 3}},
        {.name = "few_tokens_top_32", .layer = {80, 48, 40}, .num_tokens = 1, .top_k = 32},
        {.name = "every_scale_byte", .layer = {512, 208, 4, BlockScales::every}, .num_tokens = 17},
        {.name = "zero_and_subnormal_scales",
         .layer = {512, 208, 4, BlockScales::vanishing},
         .num_tokens = 17},
        {.name = "reciprocal_globals",
         .layer = {.hidden_size = 256, .intermediate_size = 80, .has_reciprocal_globals = true}},
        {.name = "strided_rows", .layer = {.hidden_size = 112, .intermediate_size = 80, .padding = 7}},
        {.name = "huge_activations",
         .layer = {.hidden_size = 160,
                   .intermediate_size = 80,
                   .hidden_magnitude = 0x1p100,
                   .h_magnitude = 0x1p40},
         .num_tokens = 20},
        {.name = "tiny_activations",
         .layer = {.hidden_size = 160,
                   .intermediate_size = 80,
                   .hidden_magnitude = 0x1p-90,
                   .h_magnitude = 0x1p-40},
         .num_tokens = 20},
        {.name = "special_values", .layer = {160, 80, 4}, .num_tokens = 24, .has_special_values = true},
    };
    return list;
}

/// rel-L2 of the f32 output against the fp64 oracle. w4a16 differs by the rounding of fp32 sums alone. In
/// w4a4 a sum that is rounded to the other side may flip a code of h, one step of 1/6 to 1/2 of a value: over
/// 64 rows or more that averages to 3e-3, a single row may be 3e-2 off.
inline double tolerance(Precision precision, std::int64_t num_tokens) {
    if (precision == Precision::w4a16) return 1e-3;
    return num_tokens >= 64 ? 3e-3 : 3e-2;
}

}  // namespace moe4::testing
