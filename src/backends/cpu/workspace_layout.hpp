#pragma once
// Where everything that one run needs lies in the caller's workspace: the only place that computes an offset.
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <span>

#include "backends/cpu/kernels/kernel.hpp"
#include "moe4/backend.hpp"

namespace moe4::cpu {

/// Consecutive rows, tiles or columns of one expert: the unit that a worker takes.
struct Piece {
    std::int32_t expert;  // counted from the first one held
    std::int32_t first, last;
};

inline constexpr std::int64_t kRowsPerPiece = 64;    // of a gather; a multiple of every rows_per_group
inline constexpr std::int64_t kSharesPerWorker = 2;  // of the work that is left, a piece of tiles is one

/// Of tiles. Unless an expert ends it, a piece takes 1 / n of the work that is left, n = kSharesPerWorker a
/// worker, and when less than n tiles are left, a tile: at most n (1 + ln work), and work is below 2^63.
constexpr std::int64_t max_tile_pieces(std::int64_t num_workers, std::int64_t experts) {
    return 45 * kSharesPerWorker * num_workers + experts;
}

struct WorkspaceLayout {
    // Offsets. Rows are slots grouped by expert; R = max_tokens * top_k bounds their number.
    std::size_t row_begin;      // i32 [num_held + 1]
    std::size_t row_token;      // i32 [R]
    std::size_t slot_row;       // i32 [max_tokens, top_k], -1 where no held expert serves the slot
    std::size_t token_scale;    // f32 [max_tokens], A1 where it does not depend on the expert
    std::size_t input_scale;    // f32 [R], A1 of every row
    std::size_t h_input_scale;  // f32 [R], A2
    std::size_t gate_scale;     // f32 [R], A1 * G_gate
    std::size_t up_scale;       // f32 [R], A1 * G_up
    std::size_t down_scale;     // f32 [R], A2 * G_down
    std::size_t pieces;         // Piece [max_pieces]
    std::size_t panel_offset;   // u64 [num_held], within panels
    std::size_t h_panel_offset;
    std::size_t encoded;   // rows encoded but not yet gathered, of hidden or of h
    std::size_t panels;    // [R, hidden_size]
    std::size_t h_panels;  // [R, intermediate_size]
    std::size_t h_rows;    // bf16 [R, intermediate_size] where a kernel does not encode h itself
    std::size_t y;         // f32 [R, columns of a band], what down adds to the output
    std::size_t scratch;   // scratch_bytes a worker
    std::size_t bytes;

