#pragma once
// The two GEMMs of a layer for few rows an expert, in one kernel. Weights are the M operand of mma.sync
// m16n8k16, so that a tile is a multiple of 8 tokens wide, and come into registers as checkpoint bytes
// (decode.cuh).
//
// A persistent block works on items, each a segment by a tile of weight rows: first those of gate_up, then
// those of down, so that neither waits for the other's last wave. One warp claims items and loads weights
// (tensor maps: a copy a stage for codes, with 128-byte swizzle, and one for scales; chunks behind the last
// one are zeros), one loads token rows, one tells other blocks which tiles of h are finished, and the others
// multiply: kRowWarps groups of 32 weight rows times kSplit parts of K, whose sums are added in a fixed order
// at the end. An m16 tile holds eight gate rows and the eight up rows of the same indices, so the activation
// is computed where the sums are; a warp has two such tiles, so the 16 values of h that share a quantisation
// block lie in one warp.
//
// Where tokens are few each block groups and encodes them first (few_tokens.cuh).
//
// An item of down waits for all tiles of its segment's h. Blocks claim items in ascending order and work on
// them in that order, so what is waited for has been claimed by a running block: no block that has yet to
// start is ever waited for, whatever else the device runs.
#include <algorithm>
#include <type_traits>
#include <utility>

#include "backends/cuda/ptx/register_limit.cuh"
#include "backends/cuda/sm90/few_tokens.cuh"
#include "backends/cuda/sm90/mma_epilogue.cuh"
#include "backends/cuda/sm90/mma_shape.hpp"

namespace moe4::cuda::sm90 {

template <class Format_, int kShapeIndex, class Task_ = MmaTask>
struct MmaTile {
    using Format = Format_;
    using Task = Task_;
    static constexpr bool kHasFewTokens = std::is_same_v<Task, MmaFewTokensTask>;
    static constexpr MmaShape kShape = kMmaShapes[kShapeIndex];
    static constexpr int kRowWarps = kShape.row_warps, kSplit = kShape.split,
                         kTokenTiles = kShape.token_tiles;
    static constexpr int kConsumers = kShape.consumers();  // warps
    static_assert(kConsumers % 4 == 0, "registers change hands between warpgroups");
    static constexpr int kHalfRows = kShape.half_rows();
    static constexpr int kCodeBytes = kShape.code_bytes(), kScaleBytes = kShape.scale_bytes();  // a stage
    static constexpr int kCodePitch = kSplit * kChunk / 2;  // eight rows lie together, chunk by chunk

    /// Of the output.
    __device__ static constexpr int tile_rows(bool is_gate_up) {
        return is_gate_up ? kHalfRows : 2 * kHalfRows;
    }
};

template <class Tile>
struct MmaBlock {
    const typename Tile::Task& task;
    std::uint32_t stages;  // shared address
    float4* partial;
    MmaShared& shared;
    FewTokens& few;    // where tokens are few
    std::uint16_t* x;  // likewise: [tokens, x_pitch]

    __device__ const GroupedGemm& gemm(Half half) const {
        return half == Half::gate_up ? task.gate_up : task.down;
    }
    __device__ std::int32_t* finished_tiles(const Item& item) const {
        return task.finished_tiles + item.segment_index * (Tile::kHasFewTokens ? RunCounters::kStride : 1);
    }
    __device__ std::uint32_t stage(const RingPosition& at) const {
        return stages + at.stage * task.stage_bytes;
    }
    __device__ std::uint32_t full(const RingPosition& at) const {
        return ptx::shared_address(&shared.full[at.stage]);
    }
    __device__ std::uint32_t empty(const RingPosition& at) const {
        return ptx::shared_address(&shared.empty[at.stage]);
    }
};

/// The items of a launch in the order in which they are claimed.
template <class Tile>
class ItemList {
public:
    /// By a warp.
    __device__ ItemList(const MmaBlock<Tile>& block, int lane)
        : task_(block.task),
          first_segments_(block.shared.first_segments),
          gate_up_tiles_(tiles_of(task_.gate_up, true)),
          down_tiles_(tiles_of(task_.down, false)) {
        int num_segments = 0;
        if constexpr (Tile::kHasFewTokens) {
            num_segments = group_slots(block.task.group, first_segments_, block.few, lane);
        } else {
            const Segment segment = load_segment(task_.gate_up.segments + lane);
            num_segments = __ldcg(task_.gate_up.num_segments);
            first_segments_[lane] = segment;
        }
        num_gate_up_ = task_.runs_gate_up ? num_segments * gate_up_tiles_ : 0;
        num_items_ = num_gate_up_ + (task_.runs_down ? num_segments * down_tiles_ : 0);
        __syncwarp();
    }

    __device__ static int claim(const MmaTask& task) { return atomicAdd(task.next_item, 1); }

