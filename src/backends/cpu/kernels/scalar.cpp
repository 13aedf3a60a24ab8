// Plain C++ for any CPU, straight from the checkpoint's bytes. Both kernels need a fused multiply-add and
// have it without the instruction, because their products are exact and only the addition rounds:
//   w4a16  A weight w has 6 significant bits and a bf16 x has 8. While |x| < 2^116 the product lies between
//          2^-143 and 2^128: exact in a float. Rows with larger values take a double for it; its 14 bits and
//          the accumulator's 24 cannot round their double sum onto a tie between two floats.
//   w4a4   A block's integer dot has at most 12 bits and s_x * s_w has 8: 20 bits, exact in a float.
// A strip of 16 weight rows is decoded once, 256 columns at a time, for all rows of the expert.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "backends/cpu/kernels/kernel.hpp"
#include "format/bf16.hpp"
#include "format/e2m1.hpp"
#include "format/e4m3.hpp"
#include "format/quantize.hpp"
#include "moe/activations.hpp"
#include "moe/scalar_lane.hpp"

namespace moe4::cpu::scalar {
namespace {

constexpr std::int64_t kBlock = kNvfp4BlockSize;
constexpr std::int64_t kStrip = 16;        // weight rows decoded together: one block of h
constexpr std::int64_t kChunkBlocks = 16;  // blocks of K decoded together, so that a strip stays in L1
using Accumulator = float[kStrip];

struct DecodeTables {
    float e2m1[256][2]{};  // of a packed byte, the even column first
    float e4m3[256]{};
    constexpr DecodeTables() {
        for (int i = 0; i < 256; ++i) {
            const auto byte = static_cast<std::uint8_t>(i);
            e2m1[i][0] = format::e2m1_decode(byte & 15U);
            e2m1[i][1] = format::e2m1_decode(byte >> 4);
            e4m3[i] = format::e4m3_decode(byte);
        }
    }
};
constexpr DecodeTables kDecode;

/// Columns [first_block, first_block + num_blocks) * 16 of kStrip weight rows, a row in each lane.
struct Strip {
    float value[kChunkBlocks * kBlock][kStrip];
    float scale[kChunkBlocks][kStrip];
};

/// kFoldScales: value is the weight (without the global scale) and scale is not written; else value is the
/// code.
template <bool kFoldScales>
void decode(const Nvfp4View& matrix, std::int64_t row, std::int64_t first_block, std::int64_t num_blocks,
            Strip& strip) {
    for (std::int64_t lane = 0; lane < kStrip; ++lane) {
        const std::uint8_t* codes =
            matrix.packed + (row + lane) * matrix.packed_stride + first_block * kBlock / 2;
        const std::uint8_t* scales = matrix.block_scale + (row + lane) * matrix.scale_stride + first_block;
        for (std::int64_t block = 0; block < num_blocks; ++block) {
            const float scale = kDecode.e4m3[scales[block]];
            const float factor = kFoldScales ? scale : 1.0F;
            if constexpr (!kFoldScales) strip.scale[block][lane] = scale;
            for (std::int64_t k = block * kBlock; k < (block + 1) * kBlock; k += 2) {
                const auto& pair = kDecode.e2m1[codes[k / 2]];
                strip.value[k][lane] = factor * pair[0];
                strip.value[k + 1][lane] = factor * pair[1];
            }
        }
    }
}

/// bf16 activations. An encoded row is the bf16 row.
struct W4a16 {
    static constexpr bool kFoldScales = true;
    static std::size_t row_bytes(std::int64_t cols) { return static_cast<std::size_t>(cols) * 2; }

    static void store_block(const std::uint16_t h[kBlock], float /*input_scale*/, std::uint8_t* row,
                            std::int64_t /*cols*/, std::int64_t block) {
        std::copy_n(h, kBlock, reinterpret_cast<std::uint16_t*>(row) + block * kBlock);
    }

    static bool has_exact_products(const std::uint16_t* x, std::int64_t count) {
        constexpr std::uint16_t kLimit = (127 + 116) << 7;  // 2^116
        std::uint16_t largest = 0;
        for (std::int64_t k = 0; k < count; ++k) largest = std::max<std::uint16_t>(largest, x[k] & 0x7FFF);
        return largest < kLimit;
    }

    template <class Product>
    static void accumulate_as(const std::uint16_t* x, std::int64_t count, const Strip& strip,
                              Accumulator& sum) {
        float acc[kStrip];
        std::copy_n(sum, kStrip, acc);
        for (std::int64_t k = 0; k < count; ++k) {
            const Product x_k = format::bf16_to_float(x[k]);
            for (std::int64_t lane = 0; lane < kStrip; ++lane) {
                const Product product = x_k * static_cast<Product>(strip.value[k][lane]);
                acc[lane] = static_cast<float>(static_cast<Product>(acc[lane]) + product);
            }
        }
        std::copy_n(acc, kStrip, sum);
    }

