#pragma once
// The AMX kernels as templates over Machine, the few instructions they are made of: amx.cpp gives the real
// ones, tests/emulated/amx_machine.hpp plain C++ with the same bits for machines without AMX.
//
// Weights are decoded to exact bf16 tiles of w * 2^-112, activations carry 2^112 and are arranged in the same
// pairs (k, k + 4). tdpbf16ps adds to every sum two chains of multiply-adds from zero, one over the first of
// each pair and one over the second:
//   w4a4   over 16 columns both chains and their sum are exact, so a block's exact contribution is added
//          with one rounding: the contract's order.
//   w4a16  over 32 columns, for twice the speed; the order is the instruction's own (SumOrder::two_chains).
//          A row that holds values of 2^15 or more is scaled down by a power of two that its sums get back.
//          A row alone takes no tiles: their decoding would cost more than multiply-adds with the same bits.
#include "backends/cpu/packed_layout.hpp"

namespace moe4::cpu {
namespace {

constexpr std::int64_t kBlock = kNvfp4BlockSize;
constexpr std::int64_t kTileRows = 16;                          // of a sum tile: activation rows
constexpr std::int64_t kCellCols = 32;                          // 64 bytes of an activation row
constexpr std::int64_t kMaxStepChunks = 4;                      // decoded at a time
constexpr std::int64_t kMaxGroups = kMaxBlockRows / kTileRows;  // that share a decoded step
constexpr std::int64_t kPanelBytes = 1024 << 10;                // of them: within the second cache
constexpr std::int64_t kDecodedBlockBytes = kPackedHalfRows * kBlock * 2;
constexpr std::int64_t kDecodedBytes = 2 * kDecodedBlockBytes * kPackedChunkBlocks;  // of a chunk
constexpr std::int64_t kMaxRowCols = 8192;  // of a row that is multiplied without tiles
constexpr float kActivationFactor = 0x1p112F;

constexpr std::int64_t smaller(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
constexpr std::int64_t divide_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

/// How the activations of an expert lie: equal groups of at most 16 rows, in a group the cells of all its
/// rows for 32 columns one below the other, as a tile is loaded. Behind them a factor for the sums of each
/// row.
struct Panel {
    std::int64_t num_rows, num_cells, num_groups, group_rows;

    Panel(std::int64_t rows, std::int64_t cols)
        : num_rows(rows),
          num_cells(divide_up(cols, kCellCols)),
          num_groups(divide_up(rows, kTileRows)),
          group_rows(divide_up(rows, num_groups)) {}

    std::size_t bytes() const {
        return static_cast<std::size_t>(num_groups * kTileRows * (num_cells * 64 + 4));
    }
    std::size_t group_bytes() const { return static_cast<std::size_t>(group_rows * num_cells) * 64; }
    std::size_t cell_step() const { return static_cast<std::size_t>(group_rows) * 64; }

    /// A row's first cell; those of the following columns are cell_step() apart.
    std::uint8_t* first_cell(std::uint8_t* panel, std::int64_t row) const {
        return panel + static_cast<std::size_t>(row / group_rows) * group_bytes() + row % group_rows * 64;
    }
    /// 16 columns of a row: half a cell.
    std::uint16_t* block(std::uint8_t* first_cell, std::int64_t block) const {
        return reinterpret_cast<std::uint16_t*>(first_cell +
                                                static_cast<std::size_t>(block / 2) * cell_step()) +
               block % 2 * kBlock;
    }
    float* factor(std::uint8_t* panel, std::int64_t row) const {
        return reinterpret_cast<float*>(panel + static_cast<std::size_t>(num_groups) * group_bytes()) + row;
    }
};

/// Position of a block's columns in the tiles.
constexpr std::uint16_t kPairOrder[kBlock] = {0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15};

struct W4a4 {
    static constexpr int kTileCols = 16;
    static constexpr std::int64_t kBlocksPerTile = 1;
    static constexpr bool kIsScaled = false;
    static constexpr bool kRowsAloneByMultiplyAdds = false;  // rows this few are another kernel's
    static float sum_factor(const Panel&, const std::uint8_t*, std::int64_t) { return 1.0F; }
};
struct W4a16 {
    static constexpr int kTileCols = 32;
    static constexpr std::int64_t kBlocksPerTile = 2;
    static constexpr bool kIsScaled = true;
    static constexpr bool kRowsAloneByMultiplyAdds = true;
    static float sum_factor(const Panel& panel, const std::uint8_t* data, std::int64_t row) {
        return *panel.factor(const_cast<std::uint8_t*>(data), row);
    }
};

/// 16 rows x 16 columns as bf16 bits of w * 2^-112: as fp16 the code's value is 2^8 times itself and the
/// scale 2^-8; their product is exact and normal, and its bits moved by three read 2^-112 of it as bf16.
template <class Machine>
[[gnu::always_inline]] inline void decode_block(const PackedHalf& half, std::uint64_t block,
                                                std::uint8_t* out) {
    const auto scales = Machine::expand_scales(half.scale[block]);
    const auto decode_eight_columns = [&](std::uint64_t i, std::uint8_t* to) __attribute__((always_inline)) {
        const auto codes = Machine::load(half.codes[i]);
        Machine::store(to, Machine::template decode<0>(codes, scales));
        Machine::store(to + 64, Machine::template decode<1>(codes, scales));
        Machine::store(to + 128, Machine::template decode<2>(codes, scales));
        Machine::store(to + 192, Machine::template decode<3>(codes, scales));
    };
    decode_eight_columns(2 * block, out);
    decode_eight_columns(2 * block + 1, out + 256);
}

/// Chunks that are decoded a few blocks at a time, between the tile instructions that multiply others: the
/// tiles leave the vector units idle, and a core does not look far enough ahead to mix two long stretches.
/// Weight tiles lie in the order of their use: for every kBlocksPerTile blocks the first half, the second.
template <class Machine, class Mode, class Tiles>
class Decoding {
public:
    /// Chunks [first, first + count) of the tile at `row`, which may be rearranged in `scratch` before.
    Decoding(const Tiles& tiles, std::int64_t row, std::int64_t first, std::int64_t count,
             PackedChunk* scratch, std::uint8_t* out)
        : tiles_(tiles),
          row_(row),
          first_block_(first * kPackedChunkBlocks),
          chunks_(tiles.chunks(row, first, count, scratch)),
          out_(out),
          num_blocks_(static_cast<std::uint64_t>(2 * kPackedChunkBlocks * count)) {}

    std::int64_t num_left() const { return static_cast<std::int64_t>(num_blocks_ - next_); }

    template <int kCount>
    [[gnu::always_inline]] void decode() {
#pragma GCC unroll 4
        for (int i = 0; i < kCount; ++i, ++next_) {
            constexpr std::uint64_t kTogether = Mode::kBlocksPerTile;
            const std::uint64_t block = next_ / (2 * kTogether) * kTogether + next_ % kTogether;
            const PackedHalf& half = chunks_[block / kPackedChunkBlocks].half[next_ / kTogether % 2];
            if (next_ % 2 == 0)
                tiles_.fetch_ahead(row_, first_block_ + static_cast<std::int64_t>(next_ / 2), 1);
            decode_block<Machine>(half, block % kPackedChunkBlocks, out_ + next_ * kDecodedBlockBytes);
        }
    }
    void finish() {
        while (num_left() > 0) decode<1>();
    }

private:
    const Tiles& tiles_;
    std::int64_t row_, first_block_;
    const PackedChunk* chunks_;
    std::uint8_t* out_;
    std::uint64_t num_blocks_, next_ = 0;  // of a half
};

/// Tiles of columns [first, last) of a group of rows: tiles 0 and 1 are its sums with the two halves, 2 its
/// activations, 3 the weights. kDecodes blocks of `next` are decoded with each, while a load is under way:
/// behind the second product they would hold back the loads that follow it.
///
/// No more tiles than these: the two hyperthreads of a core share what tiles are renamed to, and each tile
/// that holds something takes one away. With 8 of them loads wait for each other and the tile unit idles half
/// of the time, with 5 a tenth.
template <class Machine, class Mode, int kDecodes, class Tiles>
void multiply_tiles(const std::uint8_t* cells, std::size_t cell_step, const std::uint8_t* decoded,
                    std::int64_t first, std::int64_t last, Decoding<Machine, Mode, Tiles>& next) {
    constexpr std::int64_t kTilesPerCell = 2 / Mode::kBlocksPerTile;
    constexpr std::int64_t kWeightBytes = Mode::kBlocksPerTile * kDecodedBlockBytes;
    for (std::int64_t i = first; i < last; ++i) {
        const std::uint8_t* x =
            cells + static_cast<std::size_t>(i / kTilesPerCell) * cell_step + i % kTilesPerCell * 32;
        const std::uint8_t* w = decoded + i * 2 * kWeightBytes;
        Machine::template load_tile<2>(x, 64);
        next.template decode<kDecodes - kDecodes / 2>();
        Machine::template load_tile<3>(w, 64);
        Machine::template multiply_add<0, 2, 3>();
        Machine::template load_tile<3>(w + kWeightBytes, 64);
        next.template decode<kDecodes / 2>();
        Machine::template multiply_add<1, 2, 3>();
    }
}

/// A group's sums: [half][row][weight row].
using GroupSums = float[2][kTileRows][kPackedHalfRows];

struct Scratch {
    alignas(64) float row[kMaxRowCols];  // of a row alone
    alignas(64) std::uint8_t decoded[2][kMaxStepChunks * kDecodedBytes];
    alignas(64) PackedChunk packed[kMaxStepChunks];  // of InPlaceTiles
    alignas(64) GroupSums sums[kMaxGroups];
};

inline std::size_t scratch_bytes(std::int64_t, std::int64_t, std::int64_t) { return sizeof(Scratch); }

/// Sums of some groups of rows times every tile of weights in turn. A tile is walked in steps of chunks:
/// while one is multiplied, the next, which may be the next tile's first, is decoded into the other buffer.
template <class Machine, class Mode, class Tiles>
class TileWalk {
public:
    TileWalk(const Tiles& tiles, std::int64_t first_row, std::int64_t last_row, std::int64_t cols,
             const Panel& panel, const std::uint8_t* rows, std::int64_t num_groups, Scratch& scratch)
        : tiles_(tiles),
          first_row_(first_row),
          last_row_(last_row),
          num_blocks_(cols / kBlock),
          num_chunks_(divide_up(cols, kPackedChunkCols)),
          panel_(panel),
          rows_(rows),
          num_groups_(num_groups),
          step_(num_groups <= 3 ? 2 : kMaxStepChunks),
          scratch_(scratch) {}

    /// use(row) when the scratch holds the sums of the tile that starts there.
    template <class Use>
    void run(const Use& use) {
        int buffer = 0;
        decoding(first_row_, 0, buffer).finish();
        for (std::int64_t row = first_row_; row < last_row_; row += tiles_.tile_rows) {
            for (std::int64_t chunk = 0; chunk < num_chunks_; chunk += step_, buffer = 1 - buffer) {
                auto next = ends_tile(chunk) ? decoding(row + tiles_.tile_rows, 0, 1 - buffer)
                                             : decoding(row, chunk + step_, 1 - buffer);
                for (std::int64_t group = 0; group < num_groups_; ++group)
                    multiply(group, chunk, buffer, next);
                next.finish();
            }
            use(row);
        }
    }

private:
    bool ends_tile(std::int64_t chunk) const { return chunk + step_ >= num_chunks_; }

    Decoding<Machine, Mode, Tiles> decoding(std::int64_t row, std::int64_t chunk, int buffer) const {
        const std::int64_t count = row < last_row_ ? smaller(step_, num_chunks_ - chunk) : 0;
        return {tiles_, row, chunk, count, scratch_.packed, scratch_.decoded[buffer]};
    }

    void multiply(std::int64_t group, std::int64_t chunk, int buffer, Decoding<Machine, Mode, Tiles>& next) {
        const bool keeps_sums = num_groups_ == 1;  // in their tiles, from the first step to the last
        GroupSums& sums = scratch_.sums[group];
        if (chunk == 0) {
            Machine::template clear_tile<0>();
            Machine::template clear_tile<1>();
        } else if (!keeps_sums) {
            Machine::template load_tile<0>(sums[0], 64);
            Machine::template load_tile<1>(sums[1], 64);
        }
        multiply_step(group, chunk, buffer, next);
        if (ends_tile(chunk) || !keeps_sums) {
            Machine::template store_tile<0>(sums[0], 64);
            Machine::template store_tile<1>(sums[1], 64);
        }
    }

    void multiply_step(std::int64_t group, std::int64_t chunk, int buffer,
                       Decoding<Machine, Mode, Tiles>& next) {
        const std::int64_t block = chunk * kPackedChunkBlocks;
        const std::int64_t num_tiles =
            divide_up(smaller(step_ * kPackedChunkBlocks, num_blocks_ - block), Mode::kBlocksPerTile);
        const std::uint8_t* cells = rows_ + static_cast<std::size_t>(group) * panel_.group_bytes() +
                                    static_cast<std::size_t>(block / 2) * panel_.cell_step();
        const auto multiply_and_decode = [&]<int kDecodes>() {
            const std::int64_t count = smaller(num_tiles, next.num_left() / kDecodes);
            multiply_tiles<Machine, Mode, kDecodes>(cells, panel_.cell_step(), scratch_.decoded[buffer], 0,
                                                    count, next);
            multiply_tiles<Machine, Mode, 0>(cells, panel_.cell_step(), scratch_.decoded[buffer], count,
                                             num_tiles, next);
        };
        // Decoding is spread over the groups that are left, so that neither unit waits for the other.
        const std::int64_t share = divide_up(next.num_left(), num_tiles * (num_groups_ - group));
        share <= 1   ? multiply_and_decode.template operator()<1>()
        : share == 2 ? multiply_and_decode.template operator()<2>()
                     : multiply_and_decode.template operator()<4>();
    }

    const Tiles& tiles_;
    std::int64_t first_row_, last_row_;
    std::int64_t num_blocks_, num_chunks_;
    const Panel& panel_;
    const std::uint8_t* rows_;
    std::int64_t num_groups_;
    std::int64_t step_;  // short: decoded weights stay in L1. Long: sums are seldom put aside
    Scratch& scratch_;
};

/// One row by multiply-adds with tdpbf16ps's bits.
template <class Machine, class Tiles, class Use>
void for_each_tile_of_row(const Tiles& tiles, std::int64_t first_row, std::int64_t last_row,
                          const std::uint8_t* panel, Scratch& scratch, const Use& use) {
    const std::int64_t num_blocks = tiles.cols / kBlock;
    const std::int64_t num_chunks = divide_up(tiles.cols, kPackedChunkCols);
    for (std::int64_t b = 0; b < num_blocks; ++b)
        Machine::expand_block(reinterpret_cast<const std::uint16_t*>(panel) + b * kBlock,
                              scratch.row + b * kBlock);
    float* const sums[2] = {scratch.sums[0][0][0], scratch.sums[0][1][0]};
    for (std::int64_t row = first_row; row < last_row; row += tiles.tile_rows) {
        for (float* sum : sums) __builtin_memset(sum, 0, kPackedHalfRows * sizeof(float));
        for (std::int64_t chunk = 0; chunk < num_chunks; chunk += kMaxStepChunks) {
            const std::int64_t count = smaller(kMaxStepChunks, num_chunks - chunk);
            Machine::multiply_row(tiles, row, chunk, tiles.chunks(row, chunk, count, scratch.packed),
                                  scratch.row, num_blocks, sums);
        }
        use(scratch.sums, 0, 1, row);
    }
}

/// Sums of all rows times the tiles in [first_row, last_row) in turn. Calls use(sums, first_group,
/// num_groups, row) for the tile that starts at `row`.
template <class Machine, class Mode, class Tiles, class Use>
void for_each_tile(const Tiles& tiles, std::int64_t first_row, std::int64_t last_row,
                   const std::uint8_t* panel_data, const Panel& panel, Scratch& scratch, const Use& use) {
    if constexpr (Mode::kRowsAloneByMultiplyAdds) {
        if (panel.num_rows == 1 && tiles.cols <= kMaxRowCols)
            return for_each_tile_of_row<Machine>(tiles, first_row, last_row, panel_data, scratch, use);
    }
    const auto fitting = kPanelBytes / static_cast<std::int64_t>(panel.group_bytes());
    const std::int64_t num_walks =
        divide_up(panel.num_groups, fitting < 2 ? 2 : smaller(fitting, kMaxGroups));
    const std::int64_t max_groups = divide_up(panel.num_groups, num_walks);
    Machine::configure_tiles(static_cast<int>(panel.group_rows), Mode::kTileCols);
    for (std::int64_t group = 0; group < panel.num_groups; group += max_groups) {
        const std::int64_t num_groups = smaller(max_groups, panel.num_groups - group);
        TileWalk<Machine, Mode, Tiles> walk(
            tiles, first_row, last_row, tiles.cols, panel,
            panel_data + static_cast<std::size_t>(group) * panel.group_bytes(), num_groups, scratch);
        walk.run([&](std::int64_t row) { use(scratch.sums, group, num_groups, row); });
    }
    Machine::release_tiles();
}

/// use_group(first row, number of rows, sums) for some groups.
template <class UseGroup>
void for_each_group(const GroupSums* sums, std::int64_t first_group, std::int64_t num_groups,
                    const Panel& panel, const UseGroup& use_group) {
    for (std::int64_t g = 0; g < num_groups; ++g) {
        const std::int64_t row = (first_group + g) * panel.group_rows;
        if (row < panel.num_rows) use_group(row, smaller(panel.group_rows, panel.num_rows - row), sums[g]);
    }
}

template <class Machine, class Mode, class Tiles>
void gate_up(const GateUpTask& task) {
    Tiles tiles;
    set_tiles(tiles, task);
    const Panel panel(task.num_rows, task.hidden_size);
    const Panel h_panel(task.num_rows, task.intermediate_size);
    const auto store_h = [&](std::int64_t first_row, std::int64_t count, const GroupSums& sums,
                             std::int64_t i) {
        typename Machine::Block h[kTileRows];
        for (std::int64_t r = 0; r < count; ++r) {
            const std::int64_t row = first_row + r;
            h[r] = Machine::activate(sums[0][r], sums[1][r], Mode::sum_factor(panel, task.panel, row),
                                     task.gate_scale[row], task.up_scale[row]);
            if (task.h_rows != nullptr)
                Machine::store_bf16(h[r], task.h_rows + row * task.intermediate_size + i);
        }
        if (task.h_rows == nullptr) {
            Machine::quantize(h, static_cast<int>(count), task.input_scale + first_row,
                              h_panel.block(h_panel.first_cell(task.h_panel, first_row), i / kBlock),
                              kCellCols);
        }
    };
    for_each_tile<Machine, Mode>(
        tiles, task.first, task.last, task.panel, panel, *reinterpret_cast<Scratch*>(task.scratch),
        [&](const GroupSums* sums, std::int64_t first_group, std::int64_t num_groups, std::int64_t i) {
            for_each_group(sums, first_group, num_groups, panel,
                           [&](std::int64_t row, std::int64_t count, const GroupSums& group) {
                               store_h(row, count, group, i);
                           });
        });
}

template <class Machine, class Mode, class Tiles>
void down(const DownTask& task) {
    Tiles tiles;
    set_tiles(tiles, task);
    const Panel panel(task.num_rows, task.intermediate_size);
    const auto store_y = [&](std::int64_t first_row, std::int64_t count, const GroupSums& sums,
                             std::int64_t c) {
        for (std::int64_t r = 0; r < count; ++r) {
            const std::int64_t row = first_row + r;
            const float factor = Mode::sum_factor(panel, task.panel, row);
            float* y = task.y + row * task.y_stride + c;
            Machine::store_scaled(sums[0][r], sums[1][r], factor, task.scale[row], task.past_caches, y);
        }
    };
    for_each_tile<Machine, Mode>(
        tiles, task.first, task.last, task.panel, panel, *reinterpret_cast<Scratch*>(task.scratch),
        [&](const GroupSums* sums, std::int64_t first_group, std::int64_t num_groups, std::int64_t c) {
            for_each_group(sums, first_group, num_groups, panel,
                           [&](std::int64_t row, std::int64_t count, const GroupSums& group) {
                               store_y(row, count, group, c - task.first);
                           });
        });
    if (task.past_caches) Machine::end_stores();
}

/// The power of two that a row of bf16 values is multiplied by, so that the largest that is finite stays
/// below 2^127.
inline float row_factor(const std::uint16_t* values, std::int64_t cols) {
    constexpr std::int16_t kInfinity = 0x7F80;
    constexpr std::uint32_t kLargestExponent = 127 + 14;  // of what may be multiplied by 2^112
    std::int16_t largest = 0;                             // signed, for which gcc knows vectors
    for (std::int64_t k = 0; k < cols; ++k) {
        const auto magnitude = static_cast<std::int16_t>(values[k] & 0x7FFF);
        const std::int16_t finite = magnitude < kInfinity ? magnitude : std::int16_t{0};
        largest = finite > largest ? finite : largest;
    }
    const auto exponent = static_cast<std::uint32_t>(largest >> 7);
    const std::uint32_t excess = exponent > kLargestExponent ? exponent - kLargestExponent : 0;
    return __builtin_bit_cast(float, (127U + 112U - excess) << 23);
}

/// An encoded row is the bf16 values in the order of the tiles; behind them, for w4a16, the factor of its
/// sums.
template <class Mode>
std::size_t encoded_bytes(std::int64_t cols) {
    return static_cast<std::size_t>(cols) * 2 + (Mode::kIsScaled ? 64 : 0);
}

template <class Machine>
void quantize_row(const std::uint16_t* values, std::int64_t cols, float input_scale, std::uint16_t* out) {
    float input_scales[kTileRows];
    for (float& scale : input_scales) scale = input_scale;
    for (std::int64_t k = 0; k < cols; k += kTileRows * kBlock) {
        typename Machine::Block blocks[kTileRows];
        const std::int64_t count = smaller(kTileRows, (cols - k) / kBlock);
        for (std::int64_t b = 0; b < count; ++b) blocks[b] = Machine::load_bf16(values + k + b * kBlock);
        Machine::quantize(blocks, static_cast<int>(count), input_scales, out + k, kBlock);
    }
}

template <class Machine>
void scale_row(const std::uint16_t* values, std::int64_t cols, std::uint16_t* out) {
    const float factor = row_factor(values, cols);
    for (std::int64_t k = 0; k < cols; k += kBlock) Machine::scale_block(values + k, factor, out + k);
    const float sum_factor = kActivationFactor / factor;
    __builtin_memcpy(out + cols, &sum_factor, sizeof(sum_factor));
}

template <class Machine, class Mode>
void encode_rows(const EncodeTask& task) {
    for (std::int64_t r = task.first; r < task.last; ++r) {
        const std::int64_t source = task.index != nullptr ? task.index[r] : r;
        const std::uint16_t* values = task.values + source * task.cols;
        auto* row = reinterpret_cast<std::uint16_t*>(task.rows + static_cast<std::size_t>(r) *
                                                                     encoded_bytes<Mode>(task.cols));
        if constexpr (Mode::kIsScaled) {
            scale_row<Machine>(values, task.cols, row);
        } else {
            quantize_row<Machine>(values, task.cols, task.input_scale[r], row);
        }
    }
}

template <class Machine, class Mode>
void gather_rows(const GatherTask& task) {
    const Panel panel(task.num_rows, task.cols);
    const std::int64_t num_blocks = task.cols / kBlock;
    for (std::int64_t r = 0; r < task.num_rows; ++r) {
        const std::int64_t source = task.index != nullptr ? task.index[r] : r;
        const auto* row = reinterpret_cast<const std::uint16_t*>(
            task.rows + static_cast<std::size_t>(source) * encoded_bytes<Mode>(task.cols));
        std::uint8_t* cells = panel.first_cell(task.panel, r);
        for (std::int64_t b = 0; b < num_blocks; ++b)
            Machine::copy_block(row + b * kBlock, panel.block(cells, b));
        if constexpr (Mode::kIsScaled) {
            __builtin_memcpy(panel.factor(task.panel, r), row + task.cols, sizeof(float));
            if (num_blocks % 2 != 0)
                __builtin_memset(panel.block(cells, num_blocks), 0, kBlock * sizeof(std::uint16_t));
        }
    }
}

inline std::size_t panel_bytes(std::int64_t num_rows, std::int64_t cols) {
    return Panel(num_rows, cols).bytes();
}

/// What the machine's file completes: name, needs and combine.
template <class Machine, class Mode, class Tiles>
constexpr Kernel make_amx_kernel(const PackedLayout* layout) {
    constexpr bool kIsW4a4 = Mode::kBlocksPerTile == 1;
    return {.name = nullptr,
            .needs = 0,
            .precision = kIsW4a4 ? Precision::w4a4 : Precision::w4a16,
            .layout = layout,
            .min_rows = !kIsW4a4            ? 1
                        : layout != nullptr ? 7
                                            : 9,
            .encodes_h = kIsW4a4,  // w4a16 needs a row's largest h first
            .encoded_bytes = encoded_bytes<Mode>,
            .encode_rows = encode_rows<Machine, Mode>,
            .rows_per_group = kTileRows,
            .panel_bytes = panel_bytes,
            .gather_rows = gather_rows<Machine, Mode>,
            .gate_up_tile = kPackedHalfRows,
            .down_tile = kPackedTileRows,
            .scratch_bytes = scratch_bytes,
            .gate_up = gate_up<Machine, Mode, Tiles>,
            .down = down<Machine, Mode, Tiles>,
            .combine = nullptr,
            .order = kIsW4a4 ? moe::SumOrder{} : moe::SumOrder{moe::SumOrder::two_chains, 4},
            .peak = kIsW4a4 ? "amx_bf16_k16" : "amx_bf16_k32"};
}

}  // namespace
}  // namespace moe4::cpu
