#include "backends/cpu/packed_layout.hpp"

namespace moe4::cpu {

namespace {

std::size_t packed_bytes(std::int64_t num_tiles, std::int64_t cols) {
    const std::int64_t num_chunks = (cols + kPackedChunkCols - 1) / kPackedChunkCols;
    return static_cast<std::size_t>(num_tiles * num_chunks) * sizeof(PackedChunk);
}

}  // namespace

std::size_t packed_gate_up_bytes(std::int64_t intermediate_size, std::int64_t hidden_size) {
    return packed_bytes(intermediate_size / kPackedHalfRows, hidden_size);
}

std::size_t packed_down_bytes(std::int64_t hidden_size, std::int64_t intermediate_size) {
    return packed_bytes((hidden_size + kPackedTileRows - 1) / kPackedTileRows, intermediate_size);
}

}  // namespace moe4::cpu