    static void accumulate(const std::uint8_t* row, std::int64_t /*cols*/, std::int64_t first_block,
                           std::int64_t num_blocks, const Strip& strip, Accumulator& sum) {
        const auto* x = reinterpret_cast<const std::uint16_t*>(row) + first_block * kBlock;
        const std::int64_t count = num_blocks * kBlock;
        if (has_exact_products(x, count))
            accumulate_as<float>(x, count, strip, sum);
        else
            accumulate_as<double>(x, count, strip, sum);
    }
};

/// NVFP4 activations. An encoded row is the doubled codes [cols] i8, then half of every block's scale
/// [cols / 16] f32.
struct W4a4 {
    static constexpr bool kFoldScales = false;
    static std::size_t row_bytes(std::int64_t cols) {
        return static_cast<std::size_t>(cols + cols / kBlock * 4);
    }

    static void store_block(const std::uint16_t h[kBlock], float input_scale, std::uint8_t* row,
                            std::int64_t cols, std::int64_t block) {
        float values[kBlock];
        for (std::int64_t i = 0; i < kBlock; ++i) values[i] = format::bf16_to_float(h[i]);
        std::uint8_t codes[kBlock];
        const std::uint8_t scale = format::quantize_activation_block(values, input_scale, codes);
        auto* doubled = reinterpret_cast<std::int8_t*>(row) + block * kBlock;
        for (std::int64_t i = 0; i < kBlock; ++i)
            doubled[i] = static_cast<std::int8_t>(format::e2m1_doubled(codes[i]));
        reinterpret_cast<float*>(row + cols)[block] = 0.5F * kDecode.e4m3[scale];
    }

