#include "backends/cuda/forward.hpp"

#include <algorithm>

#include "backends/cuda/launch.cuh"
#include "backends/cuda/workspace_layout.hpp"

namespace moe4::cuda {

namespace {

constexpr int kSharedBytes = 227 * 1024;   // of a multiprocessor, for all its blocks
constexpr int kSharedBytesOfBlock = 1024;  // taken by the system

int shared_bytes_for(const sm90::MmaShape& shape) {
    return kSharedBytes / shape.blocks_per_sm - (shape.blocks_per_sm > 1 ? kSharedBytesOfBlock : 0);
}

constexpr int kBarrierBytes = 2 * 8 * sm90::kMaxStages;

class Forward {
public:
    Forward(const PreparedLayer& layer, const ForwardInput& in, const MmaChoice& choice, cudaStream_t stream)
        : layer_(layer),
          in_(in),
          choice_(choice),
          stream_(stream),
          at_(workspace_layout(layer.problem, layer.top_k)),
          hidden_size_(layer.problem.config.hidden_size),
          intermediate_size_(layer.problem.config.intermediate_size),
          num_slots_(in.num_tokens * layer.top_k) {}

    void run() const {
        if (scales_belong_to_rows()) scale_x();
        arrange();
        multiply(gate_up(), choice_.gate_up, layer_.gate_up_maps, gate_up_kernels(), Half::gate_up);
        if (scales_belong_to_rows()) requantize_h();
        multiply(down(), choice_.down, layer_.down_maps, down_kernels(), Half::down);
        combine({.y = workspace<float>(at_.y),
                 .slot_row = workspace<std::int32_t>(at_.slot_row),
                 .top_k_weights = in_.top_k_weights,
                 .num_tokens = in_.num_tokens,
                 .top_k = layer_.top_k,
                 .cols = hidden_size_,
                 .out_f32 = in_.output_f32,
                 .out_bf16 = in_.output_bf16},
                stream_);
    }

private:
    enum class Half { gate_up, down };

    template <class T>
    T* workspace(std::size_t offset) const {
        return reinterpret_cast<T*>(in_.workspace + offset);
    }
    bool is_w4a4() const { return layer_.problem.precision == Precision::w4a4; }
    bool is_shared() const { return layer_.problem.activation_scale == ActivationScale::dynamic; }
    bool scales_belong_to_rows() const {
        return is_w4a4() &&
               (is_shared() || layer_.problem.activation_scale == ActivationScale::dynamic_token);
    }
    std::int32_t* num_segments() const { return workspace<std::int32_t>(at_.counts); }
    std::int32_t* num_rows() const { return num_segments() + 1; }
    std::uint32_t* largest_of_batch(Half half) const {
        return is_shared() ? workspace<std::uint32_t>(at_.counts) + (half == Half::gate_up ? 2 : 3) : nullptr;
    }

    int largest_segment() const {
        return static_cast<int>(
            std::min<std::int64_t>(8 * sm90::kMmaShapes[choice_.gate_up].token_tiles, in_.num_tokens));
    }

    Grouping grouping() const {
        return {.num_segments = num_segments(),
                .num_rows = num_rows(),
                .segments = workspace<Segment>(at_.segments),
                .row_token = workspace<std::int32_t>(at_.row_token),
                .row_expert = workspace<std::int32_t>(at_.row_expert),
                .slot_row = workspace<std::int32_t>(at_.slot_row)};
    }

