#include "backends/cuda/forward.hpp"

#include <algorithm>
#include <iterator>
#include <optional>

#include "backends/cuda/launch.hpp"
#include "backends/cuda/sm90/wgmma_shape.hpp"
#include "backends/cuda/smxx/finalize.hpp"
#include "backends/cuda/smxx/row_scales.hpp"
#include "backends/cuda/workspace_layout.hpp"

namespace moe4::cuda {
namespace {

constexpr int kSharedBytes = 228 * 1024;   // of a multiprocessor
constexpr int kSharedBytesOfBlock = 1024;  // taken by the system

constexpr int shared_bytes_for(const sm90::MmaShape& shape) {
    return kSharedBytes / shape.blocks_per_sm - kSharedBytesOfBlock;
}
/// Of shared memory, beside the stages.
constexpr int fixed_bytes_of(const sm90::MmaShape& shape) {
    return shape.partial_bytes() + static_cast<int>(sizeof(sm90::MmaShared));
}
static_assert(std::all_of(std::begin(sm90::kMmaShapes), std::end(sm90::kMmaShapes),
                          [](const sm90::MmaShape& shape) {
                              return fixed_bytes_of(shape) + 2 * shape.stage_bytes(8 * shape.token_tiles) <=
                                     shared_bytes_for(shape);
                          }),
              "one stage loads while another is multiplied");

std::int64_t rows_per_expert(const Problem& problem, std::int64_t num_tokens) {
    return num_tokens * moe::slots_per_token(problem) / moe::held_experts(problem).count();
}

bool may_group_x(const Problem& problem, std::int64_t wgmma_min_rows) {
    return moe::has_expert_scales(problem) || rows_per_expert(problem, problem.max_tokens) >= wgmma_min_rows;
}

class Forward {
public:
    Forward(const PreparedLayer& layer, const ForwardInput& in, const GemmChoice& choice, cudaStream_t stream)
        : layer_(layer),
          in_(in),
          choice_(choice),
          stream_(stream),
          at_(workspace_layout(layer.problem, layer.top_k, may_group_x(layer.problem, layer.wgmma_min_rows))),
          hidden_size_(layer.problem.config.hidden_size),
          intermediate_size_(layer.problem.config.intermediate_size),
          num_slots_(in.num_tokens * layer.top_k) {}

    void run() const {
        if (const auto few = few_tokens_task()) return run_few_tokens(*few);
        if (has_dynamic_scales()) scale_x();
        arrange();
        if (has_dynamic_scales()) {
            multiply(true, false);
            requantize_h();
            multiply(false, true);
        } else {
            multiply(true, true);
        }
        combine(combine_task(), stream_);
    }

private:
    using Half = sm90::Half;

    template <class T>
    T* workspace(std::size_t offset) const {
        return reinterpret_cast<T*>(in_.workspace + offset);
    }
    bool is_w4a4() const { return layer_.problem.precision == Precision::w4a4; }
    bool has_dynamic_scales() const { return moe::has_dynamic_scales(layer_.problem); }
    bool has_one_scale() const { return layer_.problem.activation_scale == ActivationScale::dynamic; }
    bool groups_x() const { return choice_.uses_wgmma || moe::has_expert_scales(layer_.problem); }
    std::int32_t* num_segments() const { return workspace<std::int32_t>(at_.counts); }
    std::int32_t* num_rows() const { return num_segments() + 1; }
    std::uint32_t* largest_of_batch(Half half) const {
        return has_one_scale() ? workspace<std::uint32_t>(at_.counts) + (half == Half::gate_up ? 2 : 3)
                               : nullptr;
    }

    int largest_segment() const {
        const int tile = choice_.uses_wgmma ? wgmma_shape().tile_tokens : 8 * mma_shape().token_tiles;
        return static_cast<int>(std::min<std::int64_t>(tile, in_.num_tokens));
    }
    std::int64_t most_segments() const {
        return std::min(num_slots_, layer_.num_held() + num_slots_ / largest_segment());
    }
    const sm90::MmaShape& mma_shape() const { return sm90::kMmaShapes[choice_.mma_shape]; }

    const sm90::WgmmaShape& wgmma_shape() const { return sm90::kWgmmaShapes[choice_.wgmma_shape]; }

    Grouping grouping() const {
        const bool reads_row_token = !groups_x() || has_dynamic_scales();
        return {.num_segments = num_segments(),
                .num_rows = num_rows(),
                .segments = workspace<Segment>(at_.segments),
                .row_token = reads_row_token ? workspace<std::int32_t>(at_.row_token) : nullptr,
                .slot_row = workspace<std::int32_t>(at_.slot_row)};
    }

