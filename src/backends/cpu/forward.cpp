// permute -> load hidden -> gate_up -> [load h] -> down and combine. Each phase is a fork-join over pieces of
// work that share nothing, so any thread may take any piece at any time and the bits stay the same.
#include "backends/cpu/forward.hpp"

#include <algorithm>
#include <cassert>

#include "format/bf16.hpp"
#include "format/quantize.hpp"

namespace moe4::cpu {

namespace {

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

std::int64_t divide_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

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
        return at<std::uint8_t>(layout_.scratch) + static_cast<std::size_t>(worker) * layout_.scratch_bytes;
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
            for_each_range(in_.num_tokens, [&](std::int64_t first, std::int64_t last) {
                for (std::int64_t t = first; t < last; ++t) {
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
            for_each_range(num_rows(), [&](std::int64_t first, std::int64_t last) {
                for (std::int64_t r = first; r < last; ++r) {
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
            for_each_range(in_.num_tokens, [&](std::int64_t first, std::int64_t last) {
                kernel.encode_rows({.values = in_.hidden,
                                    .index = nullptr,
                                    .input_scale = at<float>(layout_.token_scale),
                                    .cols = hidden_size_,
                                    .first = first,
                                    .last = last,
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

    void gate_up() {
        const auto num_tiles = [&](std::int64_t e) {
            return divide_up(intermediate_size_, kernel_of(e).gate_up_tile);
        };
        for_each_tile_piece(num_tiles, [&](int worker, const Piece& piece) { gate_up_piece(worker, piece); });
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

    /// In bands of output columns, so that y stays small however many rows there are.
    void down() {
        const std::int64_t row_bytes = std::max<std::int64_t>(1, num_rows()) * 4;
        const std::int64_t fitting = static_cast<std::int64_t>(layout_.y_bytes) / row_bytes;
        const std::int64_t widest = divide_up(hidden_size_, layout_.band_unit) * layout_.band_unit;
        const std::int64_t width = std::min(fitting / layout_.band_unit * layout_.band_unit, widest);
        for (std::int64_t first = 0; first < hidden_size_; first += width) {
            const Band band{first, std::min(hidden_size_, first + width), width};
            const auto num_tiles = [&](std::int64_t e) {
                return divide_up(band.last - band.first, kernel_of(e).down_tile);
            };
            for_each_tile_piece(num_tiles,
                                [&](int worker, const Piece& piece) { down_piece(worker, piece, band); });
            combine(band);
        }
    }

    struct Band {
        std::int64_t first, last;  // output columns
        std::int64_t y_stride;
    };

    void down_piece(int worker, const Piece& piece, const Band& band) {
        const Kernel& kernel = kernel_of(piece.expert);
        const std::int64_t begin = row_begin_[piece.expert];
        const std::int64_t first = std::int64_t{piece.first} * kernel.down_tile;
        const std::int64_t last = std::int64_t{piece.last} * kernel.down_tile;
        kernel.down({.expert = &expert(piece.expert).data,
                     .panel = h_panel(piece.expert),
                     .scale = at<float>(layout_.down_scale) + begin,
                     .num_rows = num_rows(piece.expert),
                     .hidden_size = hidden_size_,
                     .intermediate_size = intermediate_size_,
                     .first = band.first + first,
                     .last = std::min(band.last, band.first + last),
                     .y = at<float>(layout_.y) + begin * band.y_stride + first,
                     .y_stride = band.y_stride,
                     .scratch = scratch(worker)});
    }

    void combine(const Band& band) {
        constexpr std::int64_t kTokens = 8;  // of a piece
        constexpr std::int64_t kCols = 256;
        const std::int64_t num_cols = band.last - band.first;
        const std::int64_t pieces_per_row = divide_up(num_cols, kCols);
        const auto combine_piece = [&](int, std::int64_t i) {
            const std::int64_t token = i / pieces_per_row * kTokens;
            const std::int64_t col = i % pieces_per_row * kCols;
            const std::int64_t out = token * hidden_size_ + band.first + col;
            layer_.kernels.front()->combine(
                {.y = at<float>(layout_.y) + col,
                 .y_stride = band.y_stride,
                 .slot_row = slot_row_ + token * layer_.top_k,
                 .weight = in_.top_k_weights + token * layer_.top_k,
                 .num_tokens = std::min(kTokens, in_.num_tokens - token),
                 .top_k = layer_.top_k,
                 .cols = std::min(kCols, num_cols - col),
                 .out_f32 = in_.output_f32 == nullptr ? nullptr : in_.output_f32 + out,
                 .out_bf16 = in_.output_bf16 == nullptr ? nullptr : in_.output_bf16 + out,
                 .out_stride = hidden_size_});
        };
        workers_.for_each(divide_up(in_.num_tokens, kTokens) * pieces_per_row, combine_piece);
    }

    /// task(worker, piece) for pieces that cover num_tiles(e) tiles of every expert, each a share of the work
    /// that is left: long streams first, and little to wait for at the end. A tile costs its decoding, worth
    /// about kDecodeRows, and its rows.
    template <class NumTiles, class Task>
    void for_each_tile_piece(const NumTiles& num_tiles, const Task& task) {
        constexpr std::int64_t kDecodeRows = 8;
        const auto cost = [&](std::int64_t e) { return num_rows(e) == 0 ? 0 : num_rows(e) + kDecodeRows; };
        std::int64_t left = 0;
        for (std::int64_t e = 0; e < layer_.num_held(); ++e) left += num_tiles(e) * cost(e);
        std::int64_t count = 0;
        for (std::int64_t e = 0; e < layer_.num_held(); ++e) {
            for (std::int64_t tile = 0; cost(e) > 0 && tile < num_tiles(e);) {
                const std::int64_t share = divide_up(left, kSharesPerWorker * workers_.count());
                const std::int64_t last = std::min(num_tiles(e), tile + divide_up(share, cost(e)));
                append_piece(count, e, tile, last);
                left -= (last - tile) * cost(e);
                tile = last;
            }
        }
        auto* pieces = at<Piece>(layout_.pieces);
        workers_.for_each(count, [&](int worker, std::int64_t i) { task(worker, pieces[i]); });
    }

    /// task(first, last) for ranges of tokens or rows that cover [0, count).
    template <class Task>
    void for_each_range(std::int64_t count, const Task& task) {
        const std::int64_t size = std::clamp<std::int64_t>(count / (4 * workers_.count()), 1, 16);
        workers_.for_each(divide_up(count, size),
                          [&](int, std::int64_t i) { task(i * size, std::min(count, (i + 1) * size)); });
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
        std::int64_t count = 0;
        for (std::int64_t e = 0; e < layer_.num_held(); ++e) {
            for (std::int64_t row = 0; is_served(e) && row < num_rows(e); row += kRowsPerPiece)
                append_piece(count, e, row, std::min(num_rows(e), row + kRowsPerPiece));
        }
        auto* pieces = at<Piece>(layout_.pieces);
        workers_.for_each(count, [&](int, std::int64_t i) { task(pieces[i]); });
    }

    void append_piece(std::int64_t& count, std::int64_t e, std::int64_t first, std::int64_t last) {
        assert(count < layout_.max_pieces);
        at<Piece>(layout_.pieces)[count++] = {static_cast<std::int32_t>(e), static_cast<std::int32_t>(first),
                                              static_cast<std::int32_t>(last)};
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
