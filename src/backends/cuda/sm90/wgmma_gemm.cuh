#pragma once
// The two GEMMs of a layer for many rows an expert, in one kernel: wgmma with weights from registers
// (decode.cuh) as the M operand and token rows from shared memory. Persistent blocks claim items as in
// mma_gemm.cuh, tiles of weight rows innermost, so that tokens stay in L2. Of four warps one loads tokens,
// one claims items and loads weights, one plans, one publishes; the other warpgroups multiply, one or two m64
// tiles each (wgmma_shape.hpp).
//
// While the tensor cores work on a group of one or two words of every row (two k16 steps each), the next one
// is decoded into the other half of the A registers, and words behind that come from shared memory.
//
// Which weight row is which row of an m64 tile is free to choose:
//     gate_up: warp t of a warpgroup has indices 64 t + 8 u + g of a 256-chunk for unit u (an m64 tile of the
//         block), gate in row g and up in row g + 8. All of the quad's k of a block of h's permuted row
//         (k_order.hpp) are then made together, and the activation where the sums are.
//     down: a lane's rows lie next to each other.
// The tensor maps put them into shared memory so that a quad's rows follow each other, as the swizzle wants.
#include "backends/cuda/ptx/register_limit.cuh"
#include "backends/cuda/sm90/wgmma_epilogue.cuh"

namespace moe4::cuda::sm90 {

template <class Format_, int kShapeIndex>
struct WgmmaTile {
    using Format = Format_;
    static constexpr WgmmaShape kShape = kWgmmaShapes[kShapeIndex];
    static constexpr int kMTiles = kShape.m_tiles;
    static constexpr int kTokenTiles = kShape.tile_tokens / 8;
    static constexpr int kPartTiles = kShape.exchange_tokens() / 8;
    static constexpr int kParts = (kTokenTiles + kPartTiles - 1) / kPartTiles;
    static constexpr int kRows = kShape.rows();  // of weights
    using Sums = float[kMTiles][kTokenTiles][4];
    static constexpr int kGroupWords = kShape.group_words;
    static constexpr int kTokenWords = kShape.token_k / 32;        // of a stage
    using Fragments = std::uint32_t[2 * kGroupWords][kMTiles][4];  // [k16 step]

    /// gate_up: tiles of a whole chunk of 256 indices, so that h's padding is written too.
    __device__ static int num_gate_up_tiles(int out_size) {
        return (out_size + kChunk - 1) / kChunk * (kChunk / (kRows / 2));
    }
    __device__ static int num_down_tiles(int out_size) { return (out_size + kRows - 1) / kRows; }
    /// The index of a gate_up tile's first row; there are kRows / 8 from it on, and from 64, 128 and 192
    /// behind it.
    __device__ static int first_index(int tile) {
        constexpr int kTilesOfChunk = kChunk / (kRows / 2);
        return tile / kTilesOfChunk * kChunk + tile % kTilesOfChunk * (kRows / 8);
    }
    /// Which of down's groups of adjacent rows is a lane's.
    __device__ static int lane_group(const Consumer& me) {
        return (me.warpgroup * 4 + me.warp) * 8 + me.lane.g;
    }
};

/// The rows of shared memory that are a lane's: row g of its first m16 tile, and the steps from there to row
/// g + 8 and to the next tile.
struct LaneRows {
    int first, half_step, tile_step;
    template <class Tile>
    __device__ static LaneRows of(Half half, const Consumer& me) {
        if (half == Half::gate_up) {
            const int first = me.warp * (Tile::kRows / 8) + me.warpgroup * 8 * Tile::kMTiles + me.lane.g;
            return {first, Tile::kRows / 2, 8};
        }
        return {Tile::lane_group(me), Tile::kRows / (2 * Tile::kMTiles), Tile::kRows / 2};
    }
};

/// Shared memory, as addresses: rings of weights and tokens, a full and an empty barrier a stage; plans of
/// items, with a barrier for each step of an item's life.
template <WgmmaShape kShape>
struct WgmmaShared {
    std::uint32_t codes, tokens, scales, exchange, plans, barriers;
    __device__ explicit WgmmaShared(std::uint32_t base)
        : codes(base),
          tokens(codes + kShape.weight_stages * kShape.code_bytes()),
          scales(tokens + kShape.token_stages * kShape.token_bytes()),
          exchange(scales + kShape.weight_stages * kShape.scale_bytes()),
          plans(exchange + kShape.num_exchanges() * kShape.exchange_bytes()),
          barriers(plans + kPlanSlots * kShape.plan_bytes()) {}
    __device__ std::uint32_t barrier(int i) const { return barriers + ptx::kMbarrierBytes * i; }
    __device__ TilePlan plan(int slot) const { return {plans + slot * kShape.plan_bytes()}; }
    __device__ std::uint32_t weights_full(int stage) const { return barrier(stage); }
    __device__ std::uint32_t weights_empty(int stage) const { return barrier(8 + stage); }
    __device__ std::uint32_t tokens_full(int stage) const { return barrier(16 + stage); }
    __device__ std::uint32_t tokens_empty(int stage) const { return barrier(24 + stage); }
    __device__ std::uint32_t posted(int slot) const { return barrier(32 + slot); }
    __device__ std::uint32_t planned(int slot) const { return barrier(34 + slot); }
    __device__ std::uint32_t done(int slot) const { return barrier(36 + slot); }
    __device__ std::uint32_t free(int slot) const { return barrier(38 + slot); }
    static_assert(kShape.weight_stages <= 8 && kShape.token_stages <= 8 && kPlanSlots == 2);
    static_assert(kShape.token_stages * kShape.token_k % kChunk == 0);

