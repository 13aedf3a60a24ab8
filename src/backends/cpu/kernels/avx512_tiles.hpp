#pragma once
// The AVX-512 kernels but for their arithmetic: panels of activations, the walk over the packed tiles, h and
// y. Up to 8 rows decode the weights in registers, more share a decoded piece of the tile in L1.
//
// A Mode offers
//   EncodedBlock                          16 activations of one row as they are multiplied
//   EncodedRow                            what a row consists of before it is gathered, 16 activations each
//   encode(const EncodedRow&)             -> EncodedBlock, for the panel
//   encode(bf16 block, input_scale)       -> EncodedBlock, of h
//   PackedRows(const PackedHalf&, block)  a block of 16 weight rows, decoded where it is used
//   DecodedRows(PackedRows)               the same, decoded for L1
//   kDecodedBlocks                        how many of these, two halves each, fit there
//   add_block<kRows>(w, x, sum)           sum[half][r] += x[r] . w[half], block by block
#include "backends/cpu/kernels/packed_tiles.hpp"

namespace moe4::cpu {
namespace {

constexpr int kGroupRows = 8;  // two halves of a tile times 8 rows are 16 of 32 registers
constexpr std::int64_t kMaxGroups = kMaxBlockRows / kGroupRows;  // that share a decoded piece

inline std::int64_t num_blocks(std::int64_t cols) { return cols / kNvfp4BlockSize; }
inline std::int64_t smaller(std::int64_t a, std::int64_t b) { return a < b ? a : b; }

/// Panel: groups of 8 rows (the last one of fewer), within a group block by block, within a block row by row.
struct Group {
    std::int64_t first_row;
    std::int64_t num_rows;
};

inline Group group_of(std::int64_t group, std::int64_t num_rows) {
    const std::int64_t first = group * kGroupRows;
    return {first, smaller(kGroupRows, num_rows - first)};
}

/// Where block b of the group's row r lies in a panel.
inline std::int64_t block_index(const Group& group, std::int64_t cols, std::int64_t b, std::int64_t r) {
    return group.first_row * num_blocks(cols) + b * group.num_rows + r;
}

template <class Mode>
std::size_t panel_bytes(std::int64_t num_rows, std::int64_t cols) {
    return static_cast<std::size_t>(num_rows * num_blocks(cols)) * sizeof(typename Mode::EncodedBlock);
}

template <class Mode>
void gather_rows(const GatherTask& task) {
    const std::int64_t blocks = num_blocks(task.cols);
    for (std::int64_t r = 0; r < task.num_rows; ++r) {
        const std::int64_t source = task.index != nullptr ? task.index[r] : r;
        const auto* row = reinterpret_cast<const typename Mode::EncodedRow*>(task.rows) + source * blocks;
        const Group group = group_of(r / kGroupRows, task.num_rows);
        auto* out = reinterpret_cast<typename Mode::EncodedBlock*>(task.panel) +
                    block_index(group, task.cols, 0, r - group.first_row);
        for (std::int64_t b = 0; b < blocks; ++b) out[b * group.num_rows] = Mode::encode(row[b]);
    }
}

/// The sums of up to 8 rows times the 32 rows of a tile.
struct GroupSums {
    __m512 half[2][kGroupRows];
};

template <class Mode>
struct Scratch {
    static constexpr int kChunks = Mode::kDecodedBlocks / kPackedChunkBlocks;
    PackedChunk packed[2][kChunks];  // of InPlaceTiles
    typename Mode::DecodedRows decoded[Mode::kDecodedBlocks][2];
    GroupSums sums[kMaxGroups];
};

template <class Mode>
std::size_t scratch_bytes(std::int64_t, std::int64_t, std::int64_t) {
    return sizeof(Scratch<Mode>);
}

/// Weights that are decoded where they are used; meanwhile those that come next are fetched.
template <class Mode, class Tiles>
struct PackedWeights {
    const PackedChunk* chunks;
    const Tiles& tiles;
    std::int64_t row, first_block;
    std::int64_t tiles_at_once = 1;

