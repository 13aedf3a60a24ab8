#pragma once
// The grouped GEMM for few rows an expert. Weights are the M operand of mma.sync m16n8k16, so that a tile is
// a multiple of 8 tokens wide, and come into registers as checkpoint bytes (decode.cuh).
//
// A persistent block walks over items (segment, tile of weight rows). One warp loads weights (tensor maps:
// codes with 128-byte swizzle, 16 bytes of scales a row), one loads token rows, the others multiply:
// kRowWarps groups of 32 weight rows times kSplit parts of K, whose sums are added in a fixed order at the
// end. An m16 tile holds eight gate rows and the eight up rows of the same indices, so the activation is
// computed where the sums are; a warp has two such tiles, so the 16 values of h that share a quantisation
// block lie in one warp.
#include "backends/cuda/sm90/epilogue.cuh"
#include "backends/cuda/sm90/mma_shape.hpp"

namespace moe4::cuda::sm90 {

template <class Format_, bool kGateUp_, int kShapeIndex>
struct MmaTile {
    using Format = Format_;
    static constexpr bool kGateUp = kGateUp_;
    static constexpr MmaShape kShape = kMmaShapes[kShapeIndex];
    static constexpr int kRowWarps = kShape.row_warps, kSplit = kShape.split,
                         kTokenTiles = kShape.token_tiles;
    static constexpr int kBlocksPerSm = kShape.blocks_per_sm;
    static constexpr int kConsumers = kRowWarps * kSplit;  // warps
    static constexpr int kHalfRows = kShape.half_rows();
    static constexpr int kTileRows = kGateUp ? kHalfRows : 2 * kHalfRows;  // of the output
    static constexpr int kCodeBytes = kShape.code_bytes(), kScaleBytes = kShape.scale_bytes();
};

struct MmaBlock {
    const GroupedGemm& gemm;
    const MmaLaunch& ring;
    std::uint32_t stages;  // shared addresses
    float4* partial;
    std::uint32_t full, empty;  // barriers

    __device__ std::uint32_t stage(const RingPosition& at) const {
        return stages + at.stage * ring.stage_bytes;
    }
};

template <class Tile>
__device__ void load_weights(const MmaBlock& block, const CUtensorMap* codes, const CUtensorMap* scales) {
    RingPosition at;
    for_each_item<Tile>(block.gemm, [&](const Segment& segment, int tile) {
        for (int first = 0; first < block.gemm.num_chunks; first += Tile::kSplit) {
            const int num_chunks = min(Tile::kSplit, block.gemm.num_chunks - first);
            const std::uint32_t full = block.full + 8 * at.stage;
            ptx::mbarrier_wait(block.empty + 8 * at.stage, at.parity ^ 1);
            ptx::mbarrier_arrive_expect(full, num_chunks * (Tile::kCodeBytes + Tile::kScaleBytes));
            const std::uint32_t stage = block.stage(at);
            for (int c = 0; c < num_chunks; ++c) {
                ptx::tensor_copy_4d(stage + c * Tile::kCodeBytes, codes, (first + c) * (kChunk / 2),
                                    tile * Tile::kTileRows, 0, segment.expert, full);
                ptx::tensor_copy_4d(stage + Tile::kSplit * Tile::kCodeBytes + c * Tile::kScaleBytes, scales,
                                    (first + c) * (kChunk / 16), tile * Tile::kTileRows, 0, segment.expert,
                                    full);
            }
            at.advance(block.ring.num_stages);
        }
    });
}

/// A warp; each lane copies its own rows.
template <class Tile>
__device__ void load_tokens(const MmaBlock& block, int lane) {
    RingPosition at;
    const GroupedGemm& gemm = block.gemm;
    for_each_item<Tile>(block.gemm, [&](const Segment& segment, int) {
        const std::uint16_t* row = nullptr;
        if (lane < segment.num_rows) {
            const int grouped = segment.first_row + lane;
            row = gemm.rows +
                  (gemm.row_source == nullptr ? grouped : gemm.row_source[grouped]) * gemm.row_stride;
        }
        for (int first = 0; first < gemm.num_chunks; first += Tile::kSplit) {
            const int bytes = min(Tile::kSplit, gemm.num_chunks - first) * kChunk * 2;
            const std::uint32_t full = block.full + 8 * at.stage;
            ptx::mbarrier_wait(block.empty + 8 * at.stage, at.parity ^ 1);
            if (lane == 0) ptx::mbarrier_arrive_expect(full, segment.num_rows * bytes);
            __syncwarp();
            if (row != nullptr) {
                const std::uint32_t to =
                    block.stage(at) + Tile::kShape.token_offset() + lane * Tile::kShape.row_pitch();
                ptx::bulk_copy(to, row + first * kChunk, bytes, full);
            }
            at.advance(block.ring.num_stages);
        }
    });
}

/// sums += 32 weight rows x 256 k x kTiles * 8 tokens. `codes` and `scales` are the addresses of row g of the
/// first tile's gate half, `tokens` of the row and part that this lane hands to ldmatrix.
template <class Tile, int kTiles>
__device__ void multiply_chunk(float (&sums)[2][kTiles][4], std::uint32_t codes, std::uint32_t scales,
                               const std::uint32_t (&tokens)[kTiles], const Lane& lane) {
    using Format = typename Tile::Format;
    std::uint32_t four_scales[2][2];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
            four_scales[m][half] =
                load_shared_word(scales + (half * Tile::kHalfRows + m * 8) * 16 + 4 * lane.t);
    }
#pragma unroll
    for (int unit = 0; unit < 2; ++unit) {  // 16 bytes of codes: four words, two blocks
        std::uint32_t words[2][2][4];
#pragma unroll
        for (int m = 0; m < 2; ++m) {
#pragma unroll
            for (int half = 0; half < 2; ++half)
                load_shared_vector(words[m][half], codes + (half * Tile::kHalfRows + m * 8) * 128 +
                                                       (((2 * lane.t + unit) ^ lane.g) << 4));
        }
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            DecodedWord a[2][2];
#pragma unroll
            for (int m = 0; m < 2; ++m) {
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    a[m][half] = Format::decode(words[m][half][w],
                                                Format::scale(four_scales[m][half], unit * 2 + w / 2));
            }
#pragma unroll
            for (int n = 0; n < kTiles; ++n) {
                std::uint32_t b[4];
                ptx::load_matrix_x4(b, tokens[n] + (unit * 4 + w) * 64);
#pragma unroll
                for (int m = 0; m < 2; ++m) {
                    const DecodedWord& x = a[m][0];
                    const DecodedWord& y = a[m][1];
                    Format::mma(sums[m][n], x.step0[0], y.step0[0], x.step0[1], y.step0[1], b[0], b[1]);
                    Format::mma(sums[m][n], x.step1[0], y.step1[0], x.step1[1], y.step1[1], b[2], b[3]);
                }
            }
        }
    }
}