    /// The item of this slot, once there is one.
    __device__ Item await_item(const RingPosition& slot) const {
        ptx::mbarrier_wait(posted(slot.stage), slot.parity);
        return plan(slot.stage).item();
    }
};

/// The items of a launch in the order in which they are claimed.
template <class Tile>
class WgmmaItems {
public:
    __device__ explicit WgmmaItems(const WgmmaTask& task)
        : task_(task),
          gate_up_tiles_(Tile::num_gate_up_tiles(task.gate_up.out_size)),
          down_tiles_(Tile::num_down_tiles(task.down.out_size)) {
        const int num_segments = __ldcg(task.gate_up.num_segments);
        num_gate_up_ = task.runs_gate_up ? num_segments * gate_up_tiles_ : 0;
        num_items_ = num_gate_up_ + (task.runs_down ? num_segments * down_tiles_ : 0);
    }

    __device__ Item claim() const {
        const int index = atomicAdd(task_.next_item, 1);
        if (index >= num_items_) return {{}, 0, 0, Half::none};
        const bool is_gate_up = index < num_gate_up_;
        const int i = is_gate_up ? index : index - num_gate_up_;
        const int num_tiles = is_gate_up ? gate_up_tiles_ : down_tiles_;
        const int segment = i / num_tiles;
        return {load_segment(task_.gate_up.segments + segment), segment, i % num_tiles,
                is_gate_up ? Half::gate_up : Half::down};
    }

private:
    const WgmmaTask& task_;
    int gate_up_tiles_, down_tiles_;
    int num_gate_up_, num_items_;
};

/// One thread: claims items and loads their weights.
template <class Tile, class Shared>
__device__ void load_wgmma_weights(const WgmmaTask& task, const Shared& shared, const WgmmaMaps& maps) {
    constexpr WgmmaShape kShape = Tile::kShape;
    const WgmmaItems<Tile> items(task);
    RingPosition at;
    Item item = items.claim();
    for (RingPosition slot;; slot.advance(kPlanSlots)) {
        ptx::mbarrier_wait(shared.free(slot.stage), slot.parity ^ 1);
        shared.plan(slot.stage).post(item);
        ptx::mbarrier_arrive(shared.posted(slot.stage));
        if (item.half == Half::none) return;
        const bool is_gate_up = item.half == Half::gate_up;
        const WeightMaps& map = is_gate_up ? maps.gate_up : maps.down;
        const int num_chunks = (is_gate_up ? task.gate_up : task.down).num_chunks;
        const int expert = item.segment.expert;
        const int first = is_gate_up ? Tile::first_index(item.tile) : 0;
        const int y = is_gate_up ? first % 64 : item.tile * (Tile::kRows / (2 * Tile::kMTiles));
        for (int chunk = 0; chunk < num_chunks; ++chunk) {
            // Late, so that items go to whoever comes first; while the ring is full.
            if (chunk == num_chunks - 1) item = items.claim();
            const std::uint32_t full = shared.weights_full(at.stage);
            ptx::mbarrier_wait(shared.weights_empty(at.stage), at.parity ^ 1);
            ptx::mbarrier_arrive_expect(full, kShape.code_bytes() + kShape.scale_bytes());
            ptx::tensor_copy_5d(
                shared.scales + at.stage * kShape.scale_bytes(), &map.scales,
                {0, is_gate_up ? y / 8 : y, first / 64, is_gate_up ? 2 * chunk : chunk, expert}, full);
            ptx::tensor_copy_5d(shared.codes + at.stage * kShape.code_bytes(), &map.codes,
                                {chunk * (kChunk / 2), y, first / 64, 0, expert}, full);
            at.advance(kShape.weight_stages);
        }
    }
}

/// One thread.
template <class Tile, class Shared>
__device__ void load_wgmma_tokens(const WgmmaTask& task, const Shared& shared, const WgmmaMaps& maps) {
    constexpr WgmmaShape kShape = Tile::kShape;
    RingPosition at;
    for (RingPosition slot;; slot.advance(kPlanSlots)) {
        const Item item = shared.await_item(slot);
        ptx::mbarrier_arrive(shared.free(slot.stage));
        if (item.half == Half::none) return;
        const bool is_gate_up = item.half == Half::gate_up;
        if (!is_gate_up && task.runs_gate_up) {
            await_tiles(task.finished_tiles + item.segment_index,
                        Tile::num_gate_up_tiles(task.gate_up.out_size));
            ptx::order_before_async_copies();
        }
        const TokenMaps& rows_map = is_gate_up ? maps.x : maps.h;
        const int num_stages = (is_gate_up ? task.gate_up : task.down).num_chunks * (kChunk / kShape.token_k);
        const int box = (item.segment.num_rows - 1) / kTokenBoxStep;
        const int bytes = (box + 1) * kTokenBoxStep * kShape.token_k * 2;
        for (int stage = 0; stage < num_stages; ++stage) {
            const std::uint32_t full = shared.tokens_full(at.stage);
            ptx::mbarrier_wait(shared.tokens_empty(at.stage), at.parity ^ 1);
            ptx::mbarrier_arrive_expect(full, bytes);
            for (int slab = 0; slab < kShape.token_k / 64; ++slab) {
                const std::uint32_t to =
                    shared.tokens + at.stage * kShape.token_bytes() + slab * kShape.slab_bytes();
                ptx::tensor_copy_2d(to, &rows_map.of_boxes[box], stage * kShape.token_k + slab * 64,
                                    item.segment.first_row, full);
            }
            at.advance(kShape.token_stages);
        }
    }
}

/// A warp writes the factors of each item, while the others multiply.
template <class Tile, class Shared>
__device__ void plan_items(const WgmmaTask& task, const Shared& shared, int lane) {
    using Format = typename Tile::Format;
    for (RingPosition slot;; slot.advance(kPlanSlots)) {
        const Item item = shared.await_item(slot);
        if (item.half == Half::none) return;
        const TilePlan plan = shared.plan(slot.stage);
        if (item.half == Half::gate_up)
            plan.write_factors<true, Format>(task.gate_up, item.segment, lane);
        else
            plan.write_factors<false, Format>(task.down, item.segment, lane);
        ptx::mbarrier_arrive(shared.planned(slot.stage));
    }
}

/// One thread: what this block's consumers have stored becomes visible to the blocks that wait for it. Not
/// the consumers' work: the fence lasts until the stores have arrived.
template <class Shared>
__device__ void publish_items(const WgmmaTask& task, const Shared& shared) {
    for (RingPosition slot;; slot.advance(kPlanSlots)) {
        const Item item = shared.await_item(slot);
        if (item.half == Half::none) return;
        ptx::mbarrier_wait(shared.done(slot.stage), slot.parity);
        if (item.half == Half::gate_up) {
            __threadfence();
            atomicAdd(task.finished_tiles + item.segment_index, 1);
        }
        ptx::mbarrier_arrive(shared.free(slot.stage));
    }
}

/// A lane's share of a word of every row, as the A registers of two k16 steps.
template <class Tile, int kWords>
__device__ __forceinline__ void decode_words(std::uint32_t (*a)[Tile::kMTiles][4],
                                             const std::uint32_t (&words)[Tile::kMTiles][2][kWords],
                                             const std::uint32_t (&scales)[Tile::kMTiles][2], int word) {
#pragma unroll
    for (int m = 0; m < Tile::kMTiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const DecodedWord w = Tile::Format::decode(words[m][half][word], scales[m][half]);
            a[0][m][half] = w.step0[0];
            a[0][m][2 + half] = w.step0[1];
            a[1][m][half] = w.step1[0];
            a[1][m][2 + half] = w.step1[1];
        }
    }
}

