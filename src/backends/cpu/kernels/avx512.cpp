// w4a16 with fp32 FMA in the plain order: k ascending, one fused multiply-add each. Weight rows are lanes; a
// weight is e2m1 * s_w, which a float holds exactly.
#include "backends/cpu/kernels/avx512_in_place.hpp"
#include "backends/cpu/kernels/avx512_tiles.hpp"

namespace moe4::cpu::avx512 {
namespace {

struct W4a16 {
    struct EncodedBlock {
        float value[kNvfp4BlockSize];
    };
    using EncodedRow = __m256i_u;  // 16 bf16

    static EncodedBlock encode(const EncodedRow& bf16) { return encode(bf16, 1.0F); }

    static EncodedBlock encode(__m256i bf16, float /*input_scale*/) {
        EncodedBlock out;
        _mm512_storeu_ps(out.value, bf16_to_float(bf16));
        return out;
    }

    /// The eight magnitudes and their negatives, times a factor.
    static __m512 e2m1_table(float factor) {
        const __m512 values = _mm512_setr_ps(0.0F, 0.5F, 1.0F, 1.5F, 2.0F, 3.0F, 4.0F, 6.0F,  //
                                             -0.0F, -0.5F, -1.0F, -1.5F, -2.0F, -3.0F, -4.0F, -6.0F);
        return _mm512_mul_ps(values, _mm512_set1_ps(factor));
    }

    struct PackedRows {
        __m512i left, right;  // lane = row; the nibble at bit 4 k is column k or 8 + k
        __m512 scale;         // 2^-8 s_w
        PackedRows() = default;
        PackedRows(const PackedHalf& half, std::int64_t block)
            : left(_mm512_load_si512(half.codes[2 * block])),
              right(_mm512_load_si512(half.codes[2 * block + 1])),
              scale(decode_scales(half.scale[block])) {}

        /// The code of column k in the low 4 bits, which are all that vpermps looks at.
        [[gnu::always_inline]] __m512i codes(int k) const {
            return _mm512_srli_epi32(k < 8 ? left : right, static_cast<unsigned>(k % 8 * 4));
        }
        [[gnu::always_inline]] __m512 column(int k) const {
            return _mm512_mul_ps(scale, _mm512_permutexvar_ps(codes(k), e2m1_table(256.0F)));
        }
    };

    struct DecodedRows {
        __m512 value[kNvfp4BlockSize];
        DecodedRows& operator=(const PackedRows& packed) {
#pragma GCC unroll 16
            for (int k = 0; k < kNvfp4BlockSize; ++k) value[k] = packed.column(k);
            return *this;
        }
        [[gnu::always_inline]] __m512 column(int k) const { return value[k]; }
    };
    static constexpr int kDecodedBlocks = 8;  // 16 KB

    /// For one row the product of weight and scale costs as much as its use. Instead the table that is looked
    /// up holds x * e2m1, and the scale is a factor of the fused multiply-add: the same exact product. The
    /// table is of x * e2m1 / 8, so that it does not overflow.
    static constexpr bool kRunsOneRowOnTwoTiles = true;
    [[gnu::always_inline]] static inline void add_row(const PackedRows (&w)[4], const EncodedBlock& x,
                                                      __m512 (&sum)[4]) {
        __m512 scale[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) scale[i] = _mm512_mul_ps(w[i].scale, _mm512_set1_ps(2048.0F));
#pragma GCC unroll 16
        for (int k = 0; k < kNvfp4BlockSize; ++k) {
            const __m512 products = _mm512_mul_ps(_mm512_set1_ps(x.value[k]), e2m1_table(0.125F));
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i)
                sum[i] = _mm512_fmadd_ps(_mm512_permutexvar_ps(w[i].codes(k), products), scale[i], sum[i]);
        }
    }

    template <int kRows, class Rows>
    [[gnu::always_inline]] static inline void add_block(const Rows& w0, const Rows& w1, const EncodedBlock* x,
                                                        __m512 (&sum)[2][kRows]) {
#pragma GCC unroll 16
        for (int k = 0; k < kNvfp4BlockSize; ++k) {
            const __m512 column0 = w0.column(k);
            const __m512 column1 = w1.column(k);
#pragma GCC unroll 8
            for (int r = 0; r < kRows; ++r) {
                const __m512 value = _mm512_set1_ps(x[r].value[k]);
                sum[0][r] = _mm512_fmadd_ps(value, column0, sum[0][r]);
                sum[1][r] = _mm512_fmadd_ps(value, column1, sum[1][r]);
            }
        }
    }
};

std::size_t encoded_bytes(std::int64_t cols) { return static_cast<std::size_t>(cols) * 2; }

constexpr Kernel complete(Kernel kernel) {
    kernel.needs = kAvx512;
    kernel.encoded_bytes = encoded_bytes;
    kernel.peak = "avx512_fma";
    return kernel;
}

}  // namespace

extern const Kernel kW4a16, kW4a16InPlace;
const Kernel kW4a16 =
    complete(make_kernel<W4a16, PackedTiles>("avx512_w4a16", Precision::w4a16, &kPackedLayout));
const Kernel kW4a16InPlace =
    complete(make_kernel<W4a16, InPlaceTiles>("avx512_w4a16_in_place", Precision::w4a16, nullptr));

}  // namespace moe4::cpu::avx512
