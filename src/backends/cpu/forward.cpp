// permute -> load hidden -> gate_up -> [load h] -> down and combine. Each phase is a fork-join over pieces of
// work that share nothing, so any thread may take any piece at any time and the bits stay the same.
#include "backends/cpu/forward.hpp"

#include <algorithm>
#include <cassert>

#include "format/bf16.hpp"
#include "format/quantize.hpp"

namespace moe4::cpu {

namespace {

constexpr std::int64_t kTokensPerPiece = 16;
constexpr std::int64_t kFewRows = 16;  // too few to be worth waking a thread for copying them

/// Largest finite magnitude: of bf16 bit patterns the order of the magnitudes.
float largest_finite(const std::uint16_t* values, std::int64_t count) {
    constexpr std::uint16_t kInfinity = 0x7F80;
    std::uint16_t largest = 0;
    for (std::int64_t i = 0; i < count; ++i) {
        const std::uint16_t magnitude = values[i] & 0x7FFF;
        largest = std::max(largest, magnitude < kInfinity ? magnitude : std::uint16_t{0});
    }
    return format::bf16_to_float(largest);
}

float product(float activation_scale, double global_scale) {
    return static_cast<float>(static_cast<double>(activation_scale) * global_scale);
}

class Forward {
public:
    Forward(const PreparedLayer& layer, const ForwardInput& input)
        : layer_(layer),
          layout_(layer.layout),
          workers_(*layer.workers),
          in_(input),
          hidden_size_(layer.problem.config.hidden_size),
          intermediate_size_(layer.problem.config.intermediate_size),
          row_begin_(at<std::int32_t>(layout_.row_begin)),
          row_token_(at<std::int32_t>(layout_.row_token)),
          slot_row_(at<std::int32_t>(layout_.slot_row)) {}

    void run() {
        permute();
        place_panels();
        scale_hidden();
        for (const Kernel* kernel : layer_.kernels) load_hidden(*kernel);
        gate_up();
        scale_h();
        load_h();
        down();
    }

private:
    template <class T>
    T* at(std::size_t offset) const {
        return reinterpret_cast<T*>(in_.workspace + offset);
    }
    const PreparedExpert& expert(std::int64_t e) const { return layer_.experts[static_cast<std::size_t>(e)]; }
    std::int64_t num_rows() const { return row_begin_[layer_.num_held()]; }
    std::int64_t num_rows(std::int64_t e) const { return row_begin_[e + 1] - row_begin_[e]; }
    const Kernel& kernel_of(std::int64_t e) const { return layer_.kernel_for(num_rows(e)); }
    ActivationScale mode() const { return layer_.problem.activation_scale; }
    bool is_w4a4() const { return layer_.problem.precision == Precision::w4a4; }
    bool scale_depends_on_expert() const { return is_w4a4() && mode() == ActivationScale::per_expert; }

    std::uint8_t* panel(std::int64_t e) const {
        return at<std::uint8_t>(layout_.panels) + at<std::uint64_t>(layout_.panel_offset)[e];
    }
    std::uint8_t* h_panel(std::int64_t e) const {
        return at<std::uint8_t>(layout_.h_panels) + at<std::uint64_t>(layout_.h_panel_offset)[e];
    }
    std::uint16_t* h_row(std::int64_t row) const {
        return at<std::uint16_t>(layout_.h_rows) + row * intermediate_size_;
    }
    std::uint8_t* scratch(int worker) const {
        return at<std::uint8_t>(layout_.scratch) +
               static_cast<std::size_t>(worker) * (layout_.scratch_bytes + layout_.y_bytes);
    }

    /// Slots grouped by expert, within an expert by token and slot.
    void permute() {
        const std::int64_t num_slots = in_.num_tokens * layer_.top_k;
        std::fill_n(row_begin_, layer_.num_held() + 1, 0);
        for (std::int64_t slot = 0; slot < num_slots; ++slot) {
            const std::int32_t id = in_.top_k_ids[slot];
            if (layer_.held.contains(id)) ++row_begin_[id - layer_.held.first + 1];
        }
        for (std::int64_t e = 0; e < layer_.num_held(); ++e) row_begin_[e + 1] += row_begin_[e];
        for (std::int64_t slot = 0; slot < num_slots; ++slot) {
            const std::int32_t id = in_.top_k_ids[slot];
            if (!layer_.held.contains(id)) {
                slot_row_[slot] = -1;
                continue;
            }
            const std::int32_t row = row_begin_[id - layer_.held.first]++;
            row_token_[row] = static_cast<std::int32_t>(slot / layer_.top_k);
            slot_row_[slot] = row;
        }
        for (std::int64_t e = layer_.num_held(); e > 0; --e) row_begin_[e] = row_begin_[e - 1];
        row_begin_[0] = 0;
    }