/// The compiler knows nothing of the asynchrony: keeps it from moving a use of the sums before the wait.
template <class Tile>
__device__ __forceinline__ void keep_behind(typename Tile::Sums& sums) {
#pragma unroll
    for (int m = 0; m < Tile::kMTiles; ++m) {
#pragma unroll
        for (int n = 0; n < Tile::kTokenTiles; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(sums[m][n][i])::"memory");
        }
    }
}

struct WgmmaRings {
    RingPosition slot, weights, tokens;
};

/// Weights on their way from shared memory to the registers, some words ahead of the multiplication.
template <class Tile>
struct WeightWords {
    static constexpr int kAhead = Tile::kMTiles == 1 ? 4 : 2;  // as many as registers allow
    std::uint32_t words[2][Tile::kMTiles][2][kAhead];          // [which half of the pipeline]
    std::uint32_t four_scales[Tile::kMTiles][2];
    std::uint32_t code_offset, scale_offset;  // of the lane's first row in a stage
    int half_step, tile_step;

    __device__ WeightWords(const LaneRows& rows, const Lane& lane)
        : code_offset(rows.first * 128 + ((2 * lane.t ^ lane.g) << 4)),
          scale_offset(rows.first * 16 + 4 * lane.t),
          half_step(Tile::kMTiles == 1 ? Tile::kRows / 2 : rows.half_step),
          tile_step(rows.tile_step) {
        // Else ptxas makes it anew for every chunk, of four values in local memory.
        asm volatile("" : "+r"(scale_offset));
    }

