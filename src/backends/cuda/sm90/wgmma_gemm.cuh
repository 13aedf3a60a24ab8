#pragma once
// The grouped GEMM for many rows an expert: wgmma with weights from registers (decode.cuh) as the M operand
// and token rows from shared memory. A tile is 2 x 128 weight rows by up to 160 tokens; a persistent block
// walks over them with the rows of weights innermost, so that tokens stay in L2. Two warpgroups multiply,
// each two m64 tiles; warps hold the same rows as in mma_gemm.cuh, and finish alike. One lane loads weights,
// one loads tokens.
//
// While the tensor cores work on one word of every row (two k16 steps), the next one is decoded into the
// other half of the A registers.
#include <utility>

#include "backends/cuda/ptx/wgmma.cuh"
#include "backends/cuda/sm90/epilogue.cuh"
#include "backends/cuda/sm90/wgmma_shape.hpp"

namespace moe4::cuda::sm90 {

template <class Format_, bool kGateUp_>
struct WgmmaTile {
    using Format = Format_;
    static constexpr bool kGateUp = kGateUp_;
    static constexpr int kHalfRows = kWgmmaHalfRows;
    static constexpr int kTileRows = kGateUp ? kHalfRows : 2 * kHalfRows;
    static constexpr int kTokenTiles = kWgmmaTileTokens / 8;
};

using WgmmaSums = float[2][kWgmmaTileTokens / 8][4];

/// Shared memory, as addresses: rings of weights and tokens, a full and an empty barrier a stage.
struct WgmmaShared {
    std::uint32_t codes, scales, tokens, barriers;
    __device__ explicit WgmmaShared(std::uint32_t base)
        : codes(base),
          scales(base + kWgmmaWeightStages * kWgmmaCodeBytes),
          tokens(scales + kWgmmaWeightStages * kWgmmaScaleBytes),
          barriers(tokens + kWgmmaTokenStages * kWgmmaTokenBytes) {}
    __device__ std::uint32_t weights_full(int stage) const { return barriers + 8 * stage; }
    __device__ std::uint32_t weights_empty(int stage) const { return barriers + 64 + 8 * stage; }
    __device__ std::uint32_t tokens_full(int stage) const { return barriers + 128 + 8 * stage; }
    __device__ std::uint32_t tokens_empty(int stage) const { return barriers + 192 + 8 * stage; }
};
static_assert(kWgmmaWeightStages <= 8 && kWgmmaTokenStages <= 8);

template <class Tile>
__device__ void load_wgmma_weights(const GroupedGemm& gemm, const WgmmaShared& shared,
                                   const CUtensorMap* codes, const CUtensorMap* scales) {
    RingPosition at;
    for_each_item<Tile>(gemm, [&](const Segment& segment, int tile) {
        for (int chunk = 0; chunk < gemm.num_chunks; ++chunk) {
            const std::uint32_t full = shared.weights_full(at.stage);
            ptx::mbarrier_wait(shared.weights_empty(at.stage), at.parity ^ 1);
            ptx::mbarrier_arrive_expect(full, kWgmmaCodeBytes + kWgmmaScaleBytes);
            ptx::tensor_copy_4d(shared.scales + at.stage * kWgmmaScaleBytes, scales, chunk * (kChunk / 16),
                                tile * Tile::kTileRows, 0, segment.expert, full);
            ptx::tensor_copy_4d(shared.codes + at.stage * kWgmmaCodeBytes, codes, chunk * (kChunk / 2),
                                tile * Tile::kTileRows, 0, segment.expert, full);
            at.advance(kWgmmaWeightStages);
        }
    });
}

template <class Tile>
__device__ void load_wgmma_tokens(const GroupedGemm& gemm, const WgmmaShared& shared,
                                  const CUtensorMap* by_64, const CUtensorMap* by_16) {
    RingPosition at;
    for_each_item<Tile>(gemm, [&](const Segment& segment, int) {
        const int rows = (segment.num_rows + kWgmmaTokenBox - 1) / kWgmmaTokenBox * kWgmmaTokenBox;
        for (int slab = 0; slab < gemm.num_chunks * (kChunk / 64); ++slab) {
            const std::uint32_t full = shared.tokens_full(at.stage);
            const std::uint32_t to = shared.tokens + at.stage * kWgmmaTokenBytes;
            ptx::mbarrier_wait(shared.tokens_empty(at.stage), at.parity ^ 1);
            ptx::mbarrier_arrive_expect(full, rows * 128);
            int row = 0;
            for (; row + 64 <= rows; row += 64)
                ptx::tensor_copy_2d(to + row * 128, by_64, slab * 64, segment.first_row + row, full);
            for (; row < rows; row += kWgmmaTokenBox)
                ptx::tensor_copy_2d(to + row * 128, by_16, slab * 64, segment.first_row + row, full);
            at.advance(kWgmmaTokenStages);
        }
    });
}

template <class Format>
__device__ __forceinline__ void multiply_word(WgmmaSums& sums, const std::uint32_t (&a)[2][2][4],
                                              std::uint64_t b, int num_tokens) {
    if constexpr (Format::kF16)
        ptx::wgmma_group_f16(sums, a, b, b + 2, num_tokens);
    else
        ptx::wgmma_group_bf16(sums, a, b, b + 2, num_tokens);
}

/// Two m16 tiles' worth of one word, as A registers: [step][m][register].
template <class Format>
__device__ __forceinline__ void decode_word(std::uint32_t (&a)[2][2][4],
                                            const std::uint32_t (&words)[2][2][4],
                                            const std::uint32_t (&four_scales)[2][2], int word) {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const DecodedWord w =
                Format::decode(words[m][half][word % 4], Format::scale(four_scales[m][half], word / 2));
            a[0][m][half] = w.step0[0];
            a[0][m][2 + half] = w.step0[1];
            a[1][m][half] = w.step1[0];
            a[1][m][2 + half] = w.step1[1];
        }
    }
}