    std::size_t scratch_bytes;
    std::size_t y_bytes;
    std::int64_t band_unit;  // output columns, a multiple of every kernel's down_tile
    std::int64_t max_pieces;
};

inline bool scales_need_all_of_h(const Problem& problem) {
    return problem.precision == Precision::w4a4 &&
           (problem.activation_scale == ActivationScale::dynamic ||
            problem.activation_scale == ActivationScale::dynamic_token);
}

/// Whether the kernel leaves h as bf16 rows, to be encoded and gathered afterwards.
inline bool stores_h_rows(const Kernel& kernel, const Problem& problem) {
    return !kernel.encodes_h || scales_need_all_of_h(problem);
}

inline std::size_t round_up(std::size_t bytes, std::size_t multiple) {
    return (bytes + multiple - 1) / multiple * multiple;
}

inline std::size_t encoded_row_bytes(const Kernel& kernel, std::int64_t cols) {
    return kernel.encode_rows == nullptr ? 0 : kernel.encoded_bytes(cols);
}

/// An upper bound of the panels of `rows` rows in `experts` experts, whichever kernel serves each: every
/// expert leaves at most one group unfilled.
inline std::size_t panels_bound(std::span<const Kernel* const> kernels, std::int64_t rows,
                                std::int64_t experts, std::int64_t cols) {
    std::size_t row = 0;
    std::size_t padding = 0;
    for (const Kernel* kernel : kernels) {
        const auto group = static_cast<std::size_t>(kernel->rows_per_group);
        const std::size_t group_bytes = kernel->panel_bytes(kernel->rows_per_group, cols);
        row = std::max(row, (group_bytes + group - 1) / group);
        padding = std::max(padding, group_bytes + 64);
    }
    return static_cast<std::size_t>(rows) * row + static_cast<std::size_t>(experts) * padding;
}

inline WorkspaceLayout workspace_layout(const Problem& problem, int top_k, std::int64_t num_held,
                                        std::span<const Kernel* const> kernels, int num_workers) {
    WorkspaceLayout layout{};
    const auto reserve = [&layout](std::size_t bytes) {
        const std::size_t offset = layout.bytes;
        layout.bytes = round_up(offset + bytes, 64);
        return offset;
    };
    const std::int64_t hidden = problem.config.hidden_size;
    const std::int64_t intermediate = problem.config.intermediate_size;
    const std::int64_t rows = problem.max_tokens * top_k;
    const std::int64_t experts = std::min(num_held, rows);
    const auto num_rows = static_cast<std::size_t>(rows);

    layout.row_begin = reserve(static_cast<std::size_t>(num_held + 1) * 4);
    layout.row_token = reserve(num_rows * 4);
    layout.slot_row = reserve(num_rows * 4);
    layout.token_scale = reserve(static_cast<std::size_t>(problem.max_tokens) * 4);
    for (std::size_t* scale : {&layout.input_scale, &layout.h_input_scale, &layout.gate_scale,
                               &layout.up_scale, &layout.down_scale}) {
        *scale = reserve(num_rows * 4);
    }
    layout.max_pieces = std::max(rows / kRowsPerPiece + experts, max_tile_pieces(num_workers, experts));
    layout.pieces = reserve(static_cast<std::size_t>(layout.max_pieces) * sizeof(Piece));
    layout.panel_offset = reserve(static_cast<std::size_t>(num_held) * 8);
    layout.h_panel_offset = reserve(static_cast<std::size_t>(num_held) * 8);

    const bool per_expert = problem.activation_scale == ActivationScale::per_expert;
    std::size_t encoded = 0;
    layout.band_unit = 32;
    bool any_h_rows = false;
    for (const Kernel* kernel : kernels) {
        const std::size_t hidden_rows = per_expert ? num_rows : static_cast<std::size_t>(problem.max_tokens);
        encoded = std::max(encoded, encoded_row_bytes(*kernel, hidden) * hidden_rows);
        if (stores_h_rows(*kernel, problem)) {
            any_h_rows = true;
            encoded = std::max(encoded, encoded_row_bytes(*kernel, intermediate) * num_rows);
        }
        layout.band_unit = std::lcm(layout.band_unit, std::int64_t{kernel->down_tile});
        layout.scratch_bytes =
            std::max(layout.scratch_bytes, round_up(kernel->scratch_bytes(rows, hidden, intermediate), 64));
    }
    layout.encoded = reserve(encoded);
    layout.panels = reserve(panels_bound(kernels, rows, experts, hidden));
    layout.h_panels = reserve(panels_bound(kernels, rows, experts, intermediate));
    layout.h_rows = reserve(any_h_rows ? num_rows * static_cast<std::size_t>(intermediate) * 2 : 0);

    // Within the last cache of a server; a band has at least one tile.
    constexpr std::size_t kMostBytes = 64U << 20;
    const std::size_t columns =
        round_up(static_cast<std::size_t>(hidden), static_cast<std::size_t>(layout.band_unit));
    layout.y_bytes = std::max(num_rows * 4 * static_cast<std::size_t>(layout.band_unit),
                              std::min(num_rows * 4 * columns, kMostBytes));
    layout.y = reserve(layout.y_bytes);
    layout.scratch = reserve(static_cast<std::size_t>(num_workers) * layout.scratch_bytes);
    return layout;
}

}  // namespace moe4::cpu