    /// Words i * kAhead and on of a chunk; its scales with the first.
    template <class Shared>
    __device__ __forceinline__ void load(const Shared& shared, int stage, int i) {
        const int word = i * kAhead;
        const std::uint32_t codes =
            (shared.codes + stage * Tile::kShape.code_bytes() + code_offset ^ word / 4 * 16) + word % 4 * 4;
        const std::uint32_t scales = shared.scales + stage * Tile::kShape.scale_bytes() + scale_offset;
#pragma unroll
        for (int m = 0; m < Tile::kMTiles; ++m) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = m * tile_step + half * half_step;
                if (i == 0) four_scales[m][half] = load_shared_word(scales + row * 16);
                load_shared_vector(words[i % 2][m][half], codes + row * 128);
            }
        }
    }
};

/// sums = weight rows x tokens of an item.
template <class Tile, class Shared>
__device__ __forceinline__ void multiply_wgmma_item(typename Tile::Sums& sums, const Shared& shared,
                                                    WgmmaRings& at, const LaneRows& rows, int num_chunks,
                                                    int num_tokens, const Lane& lane) {
    using Format = typename Tile::Format;
    using Words = WeightWords<Tile>;
    constexpr WgmmaShape kShape = Tile::kShape;
    constexpr int kGroupWords = Tile::kGroupWords, kTokenWords = Tile::kTokenWords;
    constexpr int kStagesOfChunk = 8 / kTokenWords;
    static_assert(kTokenWords > kGroupWords, "a stage is released behind the next one's first group");
    const auto release_tokens = [&](std::uint32_t empty) {
        if (lane.index == 0) ptx::mbarrier_arrive(empty);
    };
    std::uint32_t last_empty = 0;   // of the chunk before
    typename Tile::Fragments a[2];  // which half of the pipeline
    Words weights(rows, lane);
    const auto load_first_words = [&] {
        ptx::mbarrier_wait(shared.weights_full(at.weights.stage), at.weights.parity);
        weights.load(shared, at.weights.stage, 0);
    };
    load_first_words();
    const std::uint32_t leaf = __shfl_sync(0xFFFFFFFFU, ptx::wgmma_leaf(sums, num_tokens), 0);
#pragma unroll 1
    for (int chunk = 0; chunk < num_chunks; ++chunk) {
        std::uint32_t scales[Tile::kMTiles][2];
        const std::uint32_t full = shared.tokens_full(at.tokens.stage);
        const std::uint32_t empty = shared.tokens_empty(at.tokens.stage);
        const std::uint32_t tokens =
            ptx::wgmma_descriptor(shared.tokens + at.tokens.stage * kShape.token_bytes());
#pragma unroll
        for (int word = 0; word < 8; word += kGroupWords) {
            const int stage = word / kTokenWords;  // of the chunk's tokens
            if (word % Words::kAhead == 0 && word + Words::kAhead < 8)
                weights.load(shared, at.weights.stage, word / Words::kAhead + 1);
            if (word + 2 * Words::kAhead == 8) {  // all in registers: the stage may be filled again
                __syncwarp();
                if (lane.index == 0) ptx::mbarrier_arrive(shared.weights_empty(at.weights.stage));
            }
#pragma unroll
            for (int i = 0; i < 2 * Tile::kMTiles && word % 2 == 0; ++i)
                scales[i / 2][i % 2] = Format::scale(weights.four_scales[i / 2][i % 2], word / 2);
            if (word + kGroupWords == 8) {
                at.weights.advance(kShape.weight_stages);
                if (chunk + 1 < num_chunks) load_first_words();
            }
            ptx::wgmma_wait<1>();
            if (word % kTokenWords == kGroupWords && stage > 0)
                release_tokens(empty + (stage - 1) * ptx::kMbarrierBytes);
            if (word == kGroupWords && chunk > 0) release_tokens(last_empty);
            typename Tile::Fragments& now = a[word / kGroupWords % 2];
#pragma unroll
            for (int i = 0; i < kGroupWords; ++i)
                decode_words<Tile, Words::kAhead>(now + 2 * i, weights.words[(word + i) / Words::kAhead % 2],
                                                  scales, (word + i) % Words::kAhead);
            if (word % kTokenWords == 0)
                ptx::mbarrier_wait(full + stage * ptx::kMbarrierBytes, at.tokens.parity);
            const std::uint32_t step0 = tokens + word / 2 * (kShape.slab_bytes() / 16) + word % 2 * 4;
            if constexpr (Format::kF16)
                ptx::wgmma_group_f16(sums, now, step0, leaf);
            else
                ptx::wgmma_group_bf16(sums, now, step0, leaf);
        }
        last_empty = empty + (kStagesOfChunk - 1) * ptx::kMbarrierBytes;
        at.tokens.advance(kShape.token_stages, kStagesOfChunk);
    }
    ptx::wgmma_wait<0>();
    keep_behind<Tile>(sums);
    release_tokens(last_empty);
}