/// Adds the parts of K into part 0's sums, in the order of the parts.
template <class Tile, int kTiles>
__device__ void add_parts(float (&sums)[2][kTiles][4], float4* partial, int row_warp, int part, int lane) {
    const auto slot = [&](int p, int q) {
        return partial + (((p - 1) * Tile::kRowWarps + row_warp) * 2 * Tile::kTokenTiles + q) * 32 + lane;
    };
    asm volatile("bar.sync 1, %0;" ::"n"(Tile::kConsumers * 32) : "memory");
    if (part > 0) {
#pragma unroll
        for (int q = 0; q < 2 * kTiles; ++q) {
            const float(&s)[4] = sums[q / kTiles][q % kTiles];
            *slot(part, q) = make_float4(s[0], s[1], s[2], s[3]);
        }
    }
    asm volatile("bar.sync 1, %0;" ::"n"(Tile::kConsumers * 32) : "memory");
    if (part > 0) return;
#pragma unroll
    for (int p = 1; p < Tile::kSplit; ++p) {
#pragma unroll
        for (int q = 0; q < 2 * kTiles; ++q) {
            const float4 other = *slot(p, q);
            float(&s)[4] = sums[q / kTiles][q % kTiles];
            s[0] += other.x, s[1] += other.y, s[2] += other.z, s[3] += other.w;
        }
    }
}