    typename Mode::PackedRows load(std::int64_t block, int half) const {
        return {chunks[block / kPackedChunkBlocks].half[half], block % kPackedChunkBlocks};
    }
    [[gnu::always_inline]] void fetch_ahead(std::int64_t block) const {
        tiles.fetch_ahead(row, first_block + block, tiles_at_once);
    }
};

/// Weights that lie decoded in L1.
template <class Mode>
struct DecodedWeights {
    const typename Mode::DecodedRows (*blocks)[2];
    const std::uint8_t* next;  // to fetch meanwhile
    std::int64_t next_lines;   // a block

    const typename Mode::DecodedRows& load(std::int64_t block, int half) const { return blocks[block][half]; }
    [[gnu::always_inline]] void fetch_ahead(std::int64_t block) const {
        prefetch(next + block * next_lines * 64, next_lines);
    }
};

/// sums[half][r] += row r of x times the weights, block by block.
template <class Mode, int kRows, class Weights>
void accumulate(const Weights& weights, const typename Mode::EncodedBlock* x, std::int64_t count,
                GroupSums& sums) {
    __m512 sum[2][kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
        sum[0][r] = sums.half[0][r];
        sum[1][r] = sums.half[1][r];
    }
    for (std::int64_t block = 0; block < count; ++block, x += kRows) {
        weights.fetch_ahead(block);
        Mode::template add_block<kRows>(weights.load(block, 0), weights.load(block, 1), x, sum);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
        sums.half[0][r] = sum[0][r];
        sums.half[1][r] = sum[1][r];
    }
}

template <class Mode, class Weights>
void accumulate_rows(std::int64_t num_rows, const Weights& weights, const typename Mode::EncodedBlock* x,
                     std::int64_t count, GroupSums& sums) {
    switch (num_rows) {
        case 1:
            return accumulate<Mode, 1>(weights, x, count, sums);
        case 2:
            return accumulate<Mode, 2>(weights, x, count, sums);
        case 3:
            return accumulate<Mode, 3>(weights, x, count, sums);
        case 4:
            return accumulate<Mode, 4>(weights, x, count, sums);
        case 5:
            return accumulate<Mode, 5>(weights, x, count, sums);
        case 6:
            return accumulate<Mode, 6>(weights, x, count, sums);
        case 7:
            return accumulate<Mode, 7>(weights, x, count, sums);
        default:
            return accumulate<Mode, 8>(weights, x, count, sums);
    }
}

/// The groups of a panel, which share decoded weights.
template <class Mode>
struct Groups {
    const typename Mode::EncodedBlock* panel;
    std::int64_t cols, num_rows;

