// Packs weights with the instructions of the AVX2 kernels, for machines where these are the best.
#include "backends/cpu/kernels/avx2_tiles.hpp"

namespace moe4::cpu {
namespace {

using avx2::InPlaceTiles;

/// Past the caches, where it would only displace others.
void stream(const PackedChunk& chunk, PackedChunk& out) {
    const auto* from = reinterpret_cast<const __m256i*>(&chunk);
    auto* to = reinterpret_cast<__m256i*>(&out);
    for (std::size_t i = 0; i < sizeof(PackedChunk) / sizeof(__m256i); ++i)
        _mm256_stream_si256(to + i, _mm256_load_si256(from + i));
}

void pack(const InPlaceTiles& tiles, std::uint8_t* out) {
    auto* packed = reinterpret_cast<PackedChunk*>(out);
    const Nvfp4View& matrix = tiles.matrix[0];
    const std::int64_t num_chunks = (matrix.cols + kPackedChunkCols - 1) / kPackedChunkCols;
    for (std::int64_t tile = 0; tile * tiles.tile_rows < matrix.rows; ++tile) {
        for (std::int64_t chunk = 0; chunk < num_chunks; ++chunk) {
            alignas(64) PackedChunk scratch;
            stream(tiles.chunk(tile, chunk, scratch), *packed++);
        }
    }
    _mm_sfence();  // before another thread may read it
}

void pack_gate_up(const Nvfp4View& gate, const Nvfp4View& up, std::uint8_t* out) {
    pack(InPlaceTiles(gate, up), out);
}

void pack_down(const Nvfp4View& down, std::uint8_t* out) { pack(InPlaceTiles(down), out); }

}  // namespace

const PackedLayout kAvx2PackedLayout = {.name = "tiles of 32 rows",
                                        .gate_up_bytes = packed_gate_up_bytes,
                                        .down_bytes = packed_down_bytes,
                                        .pack_gate_up = pack_gate_up,
                                        .pack_down = pack_down};

}  // namespace moe4::cpu