    void place_panels() {
        auto* offset = at<std::uint64_t>(layout_.panel_offset);
        auto* h_offset = at<std::uint64_t>(layout_.h_panel_offset);
        std::size_t next = 0;
        std::size_t h_next = 0;
        for (std::int64_t e = 0; e < layer_.num_held(); ++e) {
            const Kernel& kernel = kernel_of(e);
            offset[e] = next;
            h_offset[e] = h_next;
            if (num_rows(e) == 0) continue;
            next += round_up(kernel.panel_bytes(num_rows(e), hidden_size_), 64);
            h_next += round_up(kernel.panel_bytes(num_rows(e), intermediate_size_), 64);
        }
    }

    /// A1 of every token and row, and the products that gate_up applies.
    void scale_hidden() {
        auto* token_scale = at<float>(layout_.token_scale);
        if (is_w4a4() && scales_need_all_of_h(layer_.problem)) {
            workers_.for_each(num_pieces(in_.num_tokens), [&](int, std::int64_t piece) {
                const std::int64_t last = std::min(in_.num_tokens, (piece + 1) * kTokensPerPiece);
                for (std::int64_t t = piece * kTokensPerPiece; t < last; ++t) {
                    const std::uint16_t* row = in_.hidden + t * hidden_size_;
                    token_scale[t] = format::dynamic_global_scale(largest_finite(row, hidden_size_));
                }
            });
            if (mode() == ActivationScale::dynamic) spread_largest(token_scale, in_.num_tokens);
        } else {
            std::fill_n(token_scale, in_.num_tokens, expert(0).input_scale);
        }
        auto* input_scale = at<float>(layout_.input_scale);
        for (std::int64_t e = 0; e < layer_.num_held(); ++e) {
            for (std::int32_t r = row_begin_[e]; r < row_begin_[e + 1]; ++r) {
                input_scale[r] =
                    scale_depends_on_expert() ? expert(e).input_scale : token_scale[row_token_[r]];
                at<float>(layout_.gate_scale)[r] = product(input_scale[r], expert(e).gate_scale);
                at<float>(layout_.up_scale)[r] = product(input_scale[r], expert(e).up_scale);
                at<float>(layout_.h_input_scale)[r] = expert(e).h_input_scale;
            }
        }
    }

    /// A2 of every row, and the product that down applies.
    void scale_h() {
        auto* scale = at<float>(layout_.h_input_scale);
        if (is_w4a4() && scales_need_all_of_h(layer_.problem)) {
            workers_.for_each(num_pieces(num_rows()), [&](int, std::int64_t piece) {
                const std::int64_t last = std::min(num_rows(), (piece + 1) * kTokensPerPiece);
                for (std::int64_t r = piece * kTokensPerPiece; r < last; ++r) {
                    scale[r] = format::dynamic_global_scale(largest_finite(h_row(r), intermediate_size_));
                }
            });
            if (mode() == ActivationScale::dynamic) spread_largest(scale, num_rows());
        }
        for (std::int64_t e = 0; e < layer_.num_held(); ++e) {
            for (std::int32_t r = row_begin_[e]; r < row_begin_[e + 1]; ++r)
                at<float>(layout_.down_scale)[r] = product(scale[r], expert(e).down_scale);
        }
    }

    static std::int64_t num_pieces(std::int64_t tokens) {
        return (tokens + kTokensPerPiece - 1) / kTokensPerPiece;
    }

    static void spread_largest(float* scales, std::int64_t count) {
        if (count > 0) std::fill_n(scales, count, *std::max_element(scales, scales + count));
    }

