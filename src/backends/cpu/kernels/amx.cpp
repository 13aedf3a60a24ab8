// The instructions of the AMX kernels: AMX tiles, and AVX-512 with FP16 to decode weights. The tile
// instructions are assembly with a memory clobber, which gcc's intrinsics lack.
#include "backends/cpu/kernels/amx_tiles.hpp"
#include "backends/cpu/kernels/avx512_vector.hpp"

namespace moe4::cpu::amx {
namespace {

struct Machine {
    struct alignas(64) TileConfig {
        std::uint8_t palette = 1;
        std::uint8_t start_row = 0;
        std::uint8_t reserved[14] = {};
        std::uint16_t bytes_per_row[16] = {};
        std::uint8_t rows[16] = {};
    };

    /// Tiles 0 to 3 are rows x 16 sums, 4 and 5 rows x cols bf16, 6 and 7 cols x 16 bf16 in pairs.
    static void configure_tiles(int rows, int cols) {
        TileConfig config;
        for (int tile = 0; tile < 8; ++tile) {
            const bool is_activations = tile == 4 || tile == 5;
            config.bytes_per_row[tile] = static_cast<std::uint16_t>(is_activations ? 2 * cols : 64);
            config.rows[tile] = static_cast<std::uint8_t>(tile < 6 ? rows : cols / 2);
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

    static __m512i load(const void* data) { return _mm512_load_si512(data); }
    static void store(void* data, __m512i x) { _mm512_store_si512(data, x); }
    static __m512i shift_left_8(__m512i x) { return _mm512_slli_epi16(x, 8); }
    static __m512i shift_left_4(__m512i x) { return _mm512_slli_epi16(x, 4); }
    static __m512i shift_right_4(__m512i x) { return _mm512_srli_epi16(x, 4); }

    /// 2^-8 of 16 scales as fp16, each twice.
    static __m512i expand_scales(const std::uint8_t* scales) {
        const __m512i wide = _mm512_cvtepu8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(scales)));
        return _mm512_or_si512(_mm512_slli_epi32(wide, 7), _mm512_slli_epi32(wide, 23));
    }

    /// The nibble at bit 8 of every 16 is looked up, whatever lies above it: the table repeats.
    static __m512i decode(__m512i codes, __m512i scales) {
        const __m512i upper_bytes = _mm512_broadcast_i32x4(_mm_setr_epi8(
            0, 0x58, 0x5C, 0x5E, 0x60, 0x62, 0x64, 0x66, static_cast<char>(0x80), static_cast<char>(0xD8),
            static_cast<char>(0xDC), static_cast<char>(0xDE), static_cast<char>(0xE0),
            static_cast<char>(0xE2), static_cast<char>(0xE4), static_cast<char>(0xE6)));
        const __m512i values = _mm512_maskz_permutexvar_epi8(0xAAAA'AAAA'AAAA'AAAA, codes, upper_bytes);
        const __m512h product = _mm512_mul_ph(_mm512_castsi512_ph(values), _mm512_castsi512_ph(scales));
        return _mm512_and_si512(_mm512_srai_epi16(_mm512_castph_si512(product), 3),
                                _mm512_set1_epi16(static_cast<short>(0x8FFF)));
    }

    static void prefetch(const PackedChunk* chunk) {
        constexpr std::size_t kAhead = 3072;
        for (std::size_t i = 0; i < sizeof(PackedChunk); i += 64)
            _mm_prefetch(reinterpret_cast<const char*>(chunk) + kAhead + i, _MM_HINT_T0);
    }

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

    static void scale(const float* sums, float factor, float scale, float* y) {
        const __m512 sum = _mm512_mul_ps(_mm512_set1_ps(factor), _mm512_load_ps(sums));
        _mm512_store_ps(y, _mm512_mul_ps(_mm512_set1_ps(scale), sum));
    }

    /// Floats that are bf16 values, in pairs.
    static void store_pairs(__m512 x, std::uint16_t* out) {
        const __m256i bits = _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(x), 16));
        store_bf16(_mm256_permutexvar_epi16(load_bf16(kPairOrder), bits), out);
    }

    static void quantize(__m256i bf16, float input_scale, std::uint16_t* out) {
        const QuantizedBlock block = quantize_block(bf16_to_float(bf16), input_scale);
        const float factor = block.scale * (kActivationFactor / 2);
        store_pairs(_mm512_mul_ps(_mm512_cvtepi32_ps(block.doubled), _mm512_set1_ps(factor)), out);
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

extern const Kernel kW4a4, kW4a16;
const Kernel kW4a4 = complete(make_amx_kernel<Machine, W4a4>(), "amx_w4a4");
const Kernel kW4a16 = complete(make_amx_kernel<Machine, W4a16>(), "amx_w4a16");

}  // namespace moe4::cpu::amx
