#pragma once
// What the two GEMMs of a layer take, whichever kernel runs them.
#include <cuda.h>

#include <cstdint>

#include "backends/cuda/smxx/arrange.hpp"
#include "moe4/moe.hpp"

namespace moe4::cuda {

/// One GEMM over the rows of all experts: out[row, i] = scale * sum over k of rows[row, k] * weight[expert,
/// i, k]. gate_up multiplies by two matrices and stores activation(gate, up) as 16-bit rows for the next
/// GEMM; down stores fp32. All pointers are device memory.
struct GroupedGemm {
    const std::int32_t* num_segments;
    const Segment* segments;
    const std::uint16_t* rows;       // 16-bit, permuted, [.., row_stride]
    std::int64_t row_stride;         // elements
    const std::int32_t* row_source;  // which of `rows` a grouped row is; nullptr: itself
    std::int32_t num_chunks;         // of kChunk k
    std::int32_t out_size;           // intermediate_size for gate_up, hidden_size for down
    const float* factor[2];          // [experts held] A * G of gate and up, or of down
    const double* global_scale[2];   // [experts held] G
    const float* row_scale;          // A where it belongs to a row; nullptr: factor holds it
    const std::int32_t* scale_row;   // index into row_scale of a grouped row; nullptr: itself
    void* out;                       // gate_up: 16-bit [rows, out_stride], permuted; down: f32
    std::int64_t out_stride;         // elements
    const float* out_scale;          // [experts held] A2: gate_up quantises h to fp16; nullptr: h stays bf16
    Activation activation;
};

/// A matrix stack on the device by the tensor maps that a tile shape needs: see prepared_layer.cpp.
struct WeightMaps {
    CUtensorMap codes;
    CUtensorMap scales;
};

}  // namespace moe4::cuda
