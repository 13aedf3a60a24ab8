// Groups slots by expert and encodes rows.
//
// Grouping is a counting sort by one block: each warp owns a stretch of slots and counts them by expert, two
// prefix sums turn the counts into places. No atomics, so the order of rows is the same in every run.
#include "backends/cuda/smxx/arrange.hpp"

#include <algorithm>
#include <cub/block/block_scan.cuh>

#include "backends/cuda/k_order.cuh"
#include "backends/cuda/launch.cuh"
#include "backends/cuda/ptx/dependent_launch.cuh"
#include "backends/cuda/quantize.cuh"
#include "backends/cuda/smxx/few_slots.cuh"

namespace moe4::cuda {

namespace {

constexpr int kThreads = 1024;
constexpr int kEncodeThreads = 128;
constexpr int kCounters = 8192;  // warps that count x experts
constexpr unsigned kAllLanes = 0xFFFFFFFFU;

struct ExpertPlace {
    std::int32_t rows, segments;
};
struct SumPlaces {
    __device__ ExpertPlace operator()(ExpertPlace a, ExpertPlace b) const {
        return {a.rows + b.rows, a.segments + b.segments};
    }
};

class Grouper {
public:
    __device__ Grouper(const GroupTask& task, std::int32_t* counters)
        : task_(task),
          counters_(counters),
          num_warps_(min(min(kThreads / 32, kCounters / task.num_held),
                         static_cast<int>((task.num_slots + 31) / 32))),
          warp_(static_cast<int>(threadIdx.x) / 32),
          lane_(static_cast<int>(threadIdx.x) % 32) {}

    __device__ void run() {
        for (int i = static_cast<int>(threadIdx.x); i < num_warps_ * task_.num_held; i += kThreads)
            counters_[i] = 0;
        for (std::int64_t i = threadIdx.x; i < task_.num_cleared; i += kThreads) task_.cleared[i] = 0;
        __syncthreads();
        if (warp_ < num_warps_) count();
        __syncthreads();
        place_experts();
        __syncthreads();
        if (warp_ < num_warps_) place_slots();
    }

private:
    __device__ std::int32_t held_expert(std::int64_t slot, std::int64_t last) const {
        if (slot >= last) return -1;
        const std::int32_t id = task_.top_k_ids[slot];
        const bool is_held = id >= task_.first_expert && id - task_.first_expert < task_.num_held;
        return is_held ? id - task_.first_expert : -1;
    }

    /// visit(slot, its expert or -1, whether it is one) by all lanes for this warp's slots, in order.
    template <class Visit>
    __device__ void for_each_slot(const Visit& visit) {
        constexpr int kAhead = 8;  // loads in flight
        const std::int64_t stretch = round_up((task_.num_slots + num_warps_ - 1) / num_warps_, 32);
        const std::int64_t last = min(task_.num_slots, (warp_ + 1) * stretch);
        for (std::int64_t first = warp_ * stretch; first < last; first += 32 * kAhead) {
            std::int32_t experts[kAhead];
#pragma unroll
            for (int i = 0; i < kAhead; ++i) experts[i] = held_expert(first + i * 32 + lane_, last);
#pragma unroll
            for (int i = 0; i < kAhead; ++i) {
                const std::int64_t slot = first + i * 32 + lane_;
                if (slot - lane_ < last) visit(slot, experts[i], slot < last);
            }
        }
    }

    /// The order of these additions does not show in the sums.
    __device__ void count() {
        std::int32_t* counters = counters_ + warp_ * task_.num_held;
        for_each_slot([&](std::int64_t, std::int32_t expert, bool) {
            if (expert >= 0) atomicAdd(counters + expert, 1);
        });
    }

    /// The lanes with the same expert. Ballots on its bits: match.any costs a multiprocessor far more.
    __device__ unsigned same_expert(std::int32_t expert) const {
        unsigned same = kAllLanes;
        for (int bit = 0; bit == 0 || (task_.num_held >> (bit - 1)) != 0;
             ++bit) {  // one more, which -1 alone has
            const bool is_set = (expert >> bit & 1) != 0;
            const unsigned set = __ballot_sync(kAllLanes, is_set);
            same &= is_set ? set : ~set;
        }
        return same;
    }

    __device__ void place_slots() {
        std::int32_t* places = counters_ + warp_ * task_.num_held;
        for_each_slot([&](std::int64_t slot, std::int32_t expert, bool is_slot) {
            const unsigned same = same_expert(expert);
            const int rank = __popc(same & ((1U << lane_) - 1U));
            const std::int32_t row = expert >= 0 ? places[expert] + rank : -1;
            __syncwarp();
            if (expert >= 0 && rank == 0) places[expert] += __popc(same);
            __syncwarp();
            if (is_slot) write(slot, expert, row);
        });
    }