template <class Tile, int kTiles>
__device__ void multiply_item(const MmaBlock& block, RingPosition& at, const Segment& segment, int tile,
                              int warp, const Lane& lane) {
    const int row_warp = warp % Tile::kRowWarps;
    const int part = warp / Tile::kRowWarps;
    const int first_row = row_warp * 16 + lane.g;
    const ExpertFactors<Tile::kGateUp> factors(block.gemm, segment.expert);
    float sums[2][kTiles][4] = {};
    std::uint32_t token_offset[kTiles];
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
        const int row = min(n * 8 + lane.index % 8, block.ring.token_rows - 1);
        token_offset[n] = Tile::kShape.token_offset() + row * Tile::kShape.row_pitch() + part * kChunk * 2 +
                          lane.index / 8 * 16;
    }
    for (int first = 0; first < block.gemm.num_chunks; first += Tile::kSplit) {
        ptx::mbarrier_wait(block.full + 8 * at.stage, at.parity);
        if (first + part < block.gemm.num_chunks) {
            const std::uint32_t stage = block.stage(at);
            std::uint32_t tokens[kTiles];
#pragma unroll
            for (int n = 0; n < kTiles; ++n) tokens[n] = stage + token_offset[n];
            multiply_chunk<Tile, kTiles>(
                sums, stage + part * Tile::kCodeBytes + first_row * 128,
                stage + Tile::kSplit * Tile::kCodeBytes + part * Tile::kScaleBytes + first_row * 16, tokens,
                lane);
        }
        __syncwarp();
        if (lane.index == 0) ptx::mbarrier_arrive(block.empty + 8 * at.stage);
        at.advance(block.ring.num_stages);
    }
    if constexpr (Tile::kSplit > 1) {
        add_parts<Tile, kTiles>(sums, block.partial, row_warp, part, lane.index);
        if (part > 0) return;
    }
    const int first = tile * Tile::kTileRows + row_warp * 16;
    if constexpr (Tile::kGateUp)
        store_gate_up<Tile, kTiles>(block.gemm, segment, first, factors, sums, lane);
    else
        store_down<Tile, kTiles>(block.gemm, segment, first, factors, sums, lane);
}

template <class Tile>
__device__ void multiply(const MmaBlock& block, int warp, const Lane& lane) {
    RingPosition at;
    for_each_item<Tile>(block.gemm, [&](const Segment& segment, int tile) {
        const int tiles = (segment.num_rows + 7) / 8;
        if (Tile::kTokenTiles == 1 || tiles == 1)
            multiply_item<Tile, 1>(block, at, segment, tile, warp, lane);
        else if (tiles == 2)
            multiply_item < Tile, Tile::kTokenTiles<2 ? 1 : 2>(block, at, segment, tile, warp, lane);
        else if (tiles == 3)
            multiply_item < Tile, Tile::kTokenTiles<3 ? 1 : 3>(block, at, segment, tile, warp, lane);
        else
            multiply_item < Tile, Tile::kTokenTiles<4 ? 1 : 4>(block, at, segment, tile, warp, lane);
    });
}

template <class Tile>
__global__ void __launch_bounds__(Tile::kShape.threads(), Tile::kBlocksPerSm)
    mma_gemm(const __grid_constant__ CUtensorMap codes, const __grid_constant__ CUtensorMap scales,
             const __grid_constant__ GroupedGemm gemm, const __grid_constant__ MmaLaunch ring) {
    extern __shared__ __align__(1024) std::uint8_t shared[];
    std::uint8_t* const behind_stages = shared + ring.num_stages * ring.stage_bytes;
    const std::uint32_t barriers = ptx::shared_address(behind_stages + Tile::kShape.partial_bytes());
    const MmaBlock block{gemm,
                         ring,
                         ptx::shared_address(shared),
                         reinterpret_cast<float4*>(behind_stages),
                         barriers,
                         barriers + 8 * kMaxStages};
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const Lane lane(static_cast<int>(threadIdx.x) % 32);
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < ring.num_stages; ++stage) {
            ptx::mbarrier_init(block.full + 8 * stage, 2);  // weights and tokens
            ptx::mbarrier_init(block.empty + 8 * stage, Tile::kConsumers);
        }
        ptx::mbarrier_init_fence();
        ptx::prefetch_tensor_map(&codes);
        ptx::prefetch_tensor_map(&scales);
    }
    __syncthreads();
    // gate_up's segments come from the kernel before it. Those of down are older: its weights load while
    // gate_up still runs, and whatever else it does hangs on token rows, which wait.
    if (Tile::kGateUp || warp == Tile::kConsumers + 1) {
        ptx::wait_for_previous_kernel();
        ptx::allow_next_kernel();
    }
    if (warp < Tile::kConsumers)
        multiply<Tile>(block, warp, lane);
    else if (warp == Tile::kConsumers + 1)
        load_tokens<Tile>(block, lane.index);
    else if (lane.index == 0)
        load_weights<Tile>(block, &codes, &scales);
}

template <class Format, bool kGateUp>
MmaKernels mma_kernels() {
    return {{mma_gemm<MmaTile<Format, kGateUp, 0>>, mma_gemm<MmaTile<Format, kGateUp, 1>>,
             mma_gemm<MmaTile<Format, kGateUp, 2>>, mma_gemm<MmaTile<Format, kGateUp, 3>>,
             mma_gemm<MmaTile<Format, kGateUp, 4>>, mma_gemm<MmaTile<Format, kGateUp, 5>>}};
}

}  // namespace moe4::cuda::sm90