    void scale_x() const {
        if (has_one_scale())
            check(cudaMemsetAsync(num_segments(), 0, 16, stream_), "clearing the batch's largest magnitudes");
        scale_rows({.rows = in_.hidden,
                    .cols = hidden_size_,
                    .stride = hidden_size_,
                    .max_rows = in_.num_tokens,
                    .num_rows = nullptr,
                    .shared_largest = largest_of_batch(Half::gate_up),
                    .row_scale = workspace<float>(at_.token_scale)},
                   stream_);
    }

    GroupTask group_task() const {
        return {.top_k_ids = in_.top_k_ids,
                .num_slots = num_slots_,
                .top_k = layer_.top_k,
                .first_expert = layer_.held.first,
                .num_held = layer_.num_held(),
                .largest_segment = largest_segment(),
                .cleared = workspace<std::int32_t>(at_.progress),
                .num_cleared = 2 + most_segments(),
                .out = grouping()};
    }
    EncodeTask encode_task() const {
        return {.hidden = in_.hidden,
                .rows = workspace<std::uint16_t>(at_.x),
                .cols = hidden_size_,
                .num_tokens = in_.num_tokens,
                .quantizes = is_w4a4(),
                .token_scale = has_dynamic_scales() ? workspace<float>(at_.token_scale) : nullptr,
                .expert_scale = layer_.scales.input_scale,
                .scales_by_expert = moe::has_expert_scales(layer_.problem),
                .padded_rows = choice_.uses_wgmma ? nullptr : workspace<std::uint16_t>(at_.h),
                .padded_cols = intermediate_size_,
                .num_padded_rows = num_slots_};
    }
    CombineTask combine_task() const {
        return {.y = workspace<float>(at_.y),
                .slot_row = workspace<std::int32_t>(at_.slot_row),
                .top_k_weights = in_.top_k_weights,
                .num_tokens = in_.num_tokens,
                .top_k = layer_.top_k,
                .cols = hidden_size_,
                .out_f32 = in_.output_f32,
                .out_bf16 = in_.output_bf16};
    }

    void arrange() const {
        groups_x() ? group_and_scatter(group_task(), encode_task(), layer_.num_sms, stream_)
                   : group_and_encode(group_task(), encode_task(), stream_);
    }

    GroupedGemm gate_up() const {
        const bool is_calibrated = is_w4a4() && !has_dynamic_scales();
        return {.num_segments = num_segments(),
                .segments = workspace<Segment>(at_.segments),
                .rows = workspace<std::uint16_t>(at_.x),
                .row_stride = permuted_size(hidden_size_),
                .row_source = groups_x() ? nullptr : workspace<std::int32_t>(at_.row_token),
                .num_chunks = static_cast<std::int32_t>(permuted_size(hidden_size_) / kChunk),
                .out_size = static_cast<std::int32_t>(intermediate_size_),
                .factor = {layer_.scales.gate_factor, layer_.scales.up_factor},
                .global_scale = {layer_.scales.gate, layer_.scales.up},
                .row_scale = has_dynamic_scales() ? workspace<float>(at_.token_scale) : nullptr,
                .scale_row = workspace<std::int32_t>(at_.row_token),
                .out = workspace<void>(at_.h),
                .out_stride = permuted_size(intermediate_size_),
                .out_scale = is_calibrated ? layer_.scales.h_input_scale : nullptr,
                .activation = layer_.problem.config.activation};
    }

    GroupedGemm down() const {
        return {.num_segments = num_segments(),
                .segments = workspace<Segment>(at_.segments),
                .rows = workspace<std::uint16_t>(at_.h),
                .row_stride = permuted_size(intermediate_size_),
                .row_source = nullptr,
                .num_chunks = static_cast<std::int32_t>(permuted_size(intermediate_size_) / kChunk),
                .out_size = static_cast<std::int32_t>(hidden_size_),
                .factor = {layer_.scales.down_factor, nullptr},
                .global_scale = {layer_.scales.down, nullptr},
                .row_scale = has_dynamic_scales() ? workspace<float>(at_.h_scale) : nullptr,
                .scale_row = nullptr,
                .out = workspace<void>(at_.y),
                .out_stride = hidden_size_,
                .out_scale = nullptr,
                .activation = layer_.problem.config.activation};
    }

