// The instructions of the AMX kernels: AMX tiles, and AVX-512 with FP16 to decode weights. The tile
// instructions are assembly with a memory clobber, which gcc's intrinsics lack.
#include "backends/cpu/kernels/amx_tiles.hpp"
#include "backends/cpu/kernels/avx512_in_place.hpp"
#include "backends/cpu/kernels/packed_tiles.hpp"

namespace moe4::cpu::amx {
namespace {

/// Largest magnitude of every vector, NaN where it has one: of magnitudes the bits are in order.
__m512 largest_magnitudes(const __m512 (&x)[16]) {
    __m512i two[8];  // of vectors i and i + 1 what is left to compare, side by side
    for (int i = 0; i < 8; ++i) {
        const __m512i a = _mm512_castps_si512(_mm512_abs_ps(x[2 * i]));
        const __m512i b = _mm512_castps_si512(_mm512_abs_ps(x[2 * i + 1]));
        two[i] = _mm512_max_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    }
    __m512i four[4];
    for (int i = 0; i < 4; ++i) {
        four[i] = _mm512_max_epi32(_mm512_unpacklo_epi64(two[2 * i], two[2 * i + 1]),
                                   _mm512_unpackhi_epi64(two[2 * i], two[2 * i + 1]));
    }
    const auto join = [](__m512i a, __m512i b) {
        return _mm512_max_epi32(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xDD));
    };
    return _mm512_castsi512_ps(join(join(four[0], four[1]), join(four[2], four[3])));
}

/// The e4m3 values next to x in [0, 448], ties to even.
__m512 round_to_e4m3(__m512 x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 20), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFFF)), odd);
    const __m512 normal =
        _mm512_castsi512_ps(_mm512_and_si512(rounded, _mm512_set1_epi32(static_cast<int>(0xFFF00000))));
    const __m512 shift = _mm512_set1_ps(0x1p14F);  // its last bit is 2^-9, as that of a subnormal e4m3
    const __mmask16 is_subnormal = _mm512_cmp_ps_mask(x, _mm512_set1_ps(0x1p-6F), _CMP_LT_OQ);
    return _mm512_mask_sub_ps(normal, is_subnormal, _mm512_add_ps(x, shift), shift);
}

/// As tdpbf16ps takes and gives them: subnormal numbers are zeros while this lives.
class FlushSubnormals {
public:
    FlushSubnormals() {
        asm volatile("stmxcsr %0" : "=m"(before_) : : "memory");
        constexpr unsigned kFlushToZero = 0x8000;
        constexpr unsigned kDenormalsAreZeros = 0x0040;
        const unsigned now = before_ | kFlushToZero | kDenormalsAreZeros;
        asm volatile("ldmxcsr %0" : : "m"(now) : "memory");
    }
    ~FlushSubnormals() { asm volatile("ldmxcsr %0" : : "m"(before_) : "memory"); }
    FlushSubnormals(const FlushSubnormals&) = delete;
    FlushSubnormals& operator=(const FlushSubnormals&) = delete;

private:
    unsigned before_;
};

struct Machine {
    struct alignas(64) TileConfig {
        std::uint8_t palette = 1;
        std::uint8_t start_row = 0;
        std::uint8_t reserved[14] = {};
        std::uint16_t bytes_per_row[16] = {};
        std::uint8_t rows[16] = {};
    };