    void load_hidden(const Kernel& kernel) {
        const auto is_served = [&](std::int64_t e) { return &kernel_of(e) == &kernel; };
        const std::size_t row_bytes = encoded_row_bytes(kernel, hidden_size_);
        const bool encodes_each_row = kernel.encode_rows != nullptr && scale_depends_on_expert();
        const bool encodes_tokens = kernel.encode_rows != nullptr && !encodes_each_row;
        auto* encoded = at<std::uint8_t>(layout_.encoded);
        if (!serves_any(is_served)) return;
        if (encodes_tokens) {
            workers_.for_each(num_pieces(in_.num_tokens), [&](int, std::int64_t piece) {
                kernel.encode_rows({.values = in_.hidden,
                                    .index = nullptr,
                                    .input_scale = at<float>(layout_.token_scale),
                                    .cols = hidden_size_,
                                    .first = piece * kTokensPerPiece,
                                    .last = std::min(in_.num_tokens, (piece + 1) * kTokensPerPiece),
                                    .rows = encoded});
            });
        }
        for_each_row_piece(is_served, [&](const Piece& piece) {
            const std::int64_t begin = row_begin_[piece.expert];
            GatherTask gather{.rows = reinterpret_cast<const std::uint8_t*>(in_.hidden),
                              .index = row_token_ + begin,
                              .cols = hidden_size_,
                              .num_rows = num_rows(piece.expert),
                              .first = piece.first,
                              .last = piece.last,
                              .panel = panel(piece.expert)};
            if (encodes_tokens) gather.rows = encoded;
            if (encodes_each_row) {
                kernel.encode_rows({.values = in_.hidden,
                                    .index = row_token_,
                                    .input_scale = at<float>(layout_.input_scale),
                                    .cols = hidden_size_,
                                    .first = begin + piece.first,
                                    .last = begin + piece.last,
                                    .rows = encoded});
                gather.rows = encoded + static_cast<std::size_t>(begin) * row_bytes;
                gather.index = nullptr;
            }
            kernel.gather_rows(gather);
        });
    }

    /// Encodes and gathers h where gate_up left it as bf16 rows.
    void load_h() {
        const auto is_in_rows = [&](std::int64_t e) { return stores_h_rows(kernel_of(e), layer_.problem); };
        if (!serves_any(is_in_rows)) return;
        std::size_t row_bytes = 0;  // of the widest, so that no two experts share bytes
        for (const Kernel* kernel : layer_.kernels) {
            if (stores_h_rows(*kernel, layer_.problem))
                row_bytes = std::max(row_bytes, encoded_row_bytes(*kernel, intermediate_size_));
        }
        for_each_row_piece(is_in_rows, [&](const Piece& piece) {
            const Kernel& kernel = kernel_of(piece.expert);
            const std::int64_t begin = row_begin_[piece.expert];
            const std::uint16_t* h = h_row(begin);
            const auto* rows = reinterpret_cast<const std::uint8_t*>(h);
            if (kernel.encode_rows != nullptr) {
                auto* encoded =
                    at<std::uint8_t>(layout_.encoded) + static_cast<std::size_t>(begin) * row_bytes;
                kernel.encode_rows({.values = h,
                                    .index = nullptr,
                                    .input_scale = at<float>(layout_.h_input_scale) + begin,
                                    .cols = intermediate_size_,
                                    .first = piece.first,
                                    .last = piece.last,
                                    .rows = encoded});
                rows = encoded;
            }
            kernel.gather_rows({.rows = rows,
                                .index = nullptr,
                                .cols = intermediate_size_,
                                .num_rows = num_rows(piece.expert),
                                .first = piece.first,
                                .last = piece.last,
                                .panel = h_panel(piece.expert)});
        });
    }

    /// Pieces of about equal work: a tile costs its decoding, worth about kDecodeRows, and its rows.
    void gate_up() {
        constexpr std::int64_t kDecodeRows = 8;
        const auto num_tiles = [&](std::int64_t e) {
            return (intermediate_size_ + kernel_of(e).gate_up_tile - 1) / kernel_of(e).gate_up_tile;
        };
        const auto cost = [&](std::int64_t e) { return num_rows(e) == 0 ? 0 : num_rows(e) + kDecodeRows; };
        std::int64_t total = 0;
        for (std::int64_t e = 0; e < layer_.num_held(); ++e) total += num_tiles(e) * cost(e);
        // Rounded up: then there are at most kPiecesPerWorker a worker, and one more an expert (max_pieces).
        const std::int64_t wanted = kPiecesPerWorker * workers_.count();
        const std::int64_t target = std::max<std::int64_t>(1, (total + wanted - 1) / wanted);

        auto* pieces = at<Piece>(layout_.pieces);
        std::int64_t count = 0;
        for (std::int64_t e = 0; e < layer_.num_held(); ++e) {
            if (num_rows(e) == 0) continue;
            const std::int64_t step = (target + cost(e) - 1) / cost(e);
            count = append_pieces(e, num_tiles(e), step, count);
        }
        workers_.for_each(count, [&](int worker, std::int64_t i) { gate_up_piece(worker, pieces[i]); });
    }