    std::int64_t count() const { return (num_rows + kGroupRows - 1) / kGroupRows; }
    Group operator[](std::int64_t g) const { return group_of(g, num_rows); }
    const typename Mode::EncodedBlock* blocks(const Group& group, std::int64_t b) const {
        return panel + block_index(group, cols, b, 0);
    }
};

/// sums[g] += the group's blocks times the tile's, which are decoded once for all.
template <class Mode, class Tiles>
void multiply_decoded(const PackedWeights<Mode, Tiles>& weights, const Groups<Mode>& groups,
                      std::int64_t count, Scratch<Mode>& scratch) {
    for (std::int64_t b = 0; b < count; ++b) {
        if constexpr (Tiles::kLinesToFetch == 0) weights.fetch_ahead(b);
        for (int half = 0; half < 2; ++half) scratch.decoded[b][half] = weights.load(b, half);
    }
    // The piece that follows in memory, spread over the groups.
    const auto* next = reinterpret_cast<const std::uint8_t*>(weights.chunks + Scratch<Mode>::kChunks);
    const std::int64_t next_lines = (Tiles::kLinesToFetch + groups.count() - 1) / groups.count();
    for (std::int64_t g = 0; g < groups.count(); ++g, next += count * next_lines * 64) {
        const Group group = groups[g];
        accumulate_rows<Mode>(group.num_rows, DecodedWeights<Mode>{scratch.decoded, next, next_lines},
                              groups.blocks(group, weights.first_block), count, scratch.sums[g]);
    }
}

/// The piece of the tile at `row` that starts at block `first`.
template <class Mode, class Tiles>
PackedWeights<Mode, Tiles> piece(const Tiles& tiles, std::int64_t row, std::int64_t first, std::int64_t count,
                                 PackedChunk* scratch, std::int64_t tiles_at_once) {
    return {tiles.chunks(row, first / kPackedChunkBlocks, num_chunks(count * kNvfp4BlockSize), scratch),
            tiles, row, first, tiles_at_once};
}

/// scratch.sums = the groups times all columns of the tile that starts at `row`.
template <class Mode, class Tiles>
void multiply_tile(const Tiles& tiles, std::int64_t row, const Groups<Mode>& groups, Scratch<Mode>& scratch) {
    const std::int64_t blocks = num_blocks(groups.cols);
    __builtin_memset(scratch.sums, 0, static_cast<std::size_t>(groups.count()) * sizeof(GroupSums));
    for (std::int64_t first = 0; first < blocks; first += Mode::kDecodedBlocks) {
        const std::int64_t count = smaller(Mode::kDecodedBlocks, blocks - first);
        const auto weights = piece<Mode>(tiles, row, first, count, scratch.packed[0], 1);
        if (groups.count() == 1) {
            const Group group = groups[0];
            accumulate_rows<Mode>(group.num_rows, weights, groups.blocks(group, first), count,
                                  scratch.sums[0]);
        } else {
            multiply_decoded(weights, groups, count, scratch);
        }
    }
}

/// sums[0] and sums[1] = one row times the tiles that start at `row` and tile_rows later: a tile alone has
/// too few sums in flight for a kernel whose additions follow each other at every column.
template <class Mode, class Tiles>
void multiply_row(const Tiles& tiles, std::int64_t row, const typename Mode::EncodedBlock* x,
                  std::int64_t cols, Scratch<Mode>& scratch) {
    const std::int64_t blocks = num_blocks(cols);
    __m512 sum[4];
#pragma GCC unroll 4
    for (__m512& s : sum) s = _mm512_setzero_ps();
    for (std::int64_t first = 0; first < blocks; first += Mode::kDecodedBlocks) {
        const std::int64_t count = smaller(Mode::kDecodedBlocks, blocks - first);
        const auto weights0 = piece<Mode>(tiles, row, first, count, scratch.packed[0], 2);
        const auto weights1 = piece<Mode>(tiles, row + tiles.tile_rows, first, count, scratch.packed[1], 2);
        for (std::int64_t b = 0; b < count; ++b) {
            weights0.fetch_ahead(b);
            weights1.fetch_ahead(b);
            const typename Mode::PackedRows w[4] = {weights0.load(b, 0), weights0.load(b, 1),
                                                    weights1.load(b, 0), weights1.load(b, 1)};
            Mode::add_row(w, x[first + b], sum);
        }
    }
    for (int i = 0; i < 4; ++i) scratch.sums[i / 2].half[i % 2][0] = sum[i];
}

/// store(sums, group, row) for every group of the panel and every tile in [first, last), which starts at row.
template <class Mode, class Tiles, class Store>
void for_each_tile(const Tiles& tiles, const std::uint8_t* panel, std::int64_t num_rows, std::int64_t first,
                   std::int64_t last, Scratch<Mode>& scratch, const Store& store) {
    const Groups<Mode> groups{reinterpret_cast<const typename Mode::EncodedBlock*>(panel), tiles.cols,
                              num_rows};
    std::int64_t row = first;
    if constexpr (Mode::kRunsOneRowOnTwoTiles) {
        for (; num_rows == 1 && row + tiles.tile_rows < last; row += 2 * tiles.tile_rows) {
            multiply_row<Mode>(tiles, row, groups.panel, tiles.cols, scratch);
            store(scratch.sums[0], groups[0], row);
            store(scratch.sums[1], groups[0], row + tiles.tile_rows);
        }
    }
    for (; row < last; row += tiles.tile_rows) {
        multiply_tile<Mode>(tiles, row, groups, scratch);
        for (std::int64_t g = 0; g < groups.count(); ++g) store(scratch.sums[g], groups[g], row);
    }
}

/// Intermediates [i, i + 16) of one row: one block of h.
template <class Mode>
void store_h(const GateUpTask& task, const Group& group, std::int64_t r, std::int64_t i, __m512 gate,
             __m512 up) {
    const std::int64_t row = group.first_row + r;
    const Lanes activated = moe::Silu::apply(Lanes::set(task.gate_scale[row]) * Lanes{gate},
                                             Lanes::set(task.up_scale[row]) * Lanes{up});
    const __m256i h = bf16_from_float(activated.value);
    if (task.h_rows != nullptr) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(task.h_rows + row * task.intermediate_size + i), h);
        return;
    }
    auto* panel = reinterpret_cast<typename Mode::EncodedBlock*>(task.h_panel);
    panel[block_index(group, task.intermediate_size, num_blocks(i), r)] =
        Mode::encode(h, task.input_scale[row]);
}

