// w4a16 with fp32 FMA in the plain order: k ascending, one fused multiply-add each. Weight rows are lanes; a
// weight is e2m1 * s_w, which a float holds exactly.
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

    struct PackedRows {
        __m512i left, right;  // lane = row; the nibble at bit 4 k is column k or 8 + k
        __m512 scale;         // 2^-8 s_w
        PackedRows(const PackedHalf& half, std::int64_t block)
            : left(_mm512_load_si512(half.codes[2 * block])),
              right(_mm512_load_si512(half.codes[2 * block + 1])),
              scale(decode_scales(half.scale[block])) {}

        [[gnu::always_inline]] __m512 column(int k) const {
            const __m512 table =
                _mm512_setr_ps(0.0F, 128.0F, 256.0F, 384.0F, 512.0F, 768.0F, 1024.0F, 1536.0F, -0.0F, -128.0F,
                               -256.0F, -384.0F, -512.0F, -768.0F, -1024.0F, -1536.0F);
            const __m512i codes = _mm512_srli_epi32(k < 8 ? left : right, static_cast<unsigned>(k % 8 * 4));
            return _mm512_mul_ps(scale, _mm512_permutexvar_ps(codes, table));
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
    kernel.name = "avx512_w4a16";
    kernel.needs = kAvx512;
    kernel.encoded_bytes = encoded_bytes;
    kernel.peak = "avx512_fma";
    return kernel;
}

}  // namespace

extern const Kernel kW4a16;
const Kernel kW4a16 = complete(make_kernel<W4a16>(Precision::w4a16));

}  // namespace moe4::cpu::avx512