    /// Turns the counters into the first place of each (warp, expert), and writes the segments.
    __device__ void place_experts() {
        using Scan = cub::BlockScan<ExpertPlace, kThreads>;
        __shared__ typename Scan::TempStorage storage;
        const int expert = static_cast<int>(threadIdx.x);
        ExpertPlace mine{0, 0};
        if (expert < task_.num_held) {
            for (int w = 0; w < num_warps_; ++w) mine.rows += counters_[w * task_.num_held + expert];
            mine.segments = (mine.rows + task_.largest_segment - 1) / task_.largest_segment;
        }
        ExpertPlace before{0, 0};
        ExpertPlace all{0, 0};
        Scan(storage).ExclusiveScan(mine, before, ExpertPlace{0, 0}, SumPlaces{}, all);
        if (threadIdx.x == 0) {
            *task_.out.num_rows = all.rows;
            *task_.out.num_segments = all.segments;
        }
        if (expert >= task_.num_held || mine.rows == 0) return;
        std::int32_t place = before.rows;
        for (int w = 0; w < num_warps_; ++w) {
            const std::int32_t count = counters_[w * task_.num_held + expert];
            counters_[w * task_.num_held + expert] = place;
            place += count;
        }
        const std::int32_t size = segment_size(mine.rows, mine.segments, task_.largest_segment);
        for (std::int32_t s = 0; s < mine.segments; ++s) {
            const std::int32_t rows = max(0, min(size, mine.rows - s * size));
            task_.out.segments[before.segments + s] = {expert, before.rows + s * size, rows, 0};
        }
    }

    __device__ void write(std::int64_t slot, std::int32_t expert, std::int32_t row) {
        task_.out.slot_row[slot] = row;
        if (row < 0) return;
        if (task_.out.row_token != nullptr)
            task_.out.row_token[row] = static_cast<std::int32_t>(slot) / task_.top_k;
        if (task_.out.row_expert != nullptr) task_.out.row_expert[row] = expert;
    }

    const GroupTask& task_;
    std::int32_t* counters_;  // [num_warps][num_held]
    int num_warps_, warp_, lane_;
};

__device__ void group_slots(const GroupTask& task) {
    __shared__ std::int32_t counters[kCounters];
    if (task.num_slots <= kThreads && (task.num_slots + 31) / 32 * task.num_held <= kCounters)
        FewSlotsGrouper(task, counters).run();
    else
        Grouper(task, counters).run();
}

/// Sixteen values of a row, k = 256 chunk + 64 quad + 16 block onwards.
struct BlockPlace {
    std::int64_t chunk;
    int quad, block;
    __device__ explicit BlockPlace(std::int64_t index)
        : chunk(index / 16), quad(static_cast<int>(index) % 4), block(static_cast<int>(index) / 4 % 4) {}
    __device__ std::int64_t first_k() const { return chunk * kChunk + quad * 64 + block * 16; }
    /// Where the pair (n, n + 4) of word 0 or 1 of the block lies in a permuted row, in pairs.
    __device__ std::int64_t pair(int word, int n) const {
        return (chunk * kChunk + (block * 2 + word) * 32 + n / 2 * 16 + n % 2 * 8 + quad * 2) / 2;
    }
};

__device__ void load_block(const std::uint16_t* from, float (&x)[16]) {
    const uint4 low = reinterpret_cast<const uint4*>(from)[0];
    const uint4 high = reinterpret_cast<const uint4*>(from)[1];
    const std::uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        x[2 * i] = __uint_as_float(words[i] << 16);
        x[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000U);
    }
}

__device__ void quantize_block(float (&x)[16], float global_scale) {
    std::uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < 16; ++i) largest = max(largest, magnitude_bits(x[i]));
    const BlockQuantizer quantizer(largest, global_scale, 1.0F / global_scale);
#pragma unroll
    for (int i = 0; i < 16; ++i) x[i] = quantizer.value(x[i]);
}

/// Lane t of a quad has the pairs of its own k, and leaves with pair t of all four lanes: those lie side by
/// side.
__device__ void transpose_in_quad(std::uint32_t (&pairs)[4]) {
    const unsigned lane = threadIdx.x % 32;
    const unsigned quad = 0xFU << (lane & ~3U);
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
        const bool is_upper = (lane & static_cast<unsigned>(step)) != 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if ((i & step) != 0) continue;
            const std::uint32_t sent = is_upper ? pairs[i] : pairs[i + step];
            const std::uint32_t received = __shfl_xor_sync(quad, sent, step);
            (is_upper ? pairs[i] : pairs[i + step]) = received;
        }
    }
}

/// A lane's share of a quad's blocks: eight values that lie side by side, of word 0 and of word 1.
struct PermutedBlock {
    uint4 words[2];
};

