// w4a4 with vpdpbusd. Weight rows are lanes: a code is the unsigned byte 12 + 2 e2m1, looked up by vpermb; an
// activation the signed byte 2 e2m1. A block's dot product starts at -12 times the sum of its activations, so
// it ends as the exact integer, and one fused multiply-add with s_x * s_w adds it to the row's sum.
#include "backends/cpu/kernels/avx512_in_place.hpp"
#include "backends/cpu/kernels/avx512_tiles.hpp"

namespace moe4::cpu::avx512_vnni {
namespace {

constexpr int kBias = 12;

/// Brings the product of two doubled codes, s_x and 2^-8 s_w to its value.
constexpr float kScaleFactor = 256.0F / 4.0F;

struct W4a4 {
    /// The codes are doubled, in the order that the nibbles of the packed weights have: columns 0 2 4 6,
    /// 1 3 5 7, 8 10 12 14, 9 11 13 15.
    struct EncodedBlock {
        std::int8_t code[kNvfp4BlockSize];
        std::int32_t start;  // -kBias * (sum of code)
        float scale;         // s_x * kScaleFactor
    };
    using EncodedRow = EncodedBlock;

    static EncodedBlock encode(const EncodedRow& block) { return block; }

    static EncodedBlock encode(__m256i bf16, float input_scale) {
        const QuantizedBlock block = quantize_block(bf16_to_float(bf16), input_scale);
        const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
        EncodedBlock out;
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out.code),
                         _mm_shuffle_epi8(_mm512_cvtepi32_epi8(block.doubled), order));
        out.start = -kBias * _mm512_reduce_add_epi32(block.doubled);
        out.scale = block.scale * kScaleFactor;
        return out;
    }

    /// Byte i looks up its low 4 bits; the 2 bits above them, of the neighbouring nibble, choose among
    /// copies.
    static __m512i lookup(__m512i nibbles) {
        constexpr char kB = kBias;
        const __m128i table = _mm_setr_epi8(kB, kB + 1, kB + 2, kB + 3, kB + 4, kB + 6, kB + 8, kB + 12,  //
                                            kB, kB - 1, kB - 2, kB - 3, kB - 4, kB - 6, kB - 8, kB - 12);
        return _mm512_permutexvar_epi8(nibbles, _mm512_broadcast_i32x4(table));
    }

    struct PackedRows {
        __m512i code[4];  // biased; lane = row, 4 columns
        __m512 scale;     // 2^-8 s_w
        PackedRows() = default;
        PackedRows(const PackedHalf& half, std::int64_t block) : scale(decode_scales(half.scale[block])) {
            const __m512i left = _mm512_load_si512(half.codes[2 * block]);
            const __m512i right = _mm512_load_si512(half.codes[2 * block + 1]);
            code[0] = lookup(left);
            code[1] = lookup(_mm512_srli_epi16(left, 4));
            code[2] = lookup(right);
            code[3] = lookup(_mm512_srli_epi16(right, 4));
        }
    };
    using DecodedRows = PackedRows;
    static constexpr int kDecodedBlocks = 32;  // 20 KB
    static constexpr bool kRunsOneRowOnTwoTiles = false;

    /// sum + s_x * s_w * (x . w)
    [[gnu::always_inline]] static inline __m512 add(const EncodedBlock& x, const DecodedRows& w, __m512 sum) {
        __m512i dot = _mm512_set1_epi32(x.start);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            std::int32_t four_codes;
            __builtin_memcpy(&four_codes, x.code + 4 * i, 4);
            dot = _mm512_dpbusd_epi32(dot, w.code[i], _mm512_set1_epi32(four_codes));
        }
        const __m512 scale = _mm512_mul_ps(w.scale, _mm512_set1_ps(x.scale));
        return _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), scale, sum);
    }

    template <int kRows>
    [[gnu::always_inline]] static inline void add_block(const DecodedRows& w0, const DecodedRows& w1,
                                                        const EncodedBlock* x, __m512 (&sum)[2][kRows]) {
        const DecodedRows half0 = w0;
        const DecodedRows half1 = w1;
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
            sum[0][r] = add(x[r], half0, sum[0][r]);
            sum[1][r] = add(x[r], half1, sum[1][r]);
        }
    }
};

std::size_t encoded_bytes(std::int64_t cols) {
    return static_cast<std::size_t>(num_blocks(cols)) * sizeof(W4a4::EncodedRow);
}

void encode_rows(const EncodeTask& task) {
    for (std::int64_t r = task.first; r < task.last; ++r) {
        const std::int64_t source = task.index != nullptr ? task.index[r] : r;
        const auto* values = reinterpret_cast<const __m256i*>(task.values + source * task.cols);
        auto* row = reinterpret_cast<W4a4::EncodedRow*>(task.rows) + r * num_blocks(task.cols);
        for (std::int64_t b = 0; b < num_blocks(task.cols); ++b)
            row[b] = W4a4::encode(_mm256_loadu_si256(values + b), task.input_scale[r]);
    }
}

constexpr Kernel complete(Kernel kernel) {
    kernel.needs = kAvx512 | kAvx512Vbmi | kAvx512Vnni;
    kernel.encoded_bytes = encoded_bytes;
    kernel.encode_rows = encode_rows;
    kernel.peak = "vpdpbusd";
    kernel.peak_share_amd = 0.67;
    kernel.peak_share_intel = 0.57;
    return kernel;
}

}  // namespace

extern const Kernel kW4a4, kW4a4InPlace;
const Kernel kW4a4 =
    complete(make_kernel<W4a4, PackedTiles>("avx512_vnni_w4a4", Precision::w4a4, &kPackedLayout));
const Kernel kW4a4InPlace =
    complete(make_kernel<W4a4, InPlaceTiles>("avx512_vnni_w4a4_in_place", Precision::w4a4, nullptr));

}  // namespace moe4::cpu::avx512_vnni
