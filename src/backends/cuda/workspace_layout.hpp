#pragma once
// Where the intermediate results of a run lie in the caller's workspace; the only place that computes an
// offset.
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "backends/cuda/k_order.hpp"
#include "backends/cuda/smxx/arrange.hpp"
#include "moe4/backend.hpp"

namespace moe4::cuda {

struct WorkspaceLayout {
    std::size_t counts;     // i32: segments, rows; u32: largest magnitude of the batch's x, of its h
    std::size_t progress;   // i32 [2 + slots]: items claimed of two launches; finished tiles of each segment
    std::size_t segments;   // Segment [slots]
    std::size_t row_token;  // i32 [slots]
    std::size_t slot_row;   // i32 [slots]
    std::size_t token_scale;  // f32 [tokens]
    std::size_t h_scale;      // f32 [slots]
    std::size_t x;            // 16-bit [slots or tokens, permuted_size(hidden_size)]
    std::size_t h;            // 16-bit [slots, permuted_size(intermediate_size)]
    std::size_t y;            // f32 [slots, hidden_size]
    std::size_t bytes;
};

/// groups_x: x may have a row a slot, as its codes depend on the expert or a GEMM wants rows grouped.
inline WorkspaceLayout workspace_layout(const Problem& problem, int top_k, bool groups_x) {
    const std::int64_t tokens = std::max<std::int64_t>(1, problem.max_tokens);
    const std::int64_t slots = tokens * top_k;
    std::int64_t end = 0;
    const auto place = [&end](std::int64_t bytes) {
        const std::int64_t begin = end;
        end = round_up(end + bytes, 256);
        return static_cast<std::size_t>(begin);
    };
    WorkspaceLayout at{};
    at.counts = place(16);
    at.progress = place((2 + slots) * 4);
    at.segments = place(slots * static_cast<std::int64_t>(sizeof(Segment)));
    at.row_token = place(slots * 4);
    at.slot_row = place(slots * 4);
    at.token_scale = place(tokens * 4);
    at.h_scale = place(slots * 4);
    at.x = place((groups_x ? slots : tokens) * permuted_size(problem.config.hidden_size) * 2);
    at.h = place(slots * permuted_size(problem.config.intermediate_size) * 2);
    at.y = place(slots * problem.config.hidden_size * 4);
    at.bytes = static_cast<std::size_t>(end);
    return at;
}

}  // namespace moe4::cuda