/// By whole quads.
template <bool kF16>
__device__ PermutedBlock permute_block(const float (&x)[16]) {
    PermutedBlock block;
#pragma unroll
    for (int word = 0; word < 2; ++word) {
        std::uint32_t pairs[4];
#pragma unroll
        for (int n = 0; n < 4; ++n) pairs[n] = pack_pair<kF16>(x[word * 8 + n], x[word * 8 + n + 4]);
        transpose_in_quad(pairs);
        block.words[word] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
    return block;
}

__device__ void store_block(std::uint16_t* row, const BlockPlace& place, const PermutedBlock& block) {
    const int n = place.quad;  // 8 (n % 2) + 16 (n / 2) is where its eight values begin
    std::uint16_t* const to = row + place.chunk * kChunk + place.block * 64 + n % 2 * 8 + n / 2 * 16;
    *reinterpret_cast<uint4*>(to) = block.words[0];
    *reinterpret_cast<uint4*>(to + 32) = block.words[1];
}

__device__ float scale_of_row(const EncodeTask& task, std::int64_t row, std::int64_t source) {
    if (task.row_scale != nullptr) return task.row_scale[source];
    return task.expert_scale[task.row_expert == nullptr ? 0 : task.row_expert[row]];
}

__device__ void zero_padding(const EncodeTask& task, std::int64_t thread, std::int64_t num_threads) {
    const std::int64_t width = permuted_size(task.padded_cols);
    const std::int64_t pairs = (width - task.padded_cols) / 2;
    for (std::int64_t i = thread; i < task.num_padded_rows * pairs; i += num_threads) {
        // The pairs (n, n + 4) of the eights behind the last k.
        const std::int64_t k = task.padded_cols + i % pairs / 4 * 8 + i % 4;
        auto* pair = task.padded_rows + i / pairs * width + permuted_position(static_cast<int>(k));
        *reinterpret_cast<std::uint32_t*>(pair) = 0;
    }
}

/// Part `part` of `num_parts` blocks of threads: whole rows, a thread a block of values.
template <bool kQuantizes>
__device__ void encode_rows(const EncodeTask& task, int part, int num_parts) {
    const std::int64_t width = permuted_size(task.cols);
    const int blocks = static_cast<int>(width / 16);
    const std::int64_t num_rows = task.device_num_rows == nullptr ? task.num_rows : *task.device_num_rows;
    for (std::int64_t row = part; row < num_rows; row += num_parts) {
        const std::int64_t source = task.source_row == nullptr ? row : task.source_row[row];
        const std::int32_t* const slot_row =
            task.slot_row == nullptr ? nullptr : task.slot_row + row * task.slots_per_row;
        for (int i = static_cast<int>(threadIdx.x); i < blocks; i += static_cast<int>(blockDim.x)) {
            const BlockPlace place(i);
            float x[16] = {};
            if (place.first_k() < task.cols) {
                load_block(task.source + source * task.cols + place.first_k(), x);
                if (kQuantizes) quantize_block(x, scale_of_row(task, row, source));
            }
            const PermutedBlock block = permute_block<kQuantizes>(x);
            if (slot_row == nullptr) store_block(task.rows + row * width, place, block);
            for (int j = 0; slot_row != nullptr && j < task.slots_per_row; ++j) {
                if (slot_row[j] >= 0) store_block(task.rows + slot_row[j] * width, place, block);
            }
        }
    }
    if (task.padded_rows != nullptr) {
        zero_padding(task, std::int64_t{part} * blockDim.x + threadIdx.x,
                     std::int64_t{num_parts} * blockDim.x);
    }
}

template <bool kQuantizes>
__global__ void __launch_bounds__(kThreads)
    group_and_encode_kernel(const GroupTask group, const EncodeTask encode) {
    ptx::wait_for_previous_kernel();
    ptx::allow_next_kernel();
    if (blockIdx.x == 0) return group_slots(group);
    encode_rows<kQuantizes>(encode, static_cast<int>(blockIdx.x) - 1, static_cast<int>(gridDim.x) - 1);
}

__global__ void __launch_bounds__(kThreads) group_kernel(const GroupTask task) {
    ptx::wait_for_previous_kernel();
    ptx::allow_next_kernel();
    group_slots(task);
}

template <bool kQuantizes>
__global__ void __launch_bounds__(kEncodeThreads) encode_kernel(const EncodeTask task) {
    ptx::wait_for_previous_kernel();
    ptx::allow_next_kernel();
    encode_rows<kQuantizes>(task, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
}

__global__ void __launch_bounds__(256) requantize_kernel(const RequantizeTask task) {
    ptx::wait_for_previous_kernel();
    ptx::allow_next_kernel();
    const std::int64_t width = permuted_size(task.cols);
    const std::int64_t blocks = width / 16;
    const std::int64_t num_rows = *task.num_rows;
    for (std::int64_t i = std::int64_t{blockIdx.x} * 256 + threadIdx.x; i < num_rows * blocks;
         i += std::int64_t{gridDim.x} * 256) {
        const BlockPlace place(i % blocks);
        std::uint16_t* row = task.rows + i / blocks * width;
        float x[16];
#pragma unroll
        for (int word = 0; word < 2; ++word) {
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                const std::uint32_t pair = reinterpret_cast<std::uint32_t*>(row)[place.pair(word, n)];
                x[word * 8 + n] = __uint_as_float(pair << 16);
                x[word * 8 + n + 4] = __uint_as_float(pair & 0xFFFF0000U);
            }
        }
        quantize_block(x, task.row_scale[i / blocks]);
        store_block(row, place, permute_block<true>(x));
    }
}

__global__ void __launch_bounds__(256) row_largest_kernel(const RowScaleTask task) {
    ptx::wait_for_previous_kernel();
    ptx::allow_next_kernel();
    __shared__ std::uint32_t largest_of_warp[8];
    const std::int64_t num_rows = task.num_rows == nullptr ? task.max_rows : *task.num_rows;
    for (std::int64_t row = blockIdx.x; row < num_rows; row += gridDim.x) {
        std::uint32_t largest = 0;
        for (std::int64_t k = threadIdx.x; k < task.cols; k += 256) {
            const std::uint32_t bits = (task.rows[row * task.stride + k] & 0x7FFFU) << 16;
            if (bits < kInfinityBits) largest = max(largest, bits);
        }
        largest = __reduce_max_sync(kAllLanes, largest);
        if (threadIdx.x % 32 == 0) largest_of_warp[threadIdx.x / 32] = largest;
        __syncthreads();
        if (threadIdx.x == 0) {
            for (const std::uint32_t other : largest_of_warp) largest = max(largest, other);
            if (task.shared_largest == nullptr)
                task.row_scale[row] = __fdiv_rn(__uint_as_float(largest), 2688.0F);
            else
                atomicMax(task.shared_largest, largest);  // of integers: any order gives the same
        }
        __syncthreads();
    }
}

__global__ void __launch_bounds__(256) spread_largest_kernel(const RowScaleTask task) {
    ptx::wait_for_previous_kernel();
    ptx::allow_next_kernel();
    const std::int64_t num_rows = task.num_rows == nullptr ? task.max_rows : *task.num_rows;
    const float scale = __fdiv_rn(__uint_as_float(*task.shared_largest), 2688.0F);
    for (std::int64_t row = std::int64_t{blockIdx.x} * 256 + threadIdx.x; row < num_rows;
         row += std::int64_t{gridDim.x} * 256)
        task.row_scale[row] = scale;
}

/// Blocks for so many threads' worth of work, at most what fills a large GPU a few times over.
unsigned blocks_for(std::int64_t work, int threads) {
    const std::int64_t blocks = (work + threads - 1) / threads;
    return static_cast<unsigned>(blocks < 1 ? 1 : blocks > 2048 ? 2048 : blocks);
}

/// Blocks of threads for rows to encode and padding to clear.
unsigned encode_blocks(const EncodeTask& task, int threads) {
    const std::int64_t padding = permuted_size(task.padded_cols) - task.padded_cols;
    return std::max(blocks_for(task.num_rows, 1), blocks_for(task.num_padded_rows * padding / 2, threads));
}

}  // namespace

