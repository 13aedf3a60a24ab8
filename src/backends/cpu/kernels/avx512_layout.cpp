// Packs weights with the instructions that every kernel of AVX-512 and AMX needs as well.
#include "backends/cpu/kernels/avx512_in_place.hpp"

namespace moe4::cpu {
namespace {

/// Past the caches, where it would only displace others.
void stream(const PackedChunk& chunk, PackedChunk& out) {
    constexpr std::size_t kLine = sizeof(__m512i);
    const auto* from = reinterpret_cast<const std::uint8_t*>(&chunk);
    auto* to = reinterpret_cast<std::uint8_t*>(&out);
    for (std::size_t i = 0; i < sizeof(PackedChunk); i += kLine)
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), _mm512_load_si512(from + i));
}

void pack(const InPlaceTiles& tiles, std::int64_t num_rows, std::uint8_t* out) {
    auto* packed = reinterpret_cast<PackedChunk*>(out);
    const std::int64_t count = (tiles.cols + kPackedChunkCols - 1) / kPackedChunkCols;
    for (std::int64_t row = 0; row < num_rows; row += tiles.tile_rows) {
        for (std::int64_t chunk = 0; chunk < count; chunk += 2) {
            constexpr std::int64_t kBlocks = std::int64_t{2} * kPackedChunkBlocks;
            for (std::int64_t block = 0; block < kBlocks; ++block)
                tiles.fetch_ahead(row, chunk * kPackedChunkBlocks + block, 1);
            alignas(64) PackedChunk pair[2];
            tiles.chunks(row, chunk, 2, pair);
            stream(pair[0], *packed++);
            if (chunk + 1 < count) stream(pair[1], *packed++);
        }
    }
    _mm_sfence();  // before another thread may read it
}

void pack_gate_up(const Nvfp4View& gate, const Nvfp4View& up, std::uint8_t* out) {
    pack(gate_up_tiles(gate, up), gate.rows, out);
}

void pack_down(const Nvfp4View& down, std::uint8_t* out) { pack(down_tiles(down), down.rows, out); }

}  // namespace

const PackedLayout kPackedLayout = {.name = "tiles of 32 rows",
                                    .gate_up_bytes = packed_gate_up_bytes,
                                    .down_bytes = packed_down_bytes,
                                    .pack_gate_up = pack_gate_up,
                                    .pack_down = pack_down};

}  // namespace moe4::cpu
