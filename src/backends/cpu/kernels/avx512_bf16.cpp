// w4a16 with vdpbf16ps. Weight rows are lanes; e2m1 is a bf16 value, looked up by vpermw, and a block's scale
// is a factor of its sum: two instructions fewer for 32 weights than to multiply each with its scale.
//
//     dot = sum over the pairs (k, k + 4) of 8 columns:  x[k + 4] w[k + 4], then x[k] w[k], from zero
//     sum = fma(dot, s_w, sum)                           one block of 16 columns after the other
//
// The codes are divided by 128 and the scale is multiplied by it: then no dot of finite values overflows.
#include "backends/cpu/kernels/avx512_in_place.hpp"
#include "backends/cpu/kernels/avx512_tiles.hpp"

namespace moe4::cpu::avx512_bf16 {
namespace {

struct W4a16 {
    static constexpr int kPairs = kNvfp4BlockSize / 2;

    struct EncodedBlock {
        std::uint16_t value[kPairs][2];  // bf16; pair 4 i + j is the columns (8 i + j, 8 i + j + 4)
    };
    using EncodedRow = __m256i_u;  // 16 bf16

    static EncodedBlock encode(const EncodedRow& bf16) { return encode(bf16, 1.0F); }

    static EncodedBlock encode(__m256i bf16, float /*input_scale*/) {
        const __m256i order = _mm256_setr_epi16(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
        EncodedBlock out;
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out.value), _mm256_permutexvar_epi16(order, bf16));
        return out;
    }

    /// bf16 of e2m1 / 128 for the low 4 bits of every 16; the bit above them chooses between two copies.
    static __m512i lookup(__m512i nibbles) {
        const __m256i magnitudes =
            _mm256_setr_epi16(0, 0x3B80, 0x3C00, 0x3C40, 0x3C80, 0x3CC0, 0x3D00, 0x3D40,  //
                              0, 0x3B80, 0x3C00, 0x3C40, 0x3C80, 0x3CC0, 0x3D00, 0x3D40);
        const __m256i signs = _mm256_setr_epi16(0, 0, 0, 0, 0, 0, 0, 0, -0x8000, -0x8000, -0x8000, -0x8000,
                                                -0x8000, -0x8000, -0x8000, -0x8000);
        return _mm512_permutexvar_epi16(nibbles, _mm512_broadcast_i64x4(_mm256_or_si256(magnitudes, signs)));
    }

    struct PackedRows {
        __m512i pair[kPairs];  // lane = row
        __m512 scale;          // 128 s_w
        PackedRows() = default;
        PackedRows(const PackedHalf& half, std::int64_t block)
            : scale(_mm512_mul_ps(decode_scales(half.scale[block]), _mm512_set1_ps(0x1p15F))) {
#pragma GCC unroll 2
            for (int i = 0; i < 2; ++i) {
                const __m512i codes = _mm512_load_si512(half.codes[2 * block + i]);
                pair[4 * i] = lookup(codes);
                pair[4 * i + 1] = lookup(_mm512_srli_epi16(codes, 4));
                pair[4 * i + 2] = lookup(_mm512_srli_epi16(codes, 8));
                pair[4 * i + 3] = lookup(_mm512_srli_epi16(codes, 12));
            }
        }
    };
    using DecodedRows = PackedRows;
    static constexpr int kDecodedBlocks = 16;  // 18 KB
    static constexpr bool kRunsOneRowOnTwoTiles = false;

    /// sum[half][r] += s_w * (x[r] . w[half]), pair by pair for all rows: a product waits for the one before
    /// it in its sum, and the others fill the time.
    template <int kRows>
    [[gnu::always_inline]] static inline void add_rows(const DecodedRows& w0, const DecodedRows& w1,
                                                       const EncodedBlock* x, __m512* sum0, __m512* sum1) {
        __m512 dot0[kRows];
        __m512 dot1[kRows];
#pragma GCC unroll 2
        for (int r = 0; r < kRows; ++r) dot0[r] = dot1[r] = _mm512_setzero_ps();
#pragma GCC unroll 8
        for (int i = 0; i < kPairs; ++i) {
#pragma GCC unroll 2
            for (int r = 0; r < kRows; ++r) {
                std::int32_t pair;
                __builtin_memcpy(&pair, x[r].value[i], 4);
                const auto values = __builtin_bit_cast(__m512bh, _mm512_set1_epi32(pair));
                dot0[r] = _mm512_dpbf16_ps(dot0[r], __builtin_bit_cast(__m512bh, w0.pair[i]), values);
                dot1[r] = _mm512_dpbf16_ps(dot1[r], __builtin_bit_cast(__m512bh, w1.pair[i]), values);
            }
        }
#pragma GCC unroll 2
        for (int r = 0; r < kRows; ++r) {
            sum0[r] = _mm512_fmadd_ps(dot0[r], w0.scale, sum0[r]);
            sum1[r] = _mm512_fmadd_ps(dot1[r], w1.scale, sum1[r]);
        }
    }

    template <int kRows>
    [[gnu::always_inline]] static inline void add_block(const DecodedRows& w0, const DecodedRows& w1,
                                                        const EncodedBlock* x, __m512 (&sum)[2][kRows]) {
#pragma GCC unroll 4
        for (int r = 0; r + 1 < kRows; r += 2) add_rows<2>(w0, w1, x + r, sum[0] + r, sum[1] + r);
        if constexpr (kRows % 2 == 1)
            add_rows<1>(w0, w1, x + kRows - 1, sum[0] + kRows - 1, sum[1] + kRows - 1);
    }
};

std::size_t encoded_bytes(std::int64_t cols) { return static_cast<std::size_t>(cols) * 2; }

constexpr Kernel complete(Kernel kernel) {
    kernel.needs = kAvx512 | kAvx512Bf16 | kFastBf16Dot;
    kernel.encoded_bytes = encoded_bytes;
    kernel.order = {moe::SumOrder::scaled_blocks, 4};
    kernel.peak = "vdpbf16ps";
    return kernel;
}

}  // namespace

extern const Kernel kW4a16, kW4a16InPlace;
const Kernel kW4a16 =
    complete(make_kernel<W4a16, PackedTiles>("avx512_bf16_w4a16", Precision::w4a16, &kPackedLayout));
const Kernel kW4a16InPlace =
    complete(make_kernel<W4a16, InPlaceTiles>("avx512_bf16_w4a16_in_place", Precision::w4a16, nullptr));

}  // namespace moe4::cpu::avx512_bf16