    static void accumulate(const std::uint8_t* row, std::int64_t cols, std::int64_t first_block,
                           std::int64_t num_blocks, const Strip& strip, Accumulator& sum) {
        const auto* codes = reinterpret_cast<const std::int8_t*>(row) + first_block * kBlock;
        const auto* half_scales = reinterpret_cast<const float*>(row + cols) + first_block;
        float acc[kStrip];
        std::copy_n(sum, kStrip, acc);
        for (std::int64_t block = 0; block < num_blocks; ++block) {
            float dot[kStrip] = {};
            for (std::int64_t k = block * kBlock; k < (block + 1) * kBlock; ++k) {
                const auto x_k = static_cast<float>(codes[k]);
                for (std::int64_t lane = 0; lane < kStrip; ++lane) dot[lane] += x_k * strip.value[k][lane];
            }
            for (std::int64_t lane = 0; lane < kStrip; ++lane)
                acc[lane] += half_scales[block] * strip.scale[block][lane] * dot[lane];
        }
        std::copy_n(acc, kStrip, sum);
    }
};

template <class Mode>
void encode_rows(const EncodeTask& task) {
    for (std::int64_t r = task.first; r < task.last; ++r) {
        const std::int64_t source = task.index != nullptr ? task.index[r] : r;
        std::uint8_t* row = task.rows + static_cast<std::size_t>(r) * Mode::row_bytes(task.cols);
        for (std::int64_t block = 0; block < task.cols / kBlock; ++block) {
            Mode::store_block(task.values + source * task.cols + block * kBlock, task.input_scale[r], row,
                              task.cols, block);
        }
    }
}

template <class Mode>
void gather_rows(const GatherTask& task) {
    const std::size_t bytes = Mode::row_bytes(task.cols);
    for (std::int64_t r = 0; r < task.num_rows; ++r) {
        const std::int64_t source = task.index != nullptr ? task.index[r] : r;
        std::memcpy(task.panel + static_cast<std::size_t>(r) * bytes,
                    task.rows + static_cast<std::size_t>(source) * bytes, bytes);
    }
}

template <class Mode>
std::size_t panel_bytes(std::int64_t num_rows, std::int64_t cols) {
    return static_cast<std::size_t>(num_rows) * Mode::row_bytes(cols);
}

struct Scratch {
    Strip strip;
    Accumulator gate[kMaxBlockRows];  // down uses this one
    Accumulator up[kMaxBlockRows];
};

std::size_t scratch_bytes(std::int64_t, std::int64_t, std::int64_t) { return sizeof(Scratch); }

/// sums[r] = panel[r] . (rows [row, row + 16) of the matrix)
template <class Mode>
void multiply_strip(const Nvfp4View& matrix, std::int64_t row, const std::uint8_t* panel,
                    std::int64_t num_rows, Strip& strip, Accumulator* sums) {
    std::memset(sums, 0, static_cast<std::size_t>(num_rows) * sizeof(Accumulator));
    const std::int64_t num_blocks = matrix.cols / kBlock;
    for (std::int64_t block = 0; block < num_blocks; block += kChunkBlocks) {
        const std::int64_t count = std::min(kChunkBlocks, num_blocks - block);
        decode<Mode::kFoldScales>(matrix, row, block, count, strip);
        for (std::int64_t r = 0; r < num_rows; ++r) {
            Mode::accumulate(panel + panel_bytes<Mode>(r, matrix.cols), matrix.cols, block, count, strip,
                             sums[r]);
        }
    }
}

/// Intermediates [i, i + 16) of row r: one block of h.
template <class Mode>
void store_h(const GateUpTask& task, std::int64_t r, std::int64_t i, const Accumulator& gate,
             const Accumulator& up) {
    using moe::ScalarLane;
    std::uint16_t h[kStrip];
    for (std::int64_t lane = 0; lane < kStrip; ++lane) {
        const ScalarLane activated = moe::Silu::apply(ScalarLane::set(task.gate_scale[r] * gate[lane]),
                                                      ScalarLane::set(task.up_scale[r] * up[lane]));
        h[lane] = format::bf16_from_float(activated.value);
    }
    if (task.h_rows != nullptr) {
        std::copy_n(h, kStrip, task.h_rows + r * task.intermediate_size + i);
    } else {
        std::uint8_t* row = task.h_panel + panel_bytes<Mode>(r, task.intermediate_size);
        Mode::store_block(h, task.input_scale[r], row, task.intermediate_size, i / kBlock);
    }
}

template <class Mode>
void gate_up(const GateUpTask& task) {
    auto& scratch = *reinterpret_cast<Scratch*>(task.scratch);
    for (std::int64_t i = task.first; i < task.last; i += kStrip) {
        multiply_strip<Mode>(task.expert->gate, i, task.panel, task.num_rows, scratch.strip, scratch.gate);
        multiply_strip<Mode>(task.expert->up, i, task.panel, task.num_rows, scratch.strip, scratch.up);
        for (std::int64_t r = 0; r < task.num_rows; ++r)
            store_h<Mode>(task, r, i, scratch.gate[r], scratch.up[r]);
    }
}

template <class Mode>
void down(const DownTask& task) {
    auto& scratch = *reinterpret_cast<Scratch*>(task.scratch);
    for (std::int64_t c = task.first; c < task.last; c += kStrip) {
        multiply_strip<Mode>(task.expert->down, c, task.panel, task.num_rows, scratch.strip, scratch.gate);
        for (std::int64_t r = 0; r < task.num_rows; ++r) {
            float* y = task.y + r * task.y_stride + (c - task.first);
            for (std::int64_t lane = 0; lane < kStrip; ++lane)
                y[lane] = task.scale[r] * scratch.gate[r][lane];
        }
    }
}

void combine(const CombineTask& task) {
    for (std::int64_t t = 0; t < task.num_tokens; ++t) {
        for (std::int64_t c = 0; c < task.cols; c += kStrip) {
            float out[kStrip] = {};
            for (std::int64_t slot = t * task.top_k; slot < (t + 1) * task.top_k; ++slot) {
                if (task.slot_row[slot] < 0) continue;
                const float* y = task.y + task.slot_row[slot] * task.y_stride + c;
                for (std::int64_t lane = 0; lane < kStrip; ++lane)
                    out[lane] = std::fma(task.weight[slot], y[lane], out[lane]);
            }
            const std::int64_t first = t * task.out_stride + c;
            if (task.out_f32 != nullptr) {
                std::memcpy(task.out_f32 + first, out, sizeof(out));
            } else {
                for (std::int64_t lane = 0; lane < kStrip; ++lane)
                    task.out_bf16[first + lane] = format::bf16_from_float(out[lane]);
            }
        }
    }
}

template <class Mode>
constexpr Kernel make_kernel(const char* name, Precision precision) {
    return {.name = name,
            .needs = 0,
            .precision = precision,
            .layout = nullptr,
            .min_rows = 1,
            .encodes_h = true,
            .encoded_bytes = Mode::row_bytes,
            .encode_rows = precision == Precision::w4a4 ? encode_rows<Mode> : nullptr,
            .rows_per_group = 1,
            .panel_bytes = panel_bytes<Mode>,
            .gather_rows = gather_rows<Mode>,
            .gate_up_tile = kStrip,
            .down_tile = kStrip,
            .scratch_bytes = scratch_bytes,
            .gate_up = gate_up<Mode>,
            .down = down<Mode>,
            .combine = combine};
}

}  // namespace

extern const Kernel kW4a16, kW4a4;
const Kernel kW4a16 = make_kernel<W4a16>("scalar_w4a16", Precision::w4a16);
const Kernel kW4a4 = make_kernel<W4a4>("scalar_w4a4", Precision::w4a4);

}  // namespace moe4::cpu::scalar
