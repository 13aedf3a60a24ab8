// permute -> encode hidden -> gate_up, then h -> down -> combine. Pieces of work write to places of their
// own, so any thread may take any piece at any time and the bits stay the same.
//
// Rows are worked on in blocks of one expert's. The thread that takes a piece of gate_up gathers the block's
// activations for itself, into its own caches. The one that ends a block's last piece loads its h, which all
// of the block's threads wrote: a counter of pieces says who is last, and what was written before it was
// counted down is seen by who finds it at the end (acquire and release).
//
// From gate_up on there is no join: threads that find no more pieces of gate_up take those of down, which
// wait for the h of their block alone, and those of combine wait for all of down.
#include "backends/cpu/forward.hpp"

#include <algorithm>
#include <atomic>
#include <cassert>
#include <iterator>
#include <span>

#include "format/bf16.hpp"
#include "format/quantize.hpp"

namespace moe4::cpu {

namespace {

/// Largest finite magnitude: of bf16 bit patterns the order of the magnitudes.
float largest_finite(const std::uint16_t* values, std::int64_t count) {
    constexpr std::int16_t kInfinity = 0x7F80;
    std::int16_t largest = 0;  // signed, for which compilers know vectors
    for (std::int64_t i = 0; i < count; ++i) {
        const auto magnitude = static_cast<std::int16_t>(values[i] & 0x7FFF);
        largest = std::max(largest, magnitude < kInfinity ? magnitude : std::int16_t{0});
    }
    return format::bf16_to_float(static_cast<std::uint16_t>(largest));
}

std::int64_t divide_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

float product(float activation_scale, double global_scale) {
    return static_cast<float>(static_cast<double>(activation_scale) * global_scale);
}

constexpr std::int64_t kMostCachedYBytes = 16 << 20;  // about the second caches of a server

/// Of output columns, so that y stays small however many rows there are.
struct Band {
    std::int64_t first, last;
    std::int64_t y_stride;
};

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
          slot_row_(at<std::int32_t>(layout_.slot_row)),
          token_scale_(at<float>(layout_.token_scale)),
          h_scale_(at<float>(layout_.h_scale)),
          blocks_(at<RowBlock>(layout_.blocks)) {}

    void run() {
        permute();
        divide_rows();
        scale_tokens();
        encode_hidden();
        std::span<const Piece> gate_up = gate_up_pieces();
        if (mode_is(ActivationScale::dynamic)) {
            workers_.for_each(std::ssize(gate_up),
                              [&](int worker, std::int64_t i) { gate_up_piece(worker, gate_up[i]); });
            load_h_by_largest();
            gate_up = {};
        }
        for (std::int64_t first = 0; first < hidden_size_; first += band_width()) {
            multiply(gate_up, band_from(first));
            gate_up = {};
        }
    }

private:
    template <class T>
    T* at(std::size_t offset) const {
        return reinterpret_cast<T*>(in_.workspace + offset);
    }
    template <class T>
    T* at(int worker, std::size_t offset) const {
        return at<T>(layout_.workers + static_cast<std::size_t>(worker) * layout_.worker_bytes + offset);
    }
    const Kernel& kernel(const RowBlock& block) const {
        return *layer_.kernels[static_cast<std::size_t>(block.kernel)];
    }
    const PreparedExpert& expert(const RowBlock& block) const {
        return layer_.experts[static_cast<std::size_t>(block.expert)];
    }
    std::int64_t num_rows() const { return row_begin_[layer_.num_held()]; }
    bool mode_is(ActivationScale mode) const {
        return layer_.problem.precision == Precision::w4a4 && layer_.problem.activation_scale == mode;
    }

