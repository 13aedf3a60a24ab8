#pragma once
// Where everything that one run needs lies in the caller's workspace: the only place that computes an offset.
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <span>

#include "backends/cpu/kernels/kernel.hpp"
#include "moe/problem.hpp"
#include "moe4/backend.hpp"

namespace moe4::cpu {

/// Consecutive rows of one expert, which are gathered and multiplied together.
struct RowBlock {
    std::uint64_t h_panel;  // its offset
    std::int32_t expert;    // counted from the first one held
    std::int32_t kernel;    // of the layer's
    std::int32_t first_row, num_rows;
    std::int32_t left_of_h;  // pieces of gate_up and one step to load h, before down may read it
};

/// Consecutive tiles of one block: the unit that a worker takes.
struct Piece {
    std::int32_t block;
    std::int32_t first, last;
};

/// Of a layer: what a thread gathers of hidden stays near its second cache.
constexpr std::int64_t max_block_rows(std::int64_t hidden_size) {
    return std::clamp<std::int64_t>((512 << 10) / hidden_size, 16, kMaxBlockRows);
}

inline constexpr std::int64_t kSharesPerWorker = 2;  // of the work that is left, a piece is one

/// Unless a block ends it, a piece takes 1 / n of the work that is left, n = kSharesPerWorker a worker, and
/// when less than n tiles are left, a tile: at most n (1 + ln work), and work is below 2^63.
constexpr std::int64_t max_pieces(std::int64_t num_workers, std::int64_t blocks) {
    return 45 * kSharesPerWorker * num_workers + blocks;
}

struct WorkspaceLayout {
    // Offsets. Rows are slots grouped by expert; R = max_tokens * top_k bounds their number.
    std::size_t row_begin;    // i32 [num_held + 1]
    std::size_t row_token;    // i32 [R]
    std::size_t slot_row;     // i32 [max_tokens, top_k], -1 where no held expert serves the slot
    std::size_t token_scale;  // f32 [max_tokens], A1 where it does not depend on the expert
    std::size_t h_scale;      // f32 [R], A2
    std::size_t blocks;       // RowBlock [at most R / max_block_rows + one an expert]
    std::size_t gate_up_pieces, down_pieces;  // Piece [max_pieces]
    std::size_t encoded;   // hidden: [max_tokens] a kernel, or [R] where A1 depends on the expert
    std::size_t h_panels;  // [R, intermediate_size]
    std::size_t h_rows;    // bf16 [R, intermediate_size] where a kernel does not encode h itself
    std::size_t y;         // f32 [R, columns of a band], what down adds to the output
    std::size_t workers;   // worker_bytes each
    std::size_t bytes;

    // Offsets within a worker's bytes.
    std::size_t worker_panel;   // a block of hidden; afterwards of h, encoded but not yet gathered
    std::size_t worker_scales;  // f32 [2, kMaxBlockRows]
    std::size_t worker_scratch;
    std::size_t worker_bytes;

    std::size_t encoded_row_bytes;  // of the kernel with the longest rows
    std::size_t y_bytes;
    std::int64_t band_unit;  // output columns, a multiple of every kernel's down_tile
    std::int64_t max_pieces;
};

/// Whether the kernel leaves h as bf16 rows, to be encoded and gathered afterwards.
inline bool stores_h_rows(const Kernel& kernel, const Problem& problem) {
    return !kernel.encodes_h || moe::has_dynamic_scales(problem);
}

inline std::size_t round_up(std::size_t bytes, std::size_t multiple) {
    return (bytes + multiple - 1) / multiple * multiple;
}

inline std::size_t encoded_row_bytes(const Kernel& kernel, std::int64_t cols) {
    return kernel.encode_rows == nullptr ? 0 : kernel.encoded_bytes(cols);
}

/// An upper bound of the panels of `rows` rows in `blocks` blocks, whichever kernel serves each: every block
/// leaves at most one group unfilled.
inline std::size_t panels_bound(std::span<const Kernel* const> kernels, std::int64_t rows,
                                std::int64_t blocks, std::int64_t cols) {
    std::size_t row = 0;
    std::size_t padding = 0;
    for (const Kernel* kernel : kernels) {
        const auto group = static_cast<std::size_t>(kernel->rows_per_group);
        const std::size_t group_bytes = kernel->panel_bytes(kernel->rows_per_group, cols);
        row = std::max(row, (group_bytes + group - 1) / group);
        padding = std::max(padding, group_bytes + 64);
    }
    return static_cast<std::size_t>(rows) * row + static_cast<std::size_t>(blocks) * padding;
}

/// The most that any of a layer's kernels needs.
struct KernelNeeds {
    std::size_t encoded_row_bytes = 0, encoded_h_row_bytes = 0;
    std::size_t scratch_bytes = 0;
    bool stores_h_rows = false;
    std::int64_t band_unit = 32;