    void scale_x() const {
        if (is_shared())
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

    void arrange() const {
        const GroupTask group_task{.top_k_ids = in_.top_k_ids,
                                   .num_slots = num_slots_,
                                   .top_k = layer_.top_k,
                                   .first_expert = layer_.held.first,
                                   .num_held = layer_.num_held(),
                                   .largest_segment = largest_segment(),
                                   .out = grouping()};
        EncodeTask encode_task{
            .source = in_.hidden,
            .rows = workspace<std::uint16_t>(at_.x),
            .cols = hidden_size_,
            .num_rows = in_.num_tokens,
            .device_num_rows = nullptr,
            .source_row = nullptr,
            .quantizes = is_w4a4(),
            .row_scale = scales_belong_to_rows() ? workspace<float>(at_.token_scale) : nullptr,
            .expert_scale = layer_.scales.input_scale,
            .row_expert = nullptr,
            .padded_rows = workspace<std::uint16_t>(at_.h),
            .padded_cols = intermediate_size_,
            .num_padded_rows = num_slots_};
        if (!groups_x(layer_.problem)) return group_and_encode(group_task, encode_task, stream_);
        encode_task.num_rows = num_slots_;
        encode_task.device_num_rows = num_rows();
        encode_task.source_row = workspace<std::int32_t>(at_.row_token);
        encode_task.row_expert = workspace<std::int32_t>(at_.row_expert);
        group(group_task, stream_);
        encode(encode_task, stream_);
    }

    GroupedGemm gate_up() const {
        const bool is_calibrated = is_w4a4() && !scales_belong_to_rows();
        return {.num_segments = num_segments(),
                .segments = workspace<Segment>(at_.segments),
                .rows = workspace<std::uint16_t>(at_.x),
                .row_stride = permuted_size(hidden_size_),
                .row_source = groups_x(layer_.problem) ? nullptr : workspace<std::int32_t>(at_.row_token),
                .num_chunks = static_cast<std::int32_t>(permuted_size(hidden_size_) / kChunk),
                .out_size = static_cast<std::int32_t>(intermediate_size_),
                .factor = {layer_.scales.gate_factor, layer_.scales.up_factor},
                .global_scale = {layer_.scales.gate, layer_.scales.up},
                .row_scale = scales_belong_to_rows() ? workspace<float>(at_.token_scale) : nullptr,
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
                .row_scale = scales_belong_to_rows() ? workspace<float>(at_.h_scale) : nullptr,
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

    sm90::MmaKernels gate_up_kernels() const {
        return is_w4a4() ? sm90::mma_f16_gate_up() : sm90::mma_bf16_gate_up();
    }
    sm90::MmaKernels down_kernels() const { return is_w4a4() ? sm90::mma_f16_down() : sm90::mma_bf16_down(); }

    void multiply(const GroupedGemm& gemm, int shape_index, const WeightMaps* maps,
                  const sm90::MmaKernels& kernels, Half half) const {
        const sm90::MmaShape& shape = sm90::kMmaShapes[shape_index];
        const int token_rows = largest_segment();
        const int stage_bytes = shape.stage_bytes(token_rows);
        const int fixed_bytes = shape.partial_bytes() + kBarrierBytes;
        const int num_stages =
            std::min(sm90::kMaxStages, (shared_bytes_for(shape) - fixed_bytes) / stage_bytes);
        const int tile_rows = shape.half_rows() * (half == Half::gate_up ? 1 : 2);
        const std::int64_t most_items = num_slots_ * ((gemm.out_size + tile_rows - 1) / tile_rows);
        const std::int64_t resident = std::int64_t{layer_.num_sms} * shape.blocks_per_sm;
        launch(
            kernels.of_shape[shape_index], dim3(static_cast<unsigned>(std::min(most_items, resident))),
            shape.threads(), static_cast<std::size_t>(num_stages * stage_bytes + fixed_bytes), stream_,
            maps[shape_index].codes, maps[shape_index].scales, gemm,
            sm90::MmaLaunch{.num_stages = num_stages, .stage_bytes = stage_bytes, .token_rows = token_rows});
    }

    const PreparedLayer& layer_;
    const ForwardInput& in_;
    const MmaChoice& choice_;
    cudaStream_t stream_;
    const WorkspaceLayout at_;
    const std::int64_t hidden_size_, intermediate_size_, num_slots_;
};

/// The largest tile that still gives every resident block an item or two; shapes with more rows read the
/// tokens less often.
int choose_shape(std::int64_t rows, std::int64_t experts_hit, std::int64_t out_rows, int num_sms) {
    constexpr int kManyTokens = 5;
    if (rows > 10 * experts_hit) return kManyTokens;
    for (const int index : {2, 1}) {
        const sm90::MmaShape& shape = sm90::kMmaShapes[index];
        const std::int64_t items =
            experts_hit * ((out_rows + 2 * shape.half_rows() - 1) / (2 * shape.half_rows()));
        if (items >= 2 * shape.blocks_per_sm * num_sms) return index;
    }
    return 0;
}

}  // namespace

MmaChoice choose_mma(const PreparedLayer& layer, std::int64_t num_tokens) {
    const MoeConfig& config = layer.problem.config;
    const std::int64_t rows = num_tokens * layer.top_k;
    const std::int64_t experts_hit = std::min<std::int64_t>(rows, layer.num_held());
    return {.gate_up = choose_shape(rows, experts_hit, 2 * config.intermediate_size, layer.num_sms),
            .down = choose_shape(rows, experts_hit, config.hidden_size, layer.num_sms)};
}

void forward(const PreparedLayer& layer, const ForwardInput& in, const MmaChoice& choice,
             cudaStream_t stream) {
    Forward(layer, in, choice, stream).run();
}

void load_kernels() {
    for (const sm90::MmaKernels& kernels :
         {sm90::mma_bf16_gate_up(), sm90::mma_bf16_down(), sm90::mma_f16_gate_up(), sm90::mma_f16_down()}) {
        for (int i = 0; i < sm90::kNumMmaShapes; ++i) {
            check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernels.of_shape[i]),
                                       cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       shared_bytes_for(sm90::kMmaShapes[i])),
                  "reserving shared memory");
        }
    }
}

}  // namespace moe4::cuda