/// The compiler knows nothing of the asynchrony: keeps it from moving a use of the sums before the wait.
__device__ __forceinline__ void keep_behind(WgmmaSums& sums) {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int n = 0; n < kWgmmaTileTokens / 8; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(sums[m][n][i])::"memory");
        }
    }
}

/// The sums of sixteen tokens. Registers have no index, so all but one of the copies are skipped.
template <int... pairs>
__device__ __forceinline__ void copy_pair(float (&part)[2][2][4], const WgmmaSums& sums, int pair,
                                          std::integer_sequence<int, pairs...>) {
    const auto copy = [&]<int n>(std::integral_constant<int, n>) {
#pragma unroll
        for (int i = 0; i < 16; ++i) part[i / 8][i / 4 % 2][i % 4] = sums[i / 8][2 * n + i / 4 % 2][i % 4];
    };
    ((pair == pairs ? copy(std::integral_constant<int, pairs>{}) : void()), ...);
}

/// Sixteen tokens at a time in a loop that is not unrolled: ten copies of gate_up's code would not fit into
/// the instruction cache.
template <class Tile>
__device__ __forceinline__ void store_gate_up_in_pairs(const GroupedGemm& gemm, const Segment& segment,
                                                       int first, const ExpertFactors<true>& factors,
                                                       const WgmmaSums& sums, const Lane& lane) {
#pragma unroll 1
    for (int pair = 0; pair * 16 < segment.num_rows; ++pair) {
        float part[2][2][4];
        copy_pair(part, sums, pair, std::make_integer_sequence<int, kWgmmaTileTokens / 16>{});
        const Segment rows{segment.expert, segment.first_row + pair * 16, segment.num_rows - pair * 16, 0};
        store_gate_up<Tile, 2>(gemm, rows, first, factors, part, lane);
    }
}

struct WgmmaRings {
    RingPosition weights, tokens;
};