    KernelNeeds(std::span<const Kernel* const> kernels, const Problem& problem, std::int64_t block_rows) {
        const std::int64_t hidden = problem.config.hidden_size;
        const std::int64_t intermediate = problem.config.intermediate_size;
        for (const Kernel* kernel : kernels) {
            encoded_row_bytes = std::max(encoded_row_bytes, cpu::encoded_row_bytes(*kernel, hidden));
            encoded_h_row_bytes =
                std::max(encoded_h_row_bytes, cpu::encoded_row_bytes(*kernel, intermediate));
            scratch_bytes = std::max(scratch_bytes, kernel->scratch_bytes(block_rows, hidden, intermediate));
            stores_h_rows = stores_h_rows || cpu::stores_h_rows(*kernel, problem);
            band_unit = std::lcm(band_unit, std::int64_t{kernel->down_tile});
        }
    }
};

/// Places one thing behind the other, each at a multiple of 64.
class Reserve {
public:
    explicit Reserve(std::size_t& end) : end_(end) {}
    std::size_t operator()(std::size_t bytes) const {
        const std::size_t offset = end_;
        end_ = round_up(offset + bytes, 64);
        return offset;
    }

private:
    std::size_t& end_;
};

inline WorkspaceLayout workspace_layout(const Problem& problem, int top_k, std::int64_t num_held,
                                        std::span<const Kernel* const> kernels, int num_workers) {
    const std::int64_t hidden = problem.config.hidden_size;
    const std::int64_t intermediate = problem.config.intermediate_size;
    const std::int64_t rows = problem.max_tokens * top_k;
    const std::int64_t block_rows = std::min(rows, max_block_rows(hidden));
    const std::int64_t blocks = rows / max_block_rows(hidden) + std::min(num_held, rows);
    const auto num_rows = static_cast<std::size_t>(rows);
    const KernelNeeds needs(kernels, problem, block_rows);

    WorkspaceLayout layout{};
    layout.max_pieces = max_pieces(num_workers, blocks);
    layout.band_unit = needs.band_unit;
    layout.encoded_row_bytes = needs.encoded_row_bytes;

    const Reserve reserve_for_worker(layout.worker_bytes);
    layout.worker_panel =
        reserve_for_worker(std::max(panels_bound(kernels, block_rows, 1, hidden),
                                    static_cast<std::size_t>(block_rows) * needs.encoded_h_row_bytes));
    layout.worker_scales = reserve_for_worker(2 * kMaxBlockRows * sizeof(float));
    layout.worker_scratch = reserve_for_worker(needs.scratch_bytes);

    const Reserve reserve(layout.bytes);
    layout.row_begin = reserve(static_cast<std::size_t>(num_held + 1) * 4);
    layout.row_token = reserve(num_rows * 4);
    layout.slot_row = reserve(num_rows * 4);
    layout.token_scale = reserve(static_cast<std::size_t>(problem.max_tokens) * 4);
    layout.h_scale = reserve(num_rows * 4);
    layout.blocks = reserve(static_cast<std::size_t>(blocks) * sizeof(RowBlock));
    layout.gate_up_pieces = reserve(static_cast<std::size_t>(layout.max_pieces) * sizeof(Piece));
    layout.down_pieces = reserve(static_cast<std::size_t>(layout.max_pieces) * sizeof(Piece));
    layout.encoded = reserve(needs.encoded_row_bytes *
                             (moe::has_expert_scales(problem)
                                  ? num_rows
                                  : kernels.size() * static_cast<std::size_t>(problem.max_tokens)));
    layout.h_panels = reserve(panels_bound(kernels, rows, blocks, intermediate));
    layout.h_rows = reserve(needs.stores_h_rows ? num_rows * static_cast<std::size_t>(intermediate) * 2 : 0);

    // Within the last cache of a server; a band has at least one tile.
    constexpr std::size_t kMostBytes = 64U << 20;
    const auto unit = static_cast<std::size_t>(layout.band_unit);
    const std::size_t columns = round_up(static_cast<std::size_t>(hidden), unit);
    layout.y_bytes = std::max(num_rows * 4 * unit, std::min(num_rows * 4 * columns, kMostBytes));
    layout.y = reserve(layout.y_bytes);
    layout.workers = reserve(static_cast<std::size_t>(num_workers) * layout.worker_bytes);
    return layout;
}

}  // namespace moe4::cpu