    void requantize_h() const {
        scale_rows({.rows = workspace<std::uint16_t>(at_.h),
                    .cols = permuted_size(intermediate_size_),
                    .stride = permuted_size(intermediate_size_),
                    .max_rows = num_slots_,
                    .num_rows = num_rows(),
                    .shared_largest = largest_of_batch(Half::down),
                    .row_scale = workspace<float>(at_.h_scale)},
                   stream_);
        requantize({.rows = workspace<std::uint16_t>(at_.h),
                    .cols = intermediate_size_,
                    .max_rows = num_slots_,
                    .num_rows = num_rows(),
                    .row_scale = workspace<float>(at_.h_scale)},
                   stream_);
    }

    void multiply(bool runs_gate_up, bool runs_down) const {
        choice_.uses_wgmma ? multiply_wgmma(runs_gate_up, runs_down) : multiply_mma(runs_gate_up, runs_down);
    }

    /// Of a kernel that needs `more_bytes` of shared memory besides.
    sm90::MmaTask mma_task(bool runs_gate_up, bool runs_down, std::int32_t* next_item,
                           std::int32_t* finished_tiles, int more_bytes) const {
        const sm90::MmaShape& shape = mma_shape();
        const int token_rows = largest_segment();
        const int stage_bytes = shape.stage_bytes(token_rows);
        const int left = shared_bytes_for(shape) - fixed_bytes_of(shape) - more_bytes;
        return {.gate_up = gate_up(),
                .down = down(),
                .runs_gate_up = runs_gate_up,
                .runs_down = runs_down,
                .next_item = next_item,
                .finished_tiles = finished_tiles,
                .num_stages = std::min(sm90::kMaxStages, left / stage_bytes),
                .stage_bytes = stage_bytes,
                .token_rows = token_rows};
    }

    template <class Kernel, class Task>
    void launch_mma(Kernel kernel, const Task& task, int more_bytes) const {
        const sm90::MmaShape& shape = mma_shape();
        const int shared_bytes = task.num_stages * task.stage_bytes + fixed_bytes_of(shape) + more_bytes;
        launch(kernel, dim3(static_cast<unsigned>(layer_.num_sms * shape.blocks_per_sm)), shape.threads(),
               static_cast<std::size_t>(shared_bytes), stream_, layer_.gate_up_maps[choice_.mma_shape],
               layer_.down_maps[choice_.mma_shape], task);
    }
    sm90::MmaKernels mma_kernels() const { return is_w4a4() ? sm90::mma_f16() : sm90::mma_bf16(); }

    void multiply_mma(bool runs_gate_up, bool runs_down) const {
        auto* const progress = workspace<std::int32_t>(at_.progress);
        launch_mma(mma_kernels().of_shape[choice_.mma_shape],
                   mma_task(runs_gate_up, runs_down, progress + (runs_gate_up ? 0 : 1), progress + 2, 0), 0);
    }

    /// Where a block can do by itself what else is done before the GEMMs, and hold x beside two stages. The
    /// sums are those of the kernels that run otherwise.
    std::optional<sm90::MmaFewTokensTask> few_tokens_task() const {
        const bool has_one_segment_an_expert = in_.num_tokens <= largest_segment();
        if (num_slots_ > kWarpSlots || !has_one_segment_an_expert || choice_.uses_wgmma ||
            choice_.mma_shape != 0 || groups_x() || has_dynamic_scales())
            return std::nullopt;
        sm90::MmaFewTokensTask task{{}, group_task(), encode_task()};
        static_cast<sm90::MmaTask&>(task) = mma_task(true, true, nullptr, nullptr, task.shared_bytes());
        if (task.num_stages < 2) return std::nullopt;
        sm90::RunCounters* const counters = layer_.counters->of(in_.workspace);
        if (counters == nullptr) return std::nullopt;
        task.next_item = counters->next_item;
        task.finished_tiles = counters->finished_tiles;
        task.group.cleared = counters->next_item;
        task.group.num_cleared = sizeof(*counters) / sizeof(std::int32_t);
        return task;
    }
    void run_few_tokens(const sm90::MmaFewTokensTask& task) const {
        launch_mma(mma_kernels().few_tokens, task, task.shared_bytes());
        combine_few_tokens(combine_task(), task.group, stream_);
    }