    std::uint8_t* h_panel(const RowBlock& block) const {
        return at<std::uint8_t>(layout_.h_panels) + block.h_panel;
    }
    std::uint16_t* h_rows(const RowBlock& block) const {
        return at<std::uint16_t>(layout_.h_rows) + block.first_row * intermediate_size_;
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

    /// Into blocks of about equal size, each of one expert.
    void divide_rows() {
        std::size_t h_panel = 0;
        for (std::int64_t e = 0; e < layer_.num_held(); ++e) {
            const std::int64_t begin = row_begin_[e];
            const std::int64_t count = row_begin_[e + 1] - begin;
            if (count == 0) continue;
            const std::int64_t num_blocks = divide_up(count, max_block_rows(hidden_size_));
            for (std::int64_t i = 0; i < num_blocks; ++i) {
                RowBlock& block = blocks_[num_blocks_++];
                block = {.h_panel = h_panel,
                         .expert = static_cast<std::int32_t>(e),
                         .kernel = static_cast<std::int32_t>(layer_.kernel_index(count)),
                         .first_row = static_cast<std::int32_t>(begin + count * i / num_blocks),
                         .num_rows =
                             static_cast<std::int32_t>(count * (i + 1) / num_blocks - count * i / num_blocks),
                         .left_of_h = 1};
                h_panel += round_up(kernel(block).panel_bytes(block.num_rows, intermediate_size_), 64);
                std::fill_n(h_scale_ + block.first_row, block.num_rows, expert(block).h_input_scale);
            }
        }
    }

    /// A1 where it does not depend on the expert.
    void scale_tokens() {
        if (!mode_is(ActivationScale::dynamic) && !mode_is(ActivationScale::dynamic_token)) {
            std::fill_n(token_scale_, in_.num_tokens, layer_.experts.front().input_scale);
            return;
        }
        for_each_range(in_.num_tokens, [&](std::int64_t first, std::int64_t last) {
            scale_by_largest(in_.hidden, hidden_size_, first, last, token_scale_);
        });
        if (mode_is(ActivationScale::dynamic)) spread_largest(token_scale_, in_.num_tokens);
    }

    static void scale_by_largest(const std::uint16_t* rows, std::int64_t cols, std::int64_t first,
                                 std::int64_t last, float* scales) {
        for (std::int64_t r = first; r < last; ++r)
            scales[r] = format::dynamic_global_scale(largest_finite(rows + r * cols, cols));
    }

    static void spread_largest(float* scales, std::int64_t count) {
        if (count > 0) std::fill_n(scales, count, *std::max_element(scales, scales + count));
    }

    bool encodes_tokens(const Kernel& kernel) const {
        return kernel.encode_rows != nullptr && !moe::has_expert_scales(layer_.problem);
    }
    bool encodes_blocks(const Kernel& kernel) const {
        return kernel.encode_rows != nullptr && moe::has_expert_scales(layer_.problem);
    }
    /// Of hidden: every token once a kernel, or the rows of every block.
    std::uint8_t* encoded_tokens(std::size_t kernel) const {
        return at<std::uint8_t>(layout_.encoded) +
               kernel * static_cast<std::size_t>(in_.num_tokens) * layout_.encoded_row_bytes;
    }
    std::uint8_t* encoded_block(const RowBlock& block) const {
        return at<std::uint8_t>(layout_.encoded) +
               static_cast<std::size_t>(block.first_row) * layout_.encoded_row_bytes;
    }

    void encode_hidden() {
        for (std::size_t k = 0; k < layer_.kernels.size(); ++k) {
            const Kernel& kernel = *layer_.kernels[k];
            const auto is_served = [&](const RowBlock& block) {
                return static_cast<std::size_t>(block.kernel) == k;
            };
            if (!encodes_tokens(kernel) || std::none_of(blocks_, blocks_ + num_blocks_, is_served)) continue;
            for_each_range(in_.num_tokens, [&](std::int64_t first, std::int64_t last) {
                kernel.encode_rows({.values = in_.hidden,
                                    .index = nullptr,
                                    .input_scale = token_scale_,
                                    .cols = hidden_size_,
                                    .first = first,
                                    .last = last,
                                    .rows = encoded_tokens(k)});
            });
        }
        if (!moe::has_expert_scales(layer_.problem)) return;
        for_each_block([&](int worker, const RowBlock& block) {
            if (!encodes_blocks(kernel(block))) return;
            auto* input_scale = at<float>(worker, layout_.worker_scales);
            std::fill_n(input_scale, block.num_rows, expert(block).input_scale);
            kernel(block).encode_rows({.values = in_.hidden,
                                       .index = row_token_ + block.first_row,
                                       .input_scale = input_scale,
                                       .cols = hidden_size_,
                                       .first = 0,
                                       .last = block.num_rows,
                                       .rows = encoded_block(block)});
        });
    }

    std::span<const Piece> gate_up_pieces() {
        const auto num_tiles = [&](const RowBlock& block) {
            return divide_up(intermediate_size_, kernel(block).gate_up_tile);
        };
        // Many rows cost more to gather than a tile of them to multiply: then a piece has 8 tiles, if there
        // are enough for everybody.
        const auto fewest_tiles = [](const RowBlock& block) {
            return divide_up(std::int64_t{8} * block.num_rows, cost(block));
        };
        const auto pieces = divide_tiles(num_tiles, fewest_tiles, at<Piece>(layout_.gate_up_pieces));
        for (const Piece& piece : pieces) ++blocks_[piece.block].left_of_h;
        return pieces;
    }

    std::span<const Piece> down_pieces(const Band& band) {
        const auto num_tiles = [&](const RowBlock& block) {
            return divide_up(band.last - band.first, kernel(block).down_tile);
        };
        const auto fewest_tiles = [](const RowBlock&) { return std::int64_t{1}; };
        return divide_tiles(num_tiles, fewest_tiles, at<Piece>(layout_.down_pieces));
    }

    /// gate_up where it is still to be done, then down and combine of a band.
    void multiply(std::span<const Piece> gate_up, const Band& band) {
        const std::span<const Piece> down = down_pieces(band);
        const std::int64_t first_down = std::ssize(gate_up);
        const std::int64_t first_combine = first_down + std::ssize(down);
        std::atomic<int> left_of_y{static_cast<int>(down.size())};
        const auto task = [&](int worker, std::int64_t i) {
            if (i < first_down) {
                gate_up_piece(worker, gate_up[i]);
            } else if (i < first_combine) {
                const Piece& piece = down[i - first_down];
                wait_for_zero(std::atomic_ref(blocks_[piece.block].left_of_h));
                down_piece(worker, piece, band);
                count_down(left_of_y);
            } else {
                wait_for_zero(left_of_y);
                combine_piece(i - first_combine, band);
            }
        };
        workers_.for_each(first_combine + num_combine_pieces(band), task);
    }

    void gate_up_piece(int worker, const Piece& piece) {
        RowBlock& block = blocks_[piece.block];
        gather_hidden(worker, block);
        multiply_gate_up(worker, piece);
        const std::atomic_ref left(block.left_of_h);
        if (left.fetch_sub(1, std::memory_order_acq_rel) > 2) return;
        if (stores_h_rows(kernel(block), layer_.problem) && !mode_is(ActivationScale::dynamic)) {
            if (mode_is(ActivationScale::dynamic_token)) scale_h(block);
            load_h(worker, block);
        }
        count_down(left);
    }

    void gather_hidden(int worker, const RowBlock& block) {
        GatherTask gather{.rows = reinterpret_cast<const std::uint8_t*>(in_.hidden),
                          .index = row_token_ + block.first_row,
                          .cols = hidden_size_,
                          .num_rows = block.num_rows,
                          .panel = at<std::uint8_t>(worker, layout_.worker_panel)};
        if (encodes_tokens(kernel(block)))
            gather.rows = encoded_tokens(static_cast<std::size_t>(block.kernel));
        if (encodes_blocks(kernel(block))) {
            gather.rows = encoded_block(block);
            gather.index = nullptr;
        }
        kernel(block).gather_rows(gather);
    }

    void multiply_gate_up(int worker, const Piece& piece) {
        const RowBlock& block = blocks_[piece.block];
        const PreparedExpert& expert = this->expert(block);
        auto* gate_scale = at<float>(worker, layout_.worker_scales);
        float* up_scale = gate_scale + kMaxBlockRows;
        for (std::int64_t r = 0; r < block.num_rows; ++r) {
            const float input_scale = moe::has_expert_scales(layer_.problem)
                                          ? expert.input_scale
                                          : token_scale_[row_token_[block.first_row + r]];
            gate_scale[r] = product(input_scale, expert.gate_scale);
            up_scale[r] = product(input_scale, expert.up_scale);
        }
        const bool stores_rows = stores_h_rows(kernel(block), layer_.problem);
        const std::int64_t tile = kernel(block).gate_up_tile;
        kernel(block).gate_up({.expert = &expert.data,
                               .panel = at<std::uint8_t>(worker, layout_.worker_panel),
                               .gate_scale = gate_scale,
                               .up_scale = up_scale,
                               .input_scale = h_scale_ + block.first_row,
                               .num_rows = block.num_rows,
                               .hidden_size = hidden_size_,
                               .intermediate_size = intermediate_size_,
                               .first = piece.first * tile,
                               .last = std::min(intermediate_size_, piece.last * tile),
                               .h_panel = stores_rows ? nullptr : h_panel(block),
                               .h_rows = stores_rows ? h_rows(block) : nullptr,
                               .scratch = at<std::uint8_t>(worker, layout_.worker_scratch)});
    }

    /// A2 of every row.
    void scale_h(const RowBlock& block) {
        scale_by_largest(h_rows(block), intermediate_size_, 0, block.num_rows, h_scale_ + block.first_row);
    }

    /// Encodes and gathers h where gate_up left it as bf16 rows.
    void load_h(int worker, const RowBlock& block) {
        GatherTask gather{.rows = reinterpret_cast<const std::uint8_t*>(h_rows(block)),
                          .index = nullptr,
                          .cols = intermediate_size_,
                          .num_rows = block.num_rows,
                          .panel = h_panel(block)};
        if (kernel(block).encode_rows != nullptr) {
            auto* encoded = at<std::uint8_t>(worker, layout_.worker_panel);
            kernel(block).encode_rows({.values = h_rows(block),
                                       .index = nullptr,
                                       .input_scale = h_scale_ + block.first_row,
                                       .cols = intermediate_size_,
                                       .first = 0,
                                       .last = block.num_rows,
                                       .rows = encoded});
            gather.rows = encoded;
        }
        kernel(block).gather_rows(gather);
    }

    void load_h_by_largest() {
        for_each_block([&](int, const RowBlock& block) { scale_h(block); });
        spread_largest(h_scale_, num_rows());
        for_each_block([&](int worker, const RowBlock& block) { load_h(worker, block); });
    }

    std::int64_t band_width() const {
        const std::int64_t row_bytes = std::max<std::int64_t>(1, num_rows()) * 4;
        const std::int64_t fitting = static_cast<std::int64_t>(layout_.y_bytes) / row_bytes;
        const std::int64_t widest = divide_up(hidden_size_, layout_.band_unit) * layout_.band_unit;
        return std::min(fitting / layout_.band_unit * layout_.band_unit, widest);
    }
    Band band_from(std::int64_t first) const {
        return {first, std::min(hidden_size_, first + band_width()), band_width()};
    }

    void down_piece(int worker, const Piece& piece, const Band& band) {
        const RowBlock& block = blocks_[piece.block];
        auto* scale = at<float>(worker, layout_.worker_scales);
        for (std::int64_t r = 0; r < block.num_rows; ++r)
            scale[r] = product(h_scale_[block.first_row + r], expert(block).down_scale);
        const std::int64_t first = piece.first * std::int64_t{kernel(block).down_tile};
        const std::int64_t last = piece.last * std::int64_t{kernel(block).down_tile};
        kernel(block).down({.expert = &expert(block).data,
                            .panel = h_panel(block),
                            .scale = scale,
                            .num_rows = block.num_rows,
                            .hidden_size = hidden_size_,
                            .intermediate_size = intermediate_size_,
                            .first = band.first + first,
                            .last = std::min(band.last, band.first + last),
                            .y = at<float>(layout_.y) + block.first_row * band.y_stride + first,
                            .y_stride = band.y_stride,
                            .past_caches = num_rows() * band.y_stride * 4 > kMostCachedYBytes,
                            .scratch = at<std::uint8_t>(worker, layout_.worker_scratch)});
    }

    static constexpr std::int64_t kCombineTokens = 8;  // of a piece

    std::int64_t num_combine_pieces(const Band& band, std::int64_t cols) const {
        return divide_up(in_.num_tokens, kCombineTokens) * divide_up(band.last - band.first, cols);
    }
    std::int64_t num_combine_pieces(const Band& band) const {
        return num_combine_pieces(band, combine_cols(band));
    }
    /// Hardware fetches long rows ahead; but everybody should have a piece.
    std::int64_t combine_cols(const Band& band) const {
        return num_combine_pieces(band, 1024) >= kSharesPerWorker * workers_.count() ? 1024 : 256;
    }

    void combine_piece(std::int64_t i, const Band& band) {
        const std::int64_t num_cols = band.last - band.first;
        const std::int64_t piece_cols = combine_cols(band);
        const std::int64_t pieces_per_row = divide_up(num_cols, piece_cols);
        const std::int64_t token = i / pieces_per_row * kCombineTokens;
        const std::int64_t col = i % pieces_per_row * piece_cols;
        const std::int64_t out = token * hidden_size_ + band.first + col;
        layer_.kernels.front()->combine(
            {.y = at<float>(layout_.y) + col,
             .y_stride = band.y_stride,
             .slot_row = slot_row_ + token * layer_.top_k,
             .weight = in_.top_k_weights + token * layer_.top_k,
             .num_tokens = std::min(kCombineTokens, in_.num_tokens - token),
             .top_k = layer_.top_k,
             .cols = std::min(piece_cols, num_cols - col),
             .out_f32 = in_.output_f32 == nullptr ? nullptr : in_.output_f32 + out,
             .out_bf16 = in_.output_bf16 == nullptr ? nullptr : in_.output_bf16 + out,
             .out_stride = hidden_size_});
    }

    /// Of a tile: its decoding, worth about so many rows, and its rows.
    static std::int64_t cost(const RowBlock& block) { return block.num_rows + 8; }

    /// Into pieces that cover num_tiles(block) tiles of every block, each a share of the work that is left:
    /// long streams first, and little to wait for at the end.
    template <class NumTiles, class FewestTiles>
    std::span<const Piece> divide_tiles(const NumTiles& num_tiles, const FewestTiles& fewest_tiles,
                                        Piece* pieces) const {
        std::int64_t left = 0;
        for (std::int64_t b = 0; b < num_blocks_; ++b) left += num_tiles(blocks_[b]) * cost(blocks_[b]);
        const std::int64_t fair_share = left / workers_.count();
        const std::int64_t num_shares = kSharesPerWorker * workers_.count();
        std::size_t count = 0;
        for (std::int64_t b = 0; b < num_blocks_; ++b) {
            // Divisions of a token's 200 pieces are 1 % of a small layer: one each.
            const std::int64_t cost = this->cost(blocks_[b]);
            const std::int64_t num_tiles_here = num_tiles(blocks_[b]);
            const std::int64_t fewest = std::min(fewest_tiles(blocks_[b]), fair_share / cost);
            for (std::int64_t tile = 0; tile < num_tiles_here;) {
                const std::int64_t size = std::max(fewest, divide_up(left, num_shares * cost));
                const std::int64_t last = std::min(num_tiles_here, tile + size);
                assert(static_cast<std::int64_t>(count) < layout_.max_pieces);
                pieces[count++] = {static_cast<std::int32_t>(b), static_cast<std::int32_t>(tile),
                                   static_cast<std::int32_t>(last)};
                left -= (last - tile) * cost;
                tile = last;
            }
        }
        return {pieces, count};
    }

    /// task(worker, block) for every block.
    template <class Task>
    void for_each_block(const Task& task) {
        workers_.for_each(num_blocks_, [&](int worker, std::int64_t b) { task(worker, blocks_[b]); });
    }

    /// task(first, last) for ranges of tokens or rows that cover [0, count).
    template <class Task>
    void for_each_range(std::int64_t count, const Task& task) {
        const std::int64_t size =
            std::clamp<std::int64_t>(count / (std::int64_t{4} * workers_.count()), 1, 16);
        workers_.for_each(divide_up(count, size),
                          [&](int, std::int64_t i) { task(i * size, std::min(count, (i + 1) * size)); });
    }

    const PreparedLayer& layer_;
    const WorkspaceLayout& layout_;
    const Workers& workers_;
    const ForwardInput& in_;
    const std::int64_t hidden_size_, intermediate_size_;
    std::int32_t* const row_begin_;  // [num_held + 1]
    std::int32_t* const row_token_;  // [rows]
    std::int32_t* const slot_row_;   // [num_tokens, top_k]
    float* const token_scale_;       // [num_tokens]
    float* const h_scale_;           // [rows]
    RowBlock* const blocks_;         // [num_blocks_]
    std::int64_t num_blocks_ = 0;
};

}  // namespace

void forward(const PreparedLayer& layer, const ForwardInput& input) { Forward(layer, input).run(); }

}  // namespace moe4::cpu
