#pragma once
// Tokens as the block-scaled GEMMs of other engines and GPUs read them (cuBLASLt, CUTLASS, FlashInfer): rows
// grouped by expert, as codes and as block scales in the 128x4-blocked layout of nvfp4.hpp, where each
// expert's rows begin at a multiple of 128. moe4's own layers do not need it.
#include <cstdint>

#include "moe4/backend.hpp"
#include "moe4/tensor.hpp"

namespace moe4 {

/// Rows that the scales may take: known without the counts.
std::int64_t max_padded_rows(std::int64_t max_rows, std::int64_t num_experts);

/// All on one device; max_rows is the length of row_token. Indices are not checked.
struct GroupedTokens {
    TensorView hidden;        // bf16 [num_tokens, hidden_size], hidden_size a multiple of 16
    TensorView row_token;     // i32 [max_rows]: which token a row is, from 0
    TensorView row_expert;    // i32 [max_rows]: whose row it is, from 0, ascending
    TensorView num_rows;      // i32 [1], at most max_rows; what lies behind them is not read
    TensorView expert_scale;  // f32 [num_experts], 1 to 1024 experts: the global scale A of each
};

struct BlockScaledRows {
    MutableTensorView codes;             // u8 [max_rows, hidden_size / 2], the even column in the low nibble
    MutableTensorView scales;            // u8 [swizzled_scale_bytes(max_padded_rows(..), hidden_size / 16)]
    MutableTensorView first_padded_row;  // i32 [num_experts + 1]: where an expert's scales begin, and the end
};

/// Quantises each row with its expert's A as NUMERICS.md says, the same bits on every device. Scales of
/// padding up to the end of the last expert are zeroed. On a GPU two kernels, no wait, no allocation: a graph
/// can hold it. Throws invalid_argument naming the tensor, unsupported where moe4 has no CUDA, machine where
/// a device fails.
void quantize_grouped_tokens(const GroupedTokens&, const BlockScaledRows&, Stream = {});

}  // namespace moe4
