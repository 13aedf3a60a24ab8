#pragma once
// What a CPU kernel is: facts as data, and a few functions on plain structs. No kernel owns memory, waits or
// throws. A file of kernels is compiled for its instruction set alone, so nothing of the standard library may
// be instantiated in it: the linker could give that copy to the whole program (tests/isa_isolation.cmake).
#include <cstddef>
#include <cstdint>

#include "backends/cpu/isa.hpp"
#include "moe/reference.hpp"
#include "moe4/backend.hpp"

namespace moe4::cpu {

/// Rows of one expert that a kernel multiplies at once: bounds its scratch.
inline constexpr std::int64_t kMaxBlockRows = 256;

/// An expert's weights as a kernel reads them: the three views where it reads the checkpoint in place, the
/// two pointers where it has a PackedLayout. Global scales are in the tasks, never in here.
struct ExpertData {
    Nvfp4View gate;  // [intermediate_size, hidden_size]
    Nvfp4View up;    // [intermediate_size, hidden_size]
    Nvfp4View down;  // [hidden_size, intermediate_size]
    const std::uint8_t* packed_gate_up = nullptr;
    const std::uint8_t* packed_down = nullptr;
};

/// Weights rearranged once, at load. Kernels that point to the same layout can serve one layer together.
struct PackedLayout {
    const char* name;
    std::size_t (*gate_up_bytes)(std::int64_t intermediate_size, std::int64_t hidden_size);
    std::size_t (*down_bytes)(std::int64_t hidden_size, std::int64_t intermediate_size);
    // `out` is aligned to 64 bytes and need not be zeroed before.
    void (*pack_gate_up)(const Nvfp4View& gate, const Nvfp4View& up, std::uint8_t* out);
    void (*pack_down)(const Nvfp4View& down, std::uint8_t* out);
};

/// Encodes rows one by one, each with its own global scale:
///     rows[r] = encode(values[index[r]], input_scale[r]) for r in [first, last)
struct EncodeTask {
    const std::uint16_t* values;  // bf16 [*, cols]
    const std::int32_t* index;    // which row of values; null: row r itself
    const float* input_scale;     // A of every row (w4a4)
    std::int64_t cols;
    std::int64_t first, last;
    std::uint8_t* rows;  // row r at r * encoded_bytes(cols)
};

/// Arranges encoded rows (bf16 rows where the kernel encodes nothing) as the GEMM reads them:
///     panel[r] = rows[index[r]]
struct GatherTask {
    const std::uint8_t* rows;
    const std::int32_t* index;  // null: row r itself
    std::int64_t cols;
    std::int64_t num_rows;
    std::uint8_t* panel;  // panel_bytes(num_rows, cols), aligned to 64 bytes
};

/// A block of an expert's rows, at most kMaxBlockRows, intermediates [first, last):
///     g = gate_scale[r] * (panel[r] . gate[i])   u = up_scale[r] * (panel[r] . up[i])   h = bf16(act(g, u))
struct GateUpTask {
    const ExpertData* expert;
    const std::uint8_t* panel;  // cols = hidden_size
    const float* gate_scale;    // [num_rows], f32(A1 * G_gate); w4a16: G_gate
    const float* up_scale;      // [num_rows]
    const float* input_scale;   // [num_rows] A2 (w4a4)
    std::int64_t num_rows, hidden_size, intermediate_size;
    std::int64_t first, last;  // multiples of gate_up_tile, or last is intermediate_size
    // Where h goes: into the panel that `down` reads, encoded with input_scale, or, where h_rows is given
    // (A2 depends on all of h, or the kernel says encodes_h = false), as plain bf16 rows.
    std::uint8_t* h_panel;
    std::uint16_t* h_rows;  // [num_rows, intermediate_size]
    std::uint8_t* scratch;  // scratch_bytes, aligned to 64, this task's alone
};

/// The same block, output columns [first, last):  y[r, c] = scale[r] * (panel[r] . down[c])
struct DownTask {
    const ExpertData* expert;
    const std::uint8_t* panel;  // cols = intermediate_size
    const float* scale;         // [num_rows], f32(A2 * G_down); w4a16: G_down
    std::int64_t num_rows, hidden_size, intermediate_size;
    std::int64_t first, last;  // multiples of down_tile, or last is hidden_size
    float* y;                  // row r at y + r * y_stride, column first at 0; aligned to 64
    std::int64_t y_stride;     // floats, a multiple of 32 and of down_tile: whole tiles may be written
    bool past_caches;          // y is larger than they are; a kernel need not care
    std::uint8_t* scratch;
};

/// out[t, c] = sum over slots j in order of fma(weight[t, j], y[slot_row[t, j], c]), from +0
struct CombineTask {
    const float* y;
    std::int64_t y_stride;
    const std::int32_t* slot_row;  // [num_tokens, top_k]; -1: the slot adds nothing, whatever its weight
    const float* weight;           // [num_tokens, top_k]
    std::int64_t num_tokens;
    int top_k;
    std::int64_t cols;        // to write
    float* out_f32;           // token t at t * out_stride; null where bf16 is wanted
    std::uint16_t* out_bf16;  // rounded once, to nearest even
    std::int64_t out_stride;  // elements
};

struct Kernel {
    const char* name;  // <isa>_<precision>, _in_place where it reads the checkpoint so
    IsaSet needs;      // what it executes
    Precision precision;
    const PackedLayout* layout;  // null: reads the checkpoint in place
    int min_rows;    // rows an expert needs for this kernel to be the fastest; it computes any number
    bool encodes_h;  // gate_up can write h_panel when every row's A2 is known beforehand

    // Activations. cols is a multiple of 16.
    std::size_t (*encoded_bytes)(std::int64_t cols);  // of one row
    void (*encode_rows)(const EncodeTask&);           // null: the encoded row is the bf16 row
    int rows_per_group;
    // At most ceil(num_rows / rows_per_group) times that of one group.
    std::size_t (*panel_bytes)(std::int64_t num_rows, std::int64_t cols);
    void (*gather_rows)(const GatherTask&);

    // The two GEMMs.
    int gate_up_tile;  // intermediates, a multiple of 16
    int down_tile;     // output columns, a multiple of 16
    std::size_t (*scratch_bytes)(std::int64_t max_rows, std::int64_t hidden_size,
                                 std::int64_t intermediate_size);  // a worker; max_rows of a block
    void (*gate_up)(const GateUpTask&);
    void (*down)(const DownTask&);
    void (*combine)(const CombineTask&);

    moe::SumOrder order = {};  // of w4a16, one for all kernels of a layer; w4a4 has one alone

    // The bound of its arithmetic: this share of one instruction's peak (instruction_peaks.hpp). AMD and
    // Intel differ in which ports the conversions share. Null: not stated.
    const char* peak = nullptr;
    double peak_share_amd = 1.0, peak_share_intel = 1.0;
};

}  // namespace moe4::cpu
