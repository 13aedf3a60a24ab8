#pragma once
// The weights as the vector kernels read them: one sequential stream of 4.5 bits a weight, whose rows become
// vector lanes. It is the checkpoint's bytes in another order. Nothing is defined inline, because files
// compiled for an instruction set include it (see kernel.hpp).
//
//   gate_up  tile t is 16 gate and 16 up rows of the same intermediates [16 t, 16 t + 16)
//   down     tile t is the down rows [32 t, 32 t + 32)
//   A tile is ceil(cols / 64) chunks one after the other, tiles follow each other without a gap. Rows and
//   columns that the matrix does not have are zero codes under zero scales.
//
// The 4 bytes of codes[i][row] are the 8 columns 8 i .. 8 i + 7 of the chunk as the checkpoint holds them:
//   by byte    low nibbles are the columns 0 2 4 6, high nibbles 1 3 5 7: a lane of vpdpbusd takes four
//   by 16 bits the nibbles j of the two halves are the columns (j, j + 4): a pair of a bf16 dot product
#include <cstdint>

#include "backends/cpu/kernels/kernel.hpp"

namespace moe4::cpu {

inline constexpr int kPackedHalfRows = 16;
inline constexpr int kPackedTileRows = 32;
inline constexpr int kPackedChunkCols = 64;
inline constexpr int kPackedChunkBlocks = kPackedChunkCols / kNvfp4BlockSize;

struct PackedHalf {
    std::uint8_t scale[kPackedChunkBlocks][kPackedHalfRows];       // e4m3
    std::uint8_t codes[kPackedChunkCols / 8][kPackedHalfRows][4];  // e2m1
};

/// 32 rows x 64 columns.
struct PackedChunk {
    PackedHalf half[2];  // gate and up, or down rows 0-15 and 16-31
};
static_assert(sizeof(PackedChunk) == kPackedTileRows * kPackedChunkCols * 9 / 16);

std::size_t packed_gate_up_bytes(std::int64_t intermediate_size, std::int64_t hidden_size);
std::size_t packed_down_bytes(std::int64_t hidden_size, std::int64_t intermediate_size);

/// The same bytes, packed with the instructions of the kernels that name it: kernels/avx512_layout.cpp needs
/// AVX-512 F, BW and VL, kernels/avx2_layout.cpp AVX2.
extern const PackedLayout kPackedLayout, kAvx2PackedLayout;

}  // namespace moe4::cpu