    __device__ Item item(int index) const {
        if (index >= num_items_) return {{}, 0, 0, Half::none};
        const bool is_gate_up = index < num_gate_up_;
        const int i = is_gate_up ? index : index - num_gate_up_;
        const int num_tiles = is_gate_up ? gate_up_tiles_ : down_tiles_;
        const int segment = i / num_tiles;
        return {segment < kFirstSegments ? first_segments_[segment]
                                         : load_segment(task_.gate_up.segments + segment),
                segment, i % num_tiles, is_gate_up ? Half::gate_up : Half::down};
    }

    __device__ static int tiles_of(const GroupedGemm& gemm, bool is_gate_up) {
        return (gemm.out_size + Tile::tile_rows(is_gate_up) - 1) / Tile::tile_rows(is_gate_up);
    }

private:
    const MmaTask& task_;
    Segment* first_segments_;
    int gate_up_tiles_, down_tiles_;
    int num_gate_up_, num_items_;
};

/// A warp, of which one lane does the work.
template <class Tile>
__device__ void load_weights(const MmaBlock<Tile>& block, const WeightMaps& gate_up, const WeightMaps& down,
                             int lane) {
    int next = lane == 0 ? ItemList<Tile>::claim(block.task) : 0;  // under way while the list loads
    const ItemList<Tile> list(block, lane);
    if (lane != 0) return;
    RingPosition at;
    RingPosition slot;
    Item item = list.item(next);
    // A block that comes too late for gate_up takes one item of down and no other before it can work on it.
    bool claims_ahead = item.half == Half::gate_up || !Tile::kHasFewTokens;
    while (true) {
        ptx::mbarrier_wait(ptx::shared_address(&block.shared.free[slot.stage]), slot.parity ^ 1);
        block.shared.items[slot.stage] = item;
        ptx::mbarrier_arrive(ptx::shared_address(&block.shared.posted[slot.stage]));
        slot.advance(kMaxItems);
        if (item.half == Half::none) return;
        const bool is_gate_up = item.half == Half::gate_up;
        const WeightMaps& maps = is_gate_up ? gate_up : down;
        const int first_row = item.tile * Tile::tile_rows(is_gate_up);
        const int num_chunks = block.gemm(item.half).num_chunks;
        // An item's last stage, or the one before: with few items a block does not wait for its second claim,
        // with many a late one shares them out better.
        const int last = (num_chunks - 1) / Tile::kSplit * Tile::kSplit;
        const int claims_at = Tile::kSplit > 2 ? max(0, last - Tile::kSplit) : last;
        for (int first = 0; first < num_chunks; first += Tile::kSplit) {
            ptx::mbarrier_wait(block.empty(at), at.parity ^ 1);
            if (claims_ahead && first == claims_at) next = ItemList<Tile>::claim(block.task);
            const std::uint32_t full = block.full(at);
            ptx::mbarrier_arrive_expect(full, Tile::kCodeBytes + Tile::kScaleBytes);
            const std::uint32_t stage = block.stage(at);
            ptx::tensor_copy_5d(stage, &maps.codes,
                                {0, 0, first, first_row / 8, item.segment.expert * (is_gate_up ? 2 : 1)},
                                full);
            ptx::tensor_copy_5d(stage + Tile::kCodeBytes, &maps.scales,
                                {0, first_row / 8, 0, first, item.segment.expert}, full);
            at.advance(block.task.num_stages);
        }
        if (!claims_ahead) {
            await_tiles(block.finished_tiles(item), ItemList<Tile>::tiles_of(block.task.gate_up, true));
            claims_ahead = true;
            next = ItemList<Tile>::claim(block.task);
        }
        item = list.item(next);
    }
}

/// The item of this slot, once there is one.
template <class Tile>
__device__ Item await_item(const MmaBlock<Tile>& block, const RingPosition& slot) {
    ptx::mbarrier_wait(ptx::shared_address(&block.shared.posted[slot.stage]), slot.parity);
    return block.shared.items[slot.stage];
}

/// A warp; each lane copies its own rows.
template <class Tile>
__device__ void load_tokens(const MmaBlock<Tile>& block, int lane) {
    RingPosition at;
    RingPosition slot;
    while (true) {
        const Item item = await_item(block, slot);
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&block.shared.free[slot.stage]));
        slot.advance(kMaxItems);
        if (item.half == Half::none) return;
        const GroupedGemm& gemm = block.gemm(item.half);
        const bool has_x = Tile::kHasFewTokens && item.half == Half::gate_up;
        const int num_rows = has_x ? 0 : item.segment.num_rows;
        const std::uint16_t* row = nullptr;
        if (lane < num_rows) {
            const int grouped = item.segment.first_row + lane;
            row = gemm.rows + (gemm.row_source == nullptr ? grouped : __ldcg(gemm.row_source + grouped)) *
                                  gemm.row_stride;
        }
        if (item.half == Half::down && block.task.runs_gate_up) {
            await_tiles(block.finished_tiles(item), ItemList<Tile>::tiles_of(block.task.gate_up, true));
            ptx::order_before_async_copies();
        }
        for (int first = 0; first < gemm.num_chunks; first += Tile::kSplit) {
            const int bytes = min(Tile::kSplit, gemm.num_chunks - first) * kChunk * 2;
            const std::uint32_t full = block.full(at);
            ptx::mbarrier_wait(block.empty(at), at.parity ^ 1);
            if (lane == 0) ptx::mbarrier_arrive_expect(full, num_rows * bytes);
            __syncwarp();
            if (row != nullptr) {
                const std::uint32_t to =
                    block.stage(at) + Tile::kShape.token_offset() + lane * Tile::kShape.row_pitch();
                ptx::bulk_copy(to, row + first * kChunk, bytes, full);
            }
            at.advance(block.task.num_stages);
        }
    }
}