    void gate_up_piece(int worker, const Piece& piece) {
        const Kernel& kernel = kernel_of(piece.expert);
        const std::int64_t begin = row_begin_[piece.expert];
        const bool stores_rows = stores_h_rows(kernel, layer_.problem);
        kernel.gate_up({.expert = &expert(piece.expert).data,
                        .panel = panel(piece.expert),
                        .gate_scale = at<float>(layout_.gate_scale) + begin,
                        .up_scale = at<float>(layout_.up_scale) + begin,
                        .input_scale = at<float>(layout_.h_input_scale) + begin,
                        .num_rows = num_rows(piece.expert),
                        .hidden_size = hidden_size_,
                        .intermediate_size = intermediate_size_,
                        .first = std::int64_t{piece.first} * kernel.gate_up_tile,
                        .last = std::min<std::int64_t>(intermediate_size_,
                                                       std::int64_t{piece.last} * kernel.gate_up_tile),
                        .h_panel = stores_rows ? nullptr : h_panel(piece.expert),
                        .h_rows = stores_rows ? h_row(begin) : nullptr,
                        .scratch = scratch(worker)});
    }

    /// A task owns a slice of output columns for all experts, so that it can combine at once.
    void down() {
        const std::int64_t unit = layout_.slice_unit;
        const std::int64_t row_bytes = std::max<std::int64_t>(1, num_rows()) * 4;
        const std::int64_t fitting = static_cast<std::int64_t>(layout_.y_bytes) / row_bytes / unit * unit;
        const std::int64_t slice = std::min(fitting, layout_.slice_cols);
        workers_.for_each((hidden_size_ + slice - 1) / slice, [&](int worker, std::int64_t i) {
            down_slice(worker, i * slice, std::min(hidden_size_, (i + 1) * slice), slice);
        });
    }

    void down_slice(int worker, std::int64_t first, std::int64_t last, std::int64_t y_stride) {
        auto* y = reinterpret_cast<float*>(scratch(worker) + layout_.scratch_bytes);
        for (std::int64_t e = 0; e < layer_.num_held(); ++e) {
            if (num_rows(e) == 0) continue;
            const std::int64_t begin = row_begin_[e];
            kernel_of(e).down({.expert = &expert(e).data,
                               .panel = h_panel(e),
                               .scale = at<float>(layout_.down_scale) + begin,
                               .num_rows = num_rows(e),
                               .hidden_size = hidden_size_,
                               .intermediate_size = intermediate_size_,
                               .first = first,
                               .last = last,
                               .y = y + begin * y_stride,
                               .y_stride = y_stride,
                               .scratch = scratch(worker)});
        }
        layer_.kernels.front()->combine(
            {.y = y,
             .y_stride = y_stride,
             .slot_row = slot_row_,
             .weight = in_.top_k_weights,
             .num_tokens = in_.num_tokens,
             .top_k = layer_.top_k,
             .cols = last - first,
             .out_f32 = in_.output_f32 == nullptr ? nullptr : in_.output_f32 + first,
             .out_bf16 = in_.output_bf16 == nullptr ? nullptr : in_.output_bf16 + first,
             .out_stride = hidden_size_});
    }

    template <class IsServed>
    bool serves_any(const IsServed& is_served) const {
        for (std::int64_t e = 0; e < layer_.num_held(); ++e) {
            if (num_rows(e) > 0 && is_served(e)) return true;
        }
        return false;
    }

    /// task(piece) for pieces of rows that cover the experts that are served.
    template <class IsServed, class Task>
    void for_each_row_piece(const IsServed& is_served, const Task& task) {
        auto* pieces = at<Piece>(layout_.pieces);
        std::int64_t count = 0;
        for (std::int64_t e = 0; e < layer_.num_held(); ++e) {
            if (num_rows(e) > 0 && is_served(e)) count = append_pieces(e, num_rows(e), kRowsPerPiece, count);
        }
        if (num_rows() <= kFewRows) {
            for (std::int64_t i = 0; i < count; ++i) task(pieces[i]);
            return;
        }
        workers_.for_each(count, [&](int, std::int64_t i) { task(pieces[i]); });
    }

    /// Cuts [0, size) of an expert into steps; returns the new number of pieces.
    std::int64_t append_pieces(std::int64_t e, std::int64_t size, std::int64_t step, std::int64_t count) {
        auto* pieces = at<Piece>(layout_.pieces);
        for (std::int64_t first = 0; first < size; first += step) {
            assert(count < layout_.max_pieces);
            pieces[count++] = {static_cast<std::int32_t>(e), static_cast<std::int32_t>(first),
                               static_cast<std::int32_t>(std::min(size, first + step))};
        }
        return count;
    }

    const PreparedLayer& layer_;
    const WorkspaceLayout& layout_;
    const Workers& workers_;
    const ForwardInput& in_;
    const std::int64_t hidden_size_, intermediate_size_;
    std::int32_t* const row_begin_;  // [num_held + 1]
    std::int32_t* const row_token_;  // [rows]
    std::int32_t* const slot_row_;   // [num_tokens, top_k]
};

}  // namespace

void forward(const PreparedLayer& layer, const ForwardInput& input) { Forward(layer, input).run(); }

}  // namespace moe4::cpu
