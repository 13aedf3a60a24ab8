// Packs weights: every kernel that reads the packed layout needs AVX-512, so its instructions are there to
// make it.
#include "backends/cpu/kernels/avx512_in_place.hpp"

namespace moe4::cpu {
namespace {

std::int64_t num_chunks(std::int64_t cols) { return (cols + kPackedChunkCols - 1) / kPackedChunkCols; }

std::size_t packed_bytes(std::int64_t num_tiles, std::int64_t cols) {
    return static_cast<std::size_t>(num_tiles * num_chunks(cols)) * sizeof(PackedChunk);
}

void pack(const InPlaceTiles& tiles, std::int64_t num_rows, std::uint8_t* out) {
    auto* tile = reinterpret_cast<PackedChunk*>(out);
    const std::int64_t count = num_chunks(tiles.cols);
    for (std::int64_t row = 0; row < num_rows; row += tiles.tile_rows, tile += count) {
        for (std::int64_t chunk = 0; chunk < count; chunk += 2) {
            constexpr std::int64_t kBlocks = std::int64_t{2} * kPackedChunkBlocks;
            for (std::int64_t block = 0; block < kBlocks; ++block)
                tiles.fetch_ahead(row, chunk * kPackedChunkBlocks + block, 1);
            if (chunk + 1 < count) {
                tiles.chunks(row, chunk, 2, tile + chunk);
            } else {
                alignas(64) PackedChunk pair[2];
                tile[chunk] = *tiles.chunks(row, chunk, 2, pair);
            }
        }
    }
}

std::size_t gate_up_bytes(std::int64_t intermediate_size, std::int64_t hidden_size) {
    return packed_bytes(intermediate_size / kPackedHalfRows, hidden_size);
}

std::size_t down_bytes(std::int64_t hidden_size, std::int64_t intermediate_size) {
    return packed_bytes((hidden_size + kPackedTileRows - 1) / kPackedTileRows, intermediate_size);
}

void pack_gate_up(const Nvfp4View& gate, const Nvfp4View& up, std::uint8_t* out) {
    pack(gate_up_tiles(gate, up), gate.rows, out);
}

void pack_down(const Nvfp4View& down, std::uint8_t* out) { pack(down_tiles(down), down.rows, out); }

}  // namespace

const PackedLayout kPackedLayout = {.name = "tiles of 32 rows",
                                    .gate_up_bytes = gate_up_bytes,
                                    .down_bytes = down_bytes,
                                    .pack_gate_up = pack_gate_up,
                                    .pack_down = pack_down};

}  // namespace moe4::cpu