/// threadIdx.x anew: what is made of it is not kept in registers through the loop over K.
__device__ __forceinline__ int volatile_thread() {
    int thread;
    asm volatile("mov.u32 %0, %tid.x;" : "=r"(thread));
    return thread;
}

template <class Tile, class Shared>
__device__ __forceinline__ void multiply_wgmma(const WgmmaTask& task, const Shared& shared,
                                               const Consumer& me) {
    WgmmaRings at;
    for (;; at.slot.advance(kPlanSlots)) {
        ptx::mbarrier_wait(shared.posted(at.slot.stage), at.slot.parity);
        const TilePlan plan = shared.plan(at.slot.stage);
        const Half half = plan.half();
        if (half == Half::none) return;
        const int num_rows = plan.num_rows();
        const int num_chunks = (half == Half::gate_up ? task.gate_up : task.down).num_chunks;
        typename Tile::Sums sums = {};
        multiply_wgmma_item<Tile>(sums, shared, at, LaneRows::of<Tile>(half, me), num_chunks, num_rows,
                                  me.lane);
        ptx::mbarrier_wait(shared.planned(at.slot.stage), at.slot.parity);
        const Consumer finisher(volatile_thread());
        if (half == Half::gate_up)
            store_gate_up<Tile>(task.gate_up, plan, num_rows, sums, shared.exchange, finisher);
        else
            store_down<Tile>(task.down, plan, num_rows, sums, finisher);
        __syncwarp();  // else ptxas takes the lanes for diverged, and spills
        ptx::mbarrier_arrive(shared.done(at.slot.stage));
    }
}