void group_and_encode(const GroupTask& group, const EncodeTask& encode, cudaStream_t stream) {
    const dim3 grid(1 + encode_blocks(encode, kThreads));
    launch(encode.quantizes ? group_and_encode_kernel<true> : group_and_encode_kernel<false>, grid, kThreads,
           0, stream, group, encode);
}

void group(const GroupTask& task, cudaStream_t stream) {
    launch(group_kernel, dim3(1), kThreads, 0, stream, task);
}

void encode(const EncodeTask& task, cudaStream_t stream) {
    launch(task.quantizes ? encode_kernel<true> : encode_kernel<false>,
           dim3(encode_blocks(task, kEncodeThreads)), kEncodeThreads, 0, stream, task);
}

void requantize(const RequantizeTask& task, cudaStream_t stream) {
    launch(requantize_kernel, dim3(blocks_for(task.max_rows * permuted_size(task.cols) / 16, 256)), 256, 0,
           stream, task);
}

void scale_rows(const RowScaleTask& task, cudaStream_t stream) {
    launch(row_largest_kernel, dim3(blocks_for(task.max_rows, 1)), 256, 0, stream, task);
    if (task.shared_largest != nullptr)
        launch(spread_largest_kernel, dim3(blocks_for(task.max_rows, 256)), 256, 0, stream, task);
}

}  // namespace moe4::cuda