/// One thread: what this block's consumers have stored becomes visible to the blocks that wait for it. Not
/// the consumers' work: the fence lasts until the stores have arrived.
template <class Tile>
__device__ void publish_tiles(const MmaBlock<Tile>& block) {
    for (RingPosition slot;; slot.advance(kMaxItems)) {
        const Item item = await_item(block, slot);
        if (item.half == Half::none) return;
        ptx::mbarrier_wait(ptx::shared_address(&block.shared.done[slot.stage]), slot.parity);
        if (item.half == Half::gate_up) {
            __threadfence();
            atomicAdd(block.finished_tiles(item), 1);
        }
        ptx::mbarrier_arrive(ptx::shared_address(&block.shared.free[slot.stage]));
    }
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
                load_shared_vector(words[m][half], codes +
                                                       (half * Tile::kHalfRows + m * 8) * Tile::kCodePitch +
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

template <class Tile, bool kGateUp, int kTiles>
__device__ void multiply_item(const MmaBlock<Tile>& block, RingPosition& at, const Item& item, int warp,
                              const Lane& lane) {
    constexpr bool kHasX = kGateUp && Tile::kHasFewTokens;
    const GroupedGemm& gemm = kGateUp ? block.task.gate_up : block.task.down;
    const int row_warp = warp % Tile::kRowWarps;
    const int part = warp / Tile::kRowWarps;
    const int code_offset =
        row_warp * 16 * Tile::kCodePitch + part * (8 * kChunk / 2) + lane.g * (kChunk / 2);
    const int scale_offset = Tile::kCodeBytes + part * (Tile::kScaleBytes / Tile::kSplit) +
                             (row_warp * 16 + lane.g) * (kChunk / 16);
    const ExpertFactors<kGateUp> factors(gemm, item.segment.expert);
    float sums[2][kTiles][4] = {};
    std::uint32_t token_offset[kTiles];
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
        // Columns behind the last row repeat it: what lies there could be NaN, which takes the slow paths.
        const int row = min(n * 8 + lane.index % 8, item.segment.num_rows - 1);
        token_offset[n] = part * kChunk * 2 + lane.index / 8 * 16;
        if constexpr (kHasX)
            token_offset[n] += ptx::shared_address(block.x) +
                               block.few.row_token[item.segment.first_row + row] * block.task.x_pitch() * 2;
        else
            token_offset[n] += Tile::kShape.token_offset() + row * Tile::kShape.row_pitch();
    }
    for (int first = 0; first < gemm.num_chunks; first += Tile::kSplit) {
        ptx::mbarrier_wait(block.full(at), at.parity);
        if (first + part < gemm.num_chunks) {
            const std::uint32_t stage = block.stage(at);
            std::uint32_t tokens[kTiles];
#pragma unroll
            for (int n = 0; n < kTiles; ++n)
                tokens[n] = (kHasX ? first * kChunk * 2 : stage) + token_offset[n];
            multiply_chunk<Tile, kTiles>(sums, stage + code_offset, stage + scale_offset, tokens, lane);
        }
        ptx::mbarrier_arrive(block.empty(at));  // every lane: racecheck does not follow __syncwarp
        at.advance(block.task.num_stages);
    }
    if constexpr (Tile::kSplit > 1) {
        add_parts<Tile, kTiles>(sums, block.partial, row_warp, part, lane.index);
        if (part > 0) return;
    }
    const int first = item.tile * Tile::tile_rows(kGateUp) + row_warp * 16;
    if constexpr (kHasX) {
        if (first < gemm.out_size && first + 16 >= gemm.out_size)
            zero_padding(gemm, item.segment, lane.index);
    }
    if constexpr (kGateUp)
        store_gate_up<Tile, kTiles>(gemm, item.segment, first, factors, sums, lane);
    else
        store_down<Tile, kTiles>(gemm, item.segment, first, factors, sums, lane);
}

/// With as many tiles of tokens as the item's rows fill.
template <class Tile, bool kGateUp, int kTiles = 1>
__device__ void multiply_any(const MmaBlock<Tile>& block, RingPosition& at, const Item& item, int warp,
                             const Lane& lane) {
    if constexpr (kTiles < Tile::kTokenTiles) {
        if (item.segment.num_rows > kTiles * 8)
            return multiply_any<Tile, kGateUp, kTiles + 1>(block, at, item, warp, lane);
    }
    multiply_item<Tile, kGateUp, kTiles>(block, at, item, warp, lane);
}

template <class Tile>
__device__ void multiply(const MmaBlock<Tile>& block, int warp, const Lane& lane) {
    RingPosition at;
    for (RingPosition slot;; slot.advance(kMaxItems)) {
        const Item item = await_item(block, slot);
        if (item.half == Half::none) return;
        if (item.half == Half::gate_up)
            multiply_any<Tile, true>(block, at, item, warp, lane);
        else
            multiply_any<Tile, false>(block, at, item, warp, lane);
        __syncwarp();
        if (lane.index == 0) ptx::mbarrier_arrive(ptx::shared_address(&block.shared.done[slot.stage]));
    }
}

template <class Tile>
__global__ void __launch_bounds__(Tile::kShape.threads(), Tile::kShape.blocks_per_sm)
    mma_gemm(const __grid_constant__ WeightMaps gate_up, const __grid_constant__ WeightMaps down,
             const __grid_constant__ typename Tile::Task task) {
    extern __shared__ __align__(1024) std::uint8_t shared[];
    std::uint8_t* const behind_stages = shared + task.num_stages * task.stage_bytes;
    std::uint8_t* const behind_shared = behind_stages + Tile::kShape.partial_bytes() + sizeof(MmaShared);
    const MmaBlock<Tile> block{task,
                               ptx::shared_address(shared),
                               reinterpret_cast<float4*>(behind_stages),
                               *reinterpret_cast<MmaShared*>(behind_stages + Tile::kShape.partial_bytes()),
                               *reinterpret_cast<FewTokens*>(behind_shared),
                               reinterpret_cast<std::uint16_t*>(behind_shared + sizeof(FewTokens))};
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const Lane lane(static_cast<int>(threadIdx.x) % 32);
    constexpr int kLoaders = 2;  // of weights and of tokens
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < task.num_stages; ++stage) {
            ptx::mbarrier_init(ptx::shared_address(&block.shared.full[stage]), kLoaders);
            ptx::mbarrier_init(ptx::shared_address(&block.shared.empty[stage]), Tile::kConsumers * 32);
        }
        for (int slot = 0; slot < kMaxItems; ++slot) {
            ptx::mbarrier_init(ptx::shared_address(&block.shared.posted[slot]), 1);
            ptx::mbarrier_init(ptx::shared_address(&block.shared.done[slot]), Tile::kConsumers);
            // By those who did not post it: loaders, and who publishes.
            ptx::mbarrier_init(ptx::shared_address(&block.shared.free[slot]), kLoaders);
        }
        ptx::mbarrier_init_fence();
        for (const WeightMaps* maps : {&gate_up, &down}) {
            ptx::prefetch_tensor_map(&maps->codes);
            ptx::prefetch_tensor_map(&maps->scales);
        }
    }
    __syncthreads();
    ptx::wait_for_previous_kernel();
    ptx::allow_next_kernel();
    if (warp < Tile::kConsumers) {
        ptx::raise_register_limit<Tile::kShape.consumer_registers()>();
        if constexpr (Tile::kHasFewTokens) {
            encode_tokens<Tile::Format::kF16, Tile::kConsumers * 32>(task.encode, block.x, task.x_pitch());
            asm volatile("bar.sync 1, %0;" ::"n"(Tile::kConsumers * 32) : "memory");
        }
        multiply<Tile>(block, warp, lane);
    } else {
        ptx::lower_register_limit<MmaShape::kProducerRegisters>();
        const int role = warp - Tile::kConsumers;
        if (role == 0) load_tokens<Tile>(block, lane.index);
        if (role == 1) load_weights<Tile>(block, gate_up, down, lane.index);
        if (role == 2 && lane.index == 0) publish_tiles<Tile>(block);
    }
}

template <class Format, int... kIndices>
MmaKernels mma_kernels(std::integer_sequence<int, kIndices...>) {
    return {{mma_gemm<MmaTile<Format, kIndices>>...}, mma_gemm<MmaTile<Format, 0, MmaFewTokensTask>>};
}
template <class Format>
MmaKernels mma_kernels() {
    return mma_kernels<Format>(std::make_integer_sequence<int, kNumMmaShapes>());
}

}  // namespace moe4::cuda::sm90