    /// Tiles 0 and 1 are rows x 16 sums, 2 is rows x cols bf16, 3 cols x 16 bf16 in pairs.
    static void configure_tiles(int rows, int cols) {
        TileConfig config;
        for (int tile = 0; tile < 4; ++tile) {
            config.bytes_per_row[tile] = static_cast<std::uint16_t>(tile == 2 ? 2 * cols : 64);
            config.rows[tile] = static_cast<std::uint8_t>(tile == 3 ? cols / 2 : rows);
        }
        asm volatile("ldtilecfg %0" : : "m"(config) : "memory");
    }
    static void release_tiles() { asm volatile("tilerelease" : : : "memory"); }
    template <int kTile>
    static void clear_tile() {
        asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
    }
    template <int kTile>
    static void load_tile(const void* data, std::int64_t stride) {
        asm volatile("tileloadd (%1,%2,1), %%tmm%c0" : : "i"(kTile), "r"(data), "r"(stride) : "memory");
    }
    template <int kTile>
    static void store_tile(void* data, std::int64_t stride) {
        asm volatile("tilestored %%tmm%c0, (%1,%2,1)" : : "i"(kTile), "r"(data), "r"(stride) : "memory");
    }
    template <int kSums, int kActivations, int kWeights>
    static void multiply_add() {
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0"
                     :
                     : "i"(kSums), "i"(kActivations), "i"(kWeights));
    }

    [[gnu::always_inline]] static __m512i load(const void* data) { return _mm512_load_si512(data); }
    static void store(void* data, __m512i x) { _mm512_store_si512(data, x); }

    /// 2^-8 of 16 scales as fp16, each twice.
    static __m512i expand_scales(const std::uint8_t* scales) {
        const __m512i wide = _mm512_cvtepu8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(scales)));
        return _mm512_or_si512(_mm512_slli_epi32(wide, 7), _mm512_slli_epi32(wide, 23));
    }

    /// Of nibble kNibble of every 16 bits, brought to the upper byte by a shift that leaves the multiplier's
    /// port alone. What comes along above it does not matter: the table repeats.
    template <int kNibble>
    static __m512i decode(__m512i codes, __m512i scales) {
        const __m512i from_bit =
            _mm512_set1_epi64(std::int64_t{4 * kNibble} * 0x0100'0100'0100'0100 + 0x3000'2000'1000'0000);
        const __m512i nibbles = _mm512_multishift_epi64_epi8(from_bit, codes);
        const __m512i upper_bytes = _mm512_broadcast_i32x4(_mm_setr_epi8(
            0, 0x58, 0x5C, 0x5E, 0x60, 0x62, 0x64, 0x66, static_cast<char>(0x80), static_cast<char>(0xD8),
            static_cast<char>(0xDC), static_cast<char>(0xDE), static_cast<char>(0xE0),
            static_cast<char>(0xE2), static_cast<char>(0xE4), static_cast<char>(0xE6)));
        const __m512i values = _mm512_maskz_permutexvar_epi8(0xAAAA'AAAA'AAAA'AAAA, nibbles, upper_bytes);
        const __m512h product = _mm512_mul_ph(_mm512_castsi512_ph(values), _mm512_castsi512_ph(scales));
        return _mm512_and_si512(_mm512_srai_epi16(_mm512_castph_si512(product), 3),
                                _mm512_set1_epi16(static_cast<short>(0x8FFF)));
    }

    static void expand_block(const std::uint16_t* bf16, float* out) {
        _mm512_store_ps(out, bf16_to_float(load_bf16(bf16)));
    }

    /// Sums of one row, in pairs, with the two halves of a tile, as tdpbf16ps over 32 columns makes them. The
    /// scale is a factor of the multiply-add and what is looked up is x * e2m1 / 8: the same exact product
    /// for fewer instructions.
    template <class Tiles>
    static void multiply_row(const Tiles& tiles, std::int64_t tile_row, std::int64_t first_chunk,
                             const PackedChunk* chunks, const float* x, std::int64_t num_blocks,
                             float* const (&sums)[2]) {
        const FlushSubnormals as_the_tiles_do;
        const std::int64_t first = first_chunk * kPackedChunkBlocks;
        const std::int64_t count = smaller(kMaxStepChunks * kPackedChunkBlocks, num_blocks - first);
        __m512 sum[2] = {_mm512_load_ps(sums[0]), _mm512_load_ps(sums[1])};
        for (std::int64_t b = 0; b < count;) {
            __m512 firsts[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
            __m512 seconds[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
            for (const std::int64_t end = smaller(b + 2, count); b < end; ++b) {
                tiles.fetch_ahead(tile_row, first + b, 1);
                add_block(chunks[b / kPackedChunkBlocks], b % kPackedChunkBlocks, x + (first + b) * kBlock,
                          firsts, seconds);
            }
            for (int half = 0; half < 2; ++half)
                sum[half] = _mm512_add_ps(sum[half], _mm512_add_ps(firsts[half], seconds[half]));
        }
        _mm512_store_ps(sums[0], sum[0]);
        _mm512_store_ps(sums[1], sum[1]);
    }

    [[gnu::always_inline]] static void add_block(const PackedChunk& chunk, std::int64_t block, const float* x,
                                                 __m512 (&firsts)[2], __m512 (&seconds)[2]) {
        const __m512 eighths =
            _mm512_setr_ps(0.0F, 0x1p-4F, 0x1p-3F, 0x1.8p-3F, 0x1p-2F, 0x1.8p-2F, 0x1p-1F, 0x1.8p-1F, -0.0F,
                           -0x1p-4F, -0x1p-3F, -0x1.8p-3F, -0x1p-2F, -0x1.8p-2F, -0x1p-1F, -0x1.8p-1F);
        __m512i codes[2][2];
        __m512 scale[2];
        for (int half = 0; half < 2; ++half) {
            const PackedHalf& rows = chunk.half[half];
            codes[half][0] = load(rows.codes[2 * block]);
            codes[half][1] = load(rows.codes[2 * block + 1]);
            scale[half] = _mm512_mul_ps(decode_scales(rows.scale[block]), _mm512_set1_ps(0x1p-101F));
        }
#pragma GCC unroll 8
        for (int pair = 0; pair < 8; ++pair) {
            const __m512 first = _mm512_mul_ps(eighths, _mm512_set1_ps(x[2 * pair]));
            const __m512 second = _mm512_mul_ps(eighths, _mm512_set1_ps(x[2 * pair + 1]));
            const auto shift = static_cast<unsigned>(4 * (pair % 4));
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half) {
                const __m512i code = codes[half][pair / 4];
                firsts[half] = _mm512_fmadd_ps(_mm512_permutexvar_ps(_mm512_srli_epi32(code, shift), first),
                                               scale[half], firsts[half]);
                seconds[half] =
                    _mm512_fmadd_ps(_mm512_permutexvar_ps(_mm512_srli_epi32(code, 16 + shift), second),
                                    scale[half], seconds[half]);
            }
        }
    }

    using Block = __m256i;  // 16 bf16 values

    static __m256i load_bf16(const std::uint16_t* x) {
        return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
    }
    static void store_bf16(__m256i x, std::uint16_t* out) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), x);
    }
    static void copy_block(const std::uint16_t* x, std::uint16_t* out) { store_bf16(load_bf16(x), out); }

    static __m256i activate(const float* gate, const float* up, float factor, float gate_scale,
                            float up_scale) {
        const Lanes g = Lanes::set(gate_scale) * (Lanes::set(factor) * Lanes{_mm512_load_ps(gate)});
        const Lanes u = Lanes::set(up_scale) * (Lanes::set(factor) * Lanes{_mm512_load_ps(up)});
        return bf16_from_float(moe::Silu::apply(g, u).value);
    }

    /// A row's sums with the two halves of a tile. Past the caches, full lines are not read before.
    static void store_scaled(const float* left, const float* right, float factor, float scale,
                             bool past_caches, float* y) {
        const auto scaled = [&](const float* sums) {
            const __m512 sum = _mm512_mul_ps(_mm512_set1_ps(factor), _mm512_load_ps(sums));
            return _mm512_mul_ps(_mm512_set1_ps(scale), sum);
        };
        if (past_caches) {
            _mm512_stream_ps(y, scaled(left));
            _mm512_stream_ps(y + kLanes, scaled(right));
        } else {
            _mm512_store_ps(y, scaled(left));
            _mm512_store_ps(y + kLanes, scaled(right));
        }
    }
    /// What went past the caches is seen by whoever sees what this thread does next.
    static void end_stores() { _mm_sfence(); }

    /// Floats that are bf16 values, in pairs.
    static void store_pairs(__m512 x, std::uint16_t* out) {
        const __m256i bits = _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(x), 16));
        store_bf16(_mm256_permutexvar_epi16(load_bf16(kPairOrder), bits), out);
    }

    /// format::quantize_activation_block of up to 16 blocks, operation by operation, as bf16 values times
    /// 2^112.
    static void quantize(const Block* blocks, int count, const float* input_scales, std::uint16_t* out,
                         std::int64_t out_stride) {
        const auto in_use = static_cast<__mmask16>((1U << count) - 1U);
        __m512 x[kTileRows];
        for (int i = 0; i < kTileRows; ++i) x[i] = i < count ? bf16_to_float(blocks[i]) : _mm512_setzero_ps();
        const __m512 largest = largest_magnitudes(x);
        const __m512 input_scale = _mm512_maskz_loadu_ps(in_use, input_scales);
        const __m512 ratio = _mm512_div_ps(_mm512_div_ps(largest, _mm512_set1_ps(6.0F)), input_scale);
        const __mmask16 is_scaled = _mm512_cmp_ps_mask(input_scale, _mm512_setzero_ps(), _CMP_NEQ_OQ);
        const __m512 scale =
            _mm512_maskz_mov_ps(is_scaled, round_to_e4m3(_mm512_min_ps(ratio, _mm512_set1_ps(448.0F))));
        const __m512 step = _mm512_mul_ps(scale, input_scale);

        // What codes are multiplied by: 0 where all of them are to be 0, NaN where the block holds one.
        const __mmask16 is_coded = _mm512_cmp_ps_mask(step, _mm512_setzero_ps(), _CMP_NEQ_OQ);
        const __mmask16 is_nan = _mm512_cmp_ps_mask(largest, largest, _CMP_UNORD_Q);
        const __m512 factor = _mm512_mask_mov_ps(
            _mm512_maskz_mul_ps(is_coded, scale, _mm512_set1_ps(kActivationFactor / 2)), is_nan, largest);
        alignas(64) float steps[kTileRows];
        alignas(64) float factors[kTileRows];
        _mm512_store_ps(steps, step);
        _mm512_store_ps(factors, factor);
        for (int i = 0; i < count; ++i) {
            const __m512i doubled = double_and_round_to_e2m1(_mm512_div_ps(x[i], _mm512_set1_ps(steps[i])));
            store_pairs(_mm512_mul_ps(_mm512_cvtepi32_ps(doubled), _mm512_set1_ps(factors[i])),
                        out + i * out_stride);
        }
    }

    static void scale_block(const std::uint16_t* bf16, float factor, std::uint16_t* out) {
        store_pairs(_mm512_mul_ps(bf16_to_float(load_bf16(bf16)), _mm512_set1_ps(factor)), out);
    }
};

constexpr Kernel complete(Kernel kernel, const char* name) {
    kernel.name = name;
    kernel.needs = kAvx512 | kAvx512Vbmi | kAvx512Fp16 | kAmxBf16;
    kernel.combine = combine;
    return kernel;
}

}  // namespace

extern const Kernel kW4a16, kW4a16InPlace, kW4a4, kW4a4InPlace;
const Kernel kW4a4 = complete(make_amx_kernel<Machine, W4a4, PackedTiles>(&kPackedLayout), "amx_w4a4");
const Kernel kW4a4InPlace =
    complete(make_amx_kernel<Machine, W4a4, InPlaceTiles>(nullptr), "amx_w4a4_in_place");
const Kernel kW4a16 = complete(make_amx_kernel<Machine, W4a16, PackedTiles>(&kPackedLayout), "amx_w4a16");
const Kernel kW4a16InPlace =
    complete(make_amx_kernel<Machine, W4a16, InPlaceTiles>(nullptr), "amx_w4a16_in_place");

}  // namespace moe4::cpu::amx