    void multiply_wgmma(bool runs_gate_up, bool runs_down) const {
        const sm90::WgmmaShape& shape = wgmma_shape();
        const sm90::WgmmaKernels kernels = is_w4a4() ? sm90::wgmma_f16() : sm90::wgmma_bf16();
        const auto token_maps = [&](const GroupedGemm& gemm) {
            sm90::TokenMaps maps{};
            for (int i = 0; (i + 1) * sm90::kTokenBoxStep <= shape.tile_tokens; ++i)
                maps.of_boxes[i] = row_tensor_map(gemm.rows, static_cast<std::uint64_t>(gemm.row_stride),
                                                  static_cast<std::uint64_t>(num_slots_), 64,
                                                  static_cast<std::uint32_t>((i + 1) * sm90::kTokenBoxStep));
            return maps;
        };
        auto* const progress = workspace<std::int32_t>(at_.progress);
        launch(kernels.of_shape[choice_.wgmma_shape], dim3(static_cast<unsigned>(layer_.num_sms)),
               shape.threads(), static_cast<std::size_t>(shape.shared_bytes()), stream_,
               sm90::WgmmaMaps{layer_.wgmma_gate_up_maps[choice_.wgmma_shape],
                               layer_.wgmma_down_maps[choice_.wgmma_shape], token_maps(gate_up()),
                               token_maps(down())},
               sm90::WgmmaTask{.gate_up = gate_up(),
                               .down = down(),
                               .runs_gate_up = runs_gate_up,
                               .runs_down = runs_down,
                               .next_item = progress + (runs_gate_up ? 0 : 1),
                               .finished_tiles = progress + 2});
    }

    const PreparedLayer& layer_;
    const ForwardInput& in_;
    const GemmChoice& choice_;
    cudaStream_t stream_;
    const WorkspaceLayout at_;
    const std::int64_t hidden_size_, intermediate_size_, num_slots_;
};

/// One token's experts are few: a tile for each multiprocessor counts for more than reading tokens once. From
/// about four rows an expert on, some have more than eight, and a second tile of tokens costs less than
/// decoding the weights again.
int choose_mma(std::int64_t rows, std::int64_t experts_hit) {
    enum { split_k, one_tile, two_tiles, four_tiles };
    if (rows > 11 * experts_hit) return four_tiles;
    if (rows > 4 * experts_hit) return two_tiles;
    return rows <= 32 ? split_k : one_tile;
}

/// The tile that nearly all segments of so many rows fit: the fewer tokens, the faster it is.
int choose_wgmma(std::int64_t mean_rows, bool suits_512_rows) {
    enum { tokens_32, tokens_64, tokens_96, tokens_160 };
    if (mean_rows > 80) return tokens_160;
    if (mean_rows > 52) return tokens_96;
    return mean_rows > 27 || !suits_512_rows ? tokens_64 : tokens_32;
}

}  // namespace

GemmChoice choose_gemms(const PreparedLayer& layer, std::int64_t num_tokens) {
    const std::int64_t mean_rows = rows_per_expert(layer.problem, num_tokens);
    const std::int64_t rows = num_tokens * layer.top_k;
    const std::int64_t experts_hit = std::min<std::int64_t>(rows, layer.num_held());
    if (mean_rows < layer.wgmma_min_rows) return {.mma_shape = choose_mma(rows, experts_hit)};
    const MoeConfig& config = layer.problem.config;
    const sm90::WgmmaLoad load{experts_hit, config.hidden_size, config.intermediate_size};
    return {.uses_wgmma = true, .wgmma_shape = choose_wgmma(mean_rows, load.suits_512_rows())};
}

std::size_t workspace_bytes(const Problem& problem, std::int64_t wgmma_min_rows) {
    return workspace_layout(problem, moe::slots_per_token(problem), may_group_x(problem, wgmma_min_rows))
        .bytes;
}

void forward(const PreparedLayer& layer, const ForwardInput& in, const GemmChoice& choice,
             cudaStream_t stream) {
    Forward(layer, in, choice, stream).run();
}

void load_kernels() {
    load_scatter();
    load_combine();
    for (const sm90::MmaKernels& kernels : {sm90::mma_bf16(), sm90::mma_f16()}) {
        for (int i = 0; i < sm90::kNumMmaShapes; ++i) {
            check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernels.of_shape[i]),
                                       cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       shared_bytes_for(sm90::kMmaShapes[i])),
                  "reserving shared memory");
        }
        check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernels.few_tokens),
                                   cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   shared_bytes_for(sm90::kMmaShapes[0])),
              "reserving shared memory");
    }
    for (const sm90::WgmmaKernels& kernels : {sm90::wgmma_bf16(), sm90::wgmma_f16()}) {
        for (int i = 0; i < sm90::kNumWgmmaShapes; ++i) {
            check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernels.of_shape[i]),
                                       cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       sm90::kWgmmaShapes[i].shared_bytes()),
                  "reserving shared memory");
        }
    }
}

}  // namespace moe4::cuda