template <class Mode, class Tiles>
void gate_up(const GateUpTask& task) {
    Tiles tiles;
    set_tiles(tiles, task);
    for_each_tile(tiles, task.panel, task.num_rows, task.first, task.last,
                  *reinterpret_cast<Scratch<Mode>*>(task.scratch),
                  [&](const GroupSums& sums, const Group& group, std::int64_t i) {
                      for (std::int64_t r = 0; r < group.num_rows; ++r)
                          store_h<Mode>(task, group, r, i, sums.half[0][r], sums.half[1][r]);
                  });
}

/// Writes whole tiles: y has columns for them (y_stride).
template <class Mode, class Tiles>
void down(const DownTask& task) {
    Tiles tiles;
    set_tiles(tiles, task);
    for_each_tile(tiles, task.panel, task.num_rows, task.first, task.last,
                  *reinterpret_cast<Scratch<Mode>*>(task.scratch),
                  [&](const GroupSums& sums, const Group& group, std::int64_t c) {
                      for (std::int64_t r = 0; r < group.num_rows; ++r) {
                          const std::int64_t row = group.first_row + r;
                          const __m512 scale = _mm512_set1_ps(task.scale[row]);
                          float* y = task.y + row * task.y_stride + (c - task.first);
                          _mm512_store_ps(y, _mm512_mul_ps(scale, sums.half[0][r]));
                          _mm512_store_ps(y + kLanes, _mm512_mul_ps(scale, sums.half[1][r]));
                      }
                  });
}

/// What a kernel's own file completes: needs, the encoded rows and the peak.
template <class Mode, class Tiles>
constexpr Kernel make_kernel(const char* name, Precision precision, const PackedLayout* layout) {
    return {.name = name,
            .needs = 0,
            .precision = precision,
            .layout = layout,
            .min_rows = 1,
            .encodes_h = true,
            .encoded_bytes = nullptr,
            .encode_rows = nullptr,
            .rows_per_group = kGroupRows,
            .panel_bytes = panel_bytes<Mode>,
            .gather_rows = gather_rows<Mode>,
            .gate_up_tile = kPackedHalfRows,
            .down_tile = kPackedTileRows,
            .scratch_bytes = scratch_bytes<Mode>,
            .gate_up = gate_up<Mode, Tiles>,
            .down = down<Mode, Tiles>,
            .combine = combine};
}

}  // namespace
}  // namespace moe4::cpu