template <class Tile>
__global__ void __launch_bounds__(Tile::kShape.threads(), 1)
    wgmma_gemm(const __grid_constant__ WgmmaMaps maps, const __grid_constant__ WgmmaTask task) {
    constexpr WgmmaShape kShape = Tile::kShape;
    constexpr int kConsumers = 4 * kShape.warpgroups;  // warps
    extern __shared__ __align__(1024) std::uint8_t shared_bytes[];
    const WgmmaShared<kShape> shared(ptx::shared_address(shared_bytes));
    const int thread = static_cast<int>(threadIdx.x);
    const int warp = thread / 32;
    if (thread == 0) {
        for (int stage = 0; stage < kShape.weight_stages; ++stage) {
            ptx::mbarrier_init(shared.weights_full(stage), 1);
            ptx::mbarrier_init(shared.weights_empty(stage), kConsumers);
        }
        for (int stage = 0; stage < kShape.token_stages; ++stage) {
            ptx::mbarrier_init(shared.tokens_full(stage), 1);
            ptx::mbarrier_init(shared.tokens_empty(stage), kConsumers);
        }
        for (int slot = 0; slot < kPlanSlots; ++slot) {
            ptx::mbarrier_init(shared.posted(slot), 1);
            ptx::mbarrier_init(shared.planned(slot), 32);
            ptx::mbarrier_init(shared.done(slot), kConsumers * 32);
            ptx::mbarrier_init(shared.free(slot), 2);  // tokens and publishing
        }
        ptx::mbarrier_init_fence();
    }
    __syncthreads();
    ptx::wait_for_previous_kernel();
    ptx::allow_next_kernel();
    if (warp < kConsumers) {
        ptx::raise_register_limit<kShape.consumer_registers>();
        multiply_wgmma<Tile>(task, shared, Consumer(thread));
    } else {
        ptx::lower_register_limit<kShape.producer_registers()>();
        const int role = warp - kConsumers;
        const int lane = thread % 32;
        if (role == 0 && lane == 0) load_wgmma_tokens<Tile>(task, shared, maps);
        if (role == 1 && lane == 0) load_wgmma_weights<Tile>(task, shared, maps);
        if (role == 2) plan_items<Tile>(task, shared, lane);
        if (role == 3 && lane == 0) publish_items(task, shared);
    }
}

template <class Format, int... kIndices>
WgmmaKernels wgmma_kernels(std::integer_sequence<int, kIndices...>) {
    return {{wgmma_gemm<WgmmaTile<Format, kIndices>>...}};
}
template <class Format>
WgmmaKernels wgmma_kernels() {
    return wgmma_kernels<Format>(std::make_integer_sequence<int, kNumWgmmaShapes>());
}

}  // namespace moe4::cuda::sm90
