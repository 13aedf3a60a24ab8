#pragma once
// Tiles of the packed layout, which are used where they lie. Anonymous as avx512_vector.hpp says.
#include "backends/cpu/kernels/avx512_vector.hpp"
#include "backends/cpu/packed_layout.hpp"

namespace moe4::cpu {
namespace {

constexpr int kPrefetchAhead = 4096;  // bytes

inline std::int64_t num_chunks(std::int64_t cols) { return (cols + kPackedChunkCols - 1) / kPackedChunkCols; }

/// Tiles that lie packed in memory, one after the other.
struct PackedTiles {
    const std::uint8_t* packed;
    std::int64_t cols;
    std::int64_t tile_rows;      // that `row` counts: 16 intermediates or 32 columns of y
    std::int64_t bytes_per_row;  // of these

    static constexpr std::int64_t kBlockBytes = sizeof(PackedChunk) / kPackedChunkBlocks;
    static constexpr std::int64_t kLinesPerBlock = kBlockBytes / 64 + 1;
    static constexpr std::int64_t kLinesToFetch = kLinesPerBlock;  // a block, while others are multiplied

    std::int64_t tile_bytes() const { return tile_rows * bytes_per_row; }
    const std::uint8_t* tile(std::int64_t row) const { return packed + row * bytes_per_row; }
    const PackedChunk* chunks(std::int64_t row, std::int64_t first, std::int64_t /*count*/,
                              PackedChunk* /*scratch*/) const {
        return reinterpret_cast<const PackedChunk*>(tile(row)) + first;
    }
    /// What follows the tile's end is the next one that is not read at the same time.
    [[gnu::always_inline]] void fetch_ahead(std::int64_t row, std::int64_t block,
                                            std::int64_t tiles_at_once) const {
        std::int64_t ahead = block * kBlockBytes + kPrefetchAhead;
        if (ahead >= tile_bytes()) ahead += (tiles_at_once - 1) * tile_bytes();
        prefetch(tile(row) + ahead, kLinesPerBlock);
    }
};

inline PackedTiles packed_tiles(const std::uint8_t* packed, std::int64_t cols, std::int64_t tile_rows) {
    return {packed, cols, tile_rows,
            num_chunks(cols) * static_cast<std::int64_t>(sizeof(PackedChunk)) / tile_rows};
}

/// The tiles of the two GEMMs.
inline void set_tiles(PackedTiles& tiles, const GateUpTask& task) {
    tiles = packed_tiles(task.expert->packed_gate_up, task.hidden_size, kPackedHalfRows);
}
inline void set_tiles(PackedTiles& tiles, const DownTask& task) {
    tiles = packed_tiles(task.expert->packed_down, task.intermediate_size, kPackedTileRows);
}

}  // namespace
}  // namespace moe4::cpu