template <class Tile>
__device__ __forceinline__ void multiply_wgmma_item(const GroupedGemm& gemm, const WgmmaShared& shared,
                                                    WgmmaRings& at, const Segment& segment, int tile,
                                                    int warp, const Lane& lane) {
    using Format = typename Tile::Format;
    const ExpertFactors<Tile::kGateUp> factors(gemm, segment.expert);
    const int first_row = warp * 16 + lane.g;
    WgmmaSums sums = {};
    std::uint32_t a[2][2][2][4];  // [which half of the pipeline]
    int unreleased = -1;          // the token stage whose wgmmas may still run
#pragma unroll 1
    for (int chunk = 0; chunk < gemm.num_chunks; ++chunk) {
        ptx::mbarrier_wait(shared.weights_full(at.weights.stage), at.weights.parity);
        const std::uint32_t codes = shared.codes + at.weights.stage * kWgmmaCodeBytes + first_row * 128;
        const std::uint32_t scales =
            shared.scales + at.weights.stage * kWgmmaScaleBytes + first_row * 16 + 4 * lane.t;
        std::uint32_t four_scales[2][2];
        std::uint32_t words[2][2][4];
#pragma unroll
        for (int word = 0; word < 8; ++word) {
#pragma unroll
            for (int m = 0; m < 2; ++m) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int row = half * Tile::kHalfRows + m * 8;
                    if (word == 0) four_scales[m][half] = load_shared_word(scales + row * 16);
                    if (word % 4 == 0)
                        load_shared_vector(words[m][half],
                                           codes + row * 128 + (((2 * lane.t + word / 4) ^ lane.g) << 4));
                }
            }
            if (word == 4) {  // in registers: the stage may be filled again
                __syncwarp();
                if (lane.index == 0) ptx::mbarrier_arrive(shared.weights_empty(at.weights.stage));
            }
            ptx::wgmma_wait<1>();
            if (word % 2 == 1 && unreleased >= 0 && lane.index == 0)
                ptx::mbarrier_arrive(shared.tokens_empty(unreleased));
            decode_word<Format>(a[word % 2], words, four_scales, word);
            if (word % 2 == 0) ptx::mbarrier_wait(shared.tokens_full(at.tokens.stage), at.tokens.parity);
            const std::uint64_t b =
                ptx::wgmma_descriptor(shared.tokens + at.tokens.stage * kWgmmaTokenBytes) + word % 2 * 4;
            multiply_word<Format>(sums, a[word % 2], b, segment.num_rows);
            if (word % 2 == 1) {
                unreleased = at.tokens.stage;
                at.tokens.advance(kWgmmaTokenStages);
            }
        }
        at.weights.advance(kWgmmaWeightStages);
    }
    ptx::wgmma_wait<0>();
    keep_behind(sums);
    if (lane.index == 0) ptx::mbarrier_arrive(shared.tokens_empty(unreleased));
    const int first = tile * Tile::kTileRows + warp * 16;
    if constexpr (Tile::kGateUp)
        store_gate_up_in_pairs<Tile>(gemm, segment, first, factors, sums, lane);
    else
        store_down<Tile, kWgmmaTileTokens / 8>(gemm, segment, first, factors, sums, lane);
}

template <class Tile>
__global__ void __launch_bounds__(kWgmmaThreads, 1)
    wgmma_gemm(const __grid_constant__ CUtensorMap codes, const __grid_constant__ CUtensorMap scales,
               const __grid_constant__ CUtensorMap tokens_64, const __grid_constant__ CUtensorMap tokens_16,
               const __grid_constant__ GroupedGemm gemm) {
    extern __shared__ __align__(1024) std::uint8_t shared_bytes[];
    const WgmmaShared shared(ptx::shared_address(shared_bytes));
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const Lane lane(static_cast<int>(threadIdx.x) % 32);
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < kWgmmaWeightStages; ++stage) {
            ptx::mbarrier_init(shared.weights_full(stage), 1);
            ptx::mbarrier_init(shared.weights_empty(stage), 8);
        }
        for (int stage = 0; stage < kWgmmaTokenStages; ++stage) {
            ptx::mbarrier_init(shared.tokens_full(stage), 1);
            ptx::mbarrier_init(shared.tokens_empty(stage), 8);
        }
        ptx::mbarrier_init_fence();
    }
    __syncthreads();
    // As in mma_gemm: down's weights are loaded while gate_up still runs.
    if (Tile::kGateUp || warp == 8) {
        ptx::wait_for_previous_kernel();
        ptx::allow_next_kernel();
    }
    if (warp < 8) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        WgmmaRings at;
        for_each_item<Tile>(gemm, [&](const Segment& segment, int tile) {
            multiply_wgmma_item<Tile>(gemm, shared, at, segment, tile, warp, lane);
        });
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (warp == 8 && lane.index == 0) load_wgmma_tokens<Tile>(gemm, shared, &tokens_64, &tokens_16);
        if (warp == 9 && lane.index == 0) load_wgmma_weights<Tile>(gemm, shared, &codes, &scales);
    }
}

}  // namespace moe4::cuda::sm90
