#include "backends/cuda/prepared_layer.hpp"

#include <array>
#include <cstring>
#include <vector>

#include "format/bf16.hpp"
#include "moe/parallel.hpp"
#include "moe/routers.hpp"

namespace moe4::cuda {

namespace {

constexpr std::int64_t kRowPitch = 16;  // tensor maps take strides that are multiples of it
constexpr std::int64_t kPartAlignment = 256;
constexpr std::int64_t kChunkScales = kChunk / kNvfp4BlockSize;  // bytes of a row
static_assert(kChunkScales == Uploader::kPieceBytes);
constexpr int kMostThreads = 16;  // that read the weights

void upload_experts(const PreparedLayer& layer, const MoeWeights& weights, UploadPool& uploads) {
    const std::int64_t intermediate = layer.problem.config.intermediate_size;
    const std::int64_t hidden = layer.problem.config.hidden_size;
    const WeightLayoutBytes at = weight_layout(layer.problem.config, layer.num_held());
    std::uint8_t* const base = layer.weights.data();
    const auto copy = [&](Uploader& uploader, const Nvfp4View& view, std::uint8_t* codes,
                          std::int64_t code_pitch, std::uint8_t* scales, std::int64_t chunk_bytes) {
        uploader.copy_rows(view.packed, view.rows, view.cols / 2, view.packed_stride, codes, code_pitch);
        uploader.copy_columns(view.block_scale, view.rows, view.cols / kNvfp4BlockSize, view.scale_stride,
                              scales, chunk_bytes);
        moe::release(weights, view);
    };
    uploads.run(moe::on_threads(kMostThreads), layer.num_held(), [&](Uploader& uploader, int i) {
        const int id = layer.held.first + i;
        const ExpertWeights& expert = weights.experts[static_cast<std::size_t>(id)];
        const Nvfp4View* const gate_up[] = {&expert.gate.weight, &expert.up.weight};
        const std::int64_t gate_up_bytes = 2 * intermediate * kChunkScales;
        for (int half = 0; half < 2; ++half) {
            const std::int64_t row = (std::int64_t{2} * i + half) * intermediate;
            copy(uploader, *gate_up[half], base + at.gate_up_codes + row * at.gate_up_code_pitch,
                 at.gate_up_code_pitch,
                 base + at.gate_up_scales + i * at.gate_up_chunks * gate_up_bytes +
                     half * intermediate * kChunkScales,
                 gate_up_bytes);
        }
        const std::int64_t down_bytes = hidden * kChunkScales;
        copy(uploader, expert.down.weight, base + at.down_codes + i * hidden * at.down_code_pitch,
             at.down_code_pitch, base + at.down_scales + i * at.down_chunks * down_bytes, down_bytes);
    });
}

/// Weights of all experts: codes [experts, halves, rows, pitch], scales [experts, chunks, halves, rows, 16].
/// Rows are a multiple of 16. Sizes and boxes innermost first, strides of all dimensions but the innermost.
struct MatrixStack {
    const std::uint8_t *codes, *scales;
    std::int64_t code_pitch, chunks, rows, halves, experts;

    /// A box is some chunks, eight rows chunk by chunk and then those behind them. A chunk that ends behind
    /// its row has codes of what follows, times scales of 0.
    WeightMaps in_order(std::int64_t box_rows, std::int64_t box_chunks) const {
        return {.codes = code_map({kChunkCodes, 8, chunks, rows / 8, halves * experts},
                                  {code_pitch, kChunkCodes, code_pitch * 8, code_pitch * rows},
                                  {kChunkCodes, 8, box_chunks, box_rows / 8, halves}),
                .scales = scale_map({8 * kChunkScales, rows / 8, halves, chunks, experts},
                                    {8 * kChunkScales, kChunkScales * rows, chunk_bytes()},
                                    {8 * kChunkScales, box_rows / 8, halves, box_chunks, 1})};
    }

    /// A box is a chunk, some rows of each of four groups of 64. The last group may reach into what follows;
    /// nobody looks at the sums of those rows.
    WeightMaps by_64(std::int64_t box_rows) const {
        const std::int64_t groups = (rows + 63) / 64;
        return {
            .codes = code_map({code_pitch, 64, groups, halves, experts},
                              {code_pitch, code_pitch * 64, code_pitch * rows, code_pitch * rows * halves},
                              {kChunkCodes, box_rows, 4, halves, 1}),
            .scales = scale_map({8 * kChunkScales, 8, groups, chunks * halves, experts},
                                {8 * kChunkScales, 64 * kChunkScales, kChunkScales * rows},
                                {8 * kChunkScales, box_rows / 8, 4, halves, 1})};
    }

    /// A box is a chunk, every step-th row and then the ones behind those.
    WeightMaps interleaved(std::int64_t step, std::int64_t box_rows) const {
        return {.codes = code_map({code_pitch, rows / step, step, 1, experts},
                                  {code_pitch * step, code_pitch, code_pitch * rows, code_pitch * rows},
                                  {kChunkCodes, box_rows / step, step, 1, 1}),
                .scales = scale_map({kChunkScales, rows / step, step, chunks, experts},
                                    {kChunkScales * step, kChunkScales, chunk_bytes()},
                                    {kChunkScales, box_rows / step, step, 1, 1})};
    }

private:
    static constexpr std::int64_t kChunkCodes = kChunk / 2;  // bytes of a row
    using Sizes = std::array<std::int64_t, 5>;

    std::int64_t chunk_bytes() const { return kChunkScales * rows * halves; }  // of scales

    static CUtensorMap map(const std::uint8_t* data, const Sizes& sizes,
                           const std::array<std::int64_t, 4>& strides, const Sizes& box, Swizzle swizzle) {
        std::array<std::uint64_t, 5> map_sizes{};
        std::array<std::uint64_t, 4> map_strides{};
        std::array<std::uint32_t, 5> map_box{};
        std::ranges::copy(sizes, map_sizes.begin());
        std::ranges::copy(strides, map_strides.begin());
        std::ranges::transform(box, map_box.begin(), [](auto n) { return static_cast<std::uint32_t>(n); });
        return byte_tensor_map(data, map_sizes, map_strides, map_box, swizzle);
    }
    CUtensorMap code_map(const Sizes& sizes, const std::array<std::int64_t, 4>& strides,
                         const Sizes& box) const {
        return map(codes, sizes, strides, box, Swizzle::bytes_128);
    }
    CUtensorMap scale_map(const Sizes& sizes, const std::array<std::int64_t, 3>& strides,
                          const Sizes& box) const {
        return map(scales, sizes, {strides[0], strides[1], strides[2], chunk_bytes() * chunks}, box,
                   Swizzle::none);
    }
};

void make_maps(PreparedLayer& layer, const WeightLayoutBytes& at) {
    const MoeConfig& config = layer.problem.config;
    std::uint8_t* const base = layer.weights.data();
    const MatrixStack gate_up{.codes = base + at.gate_up_codes,
                              .scales = base + at.gate_up_scales,
                              .code_pitch = at.gate_up_code_pitch,
                              .chunks = at.gate_up_chunks,
                              .rows = config.intermediate_size,
                              .halves = 2,
                              .experts = layer.num_held()};
    const MatrixStack down{.codes = base + at.down_codes,
                           .scales = base + at.down_scales,
                           .code_pitch = at.down_code_pitch,
                           .chunks = at.down_chunks,
                           .rows = config.hidden_size,
                           .halves = 1,
                           .experts = layer.num_held()};
    for (int i = 0; i < sm90::kNumMmaShapes; ++i) {
        const sm90::MmaShape& shape = sm90::kMmaShapes[i];
        layer.gate_up_maps[i] = gate_up.in_order(shape.half_rows(), shape.split);
        layer.down_maps[i] = down.in_order(2 * shape.half_rows(), shape.split);
    }
    for (int i = 0; i < sm90::kNumWgmmaShapes; ++i) {
        const sm90::WgmmaShape& shape = sm90::kWgmmaShapes[i];
        layer.wgmma_gate_up_maps[i] = gate_up.by_64(shape.rows() / 8);
        layer.wgmma_down_maps[i] = down.interleaved(2 * shape.m_tiles, shape.rows());
    }
}

/// A1 and A2 of the calibrated modes, 1 where A belongs to a row or there is none.
std::vector<moe::InputScales> input_scales(const Problem& problem, const MoeWeights& weights) {
    const bool is_calibrated = problem.precision == Precision::w4a4 && !moe::has_dynamic_scales(problem);
    if (is_calibrated) return moe::input_scales(weights, problem.activation_scale);
    return std::vector<moe::InputScales>(weights.experts.size(), {.gate_up = 1.0F, .down = 1.0F});
}

std::vector<ExpertScaleValues> scale_values(const PreparedLayer& layer, const MoeWeights& weights,
                                            const std::vector<moe::InputScales>& inputs) {
    std::vector<ExpertScaleValues> values;
    for (int i = layer.held.first; i < layer.held.last; ++i) {
        const auto e = static_cast<std::size_t>(i);
        const ExpertWeights& expert = weights.experts[e];
        values.push_back({.global = {expert.gate.weight.global_scale, expert.up.weight.global_scale,
                                     expert.down.weight.global_scale},
                          .input = inputs[e]});
    }
    return values;
}

std::vector<float> as_floats(const TensorView& tensor) {
    std::vector<float> values(static_cast<std::size_t>(tensor.shape.num_elements()));
    if (tensor.dtype == DType::f32) {
        std::memcpy(values.data(), tensor.data, values.size() * 4);
        return values;
    }
    for (std::size_t i = 0; i < values.size(); ++i) {
        std::uint16_t bits = 0;
        std::memcpy(&bits, static_cast<const std::uint8_t*>(tensor.data) + 2 * i, 2);
        values[i] = format::bf16_to_float(bits);
    }
    return values;
}

/// Matters to those who route alone.
std::optional<Error> router_refusal(const MoeConfig& config, const MoeWeights& weights) {
    try {
        moe::check_router(config, weights.router, weights.router_bias);
    } catch (const Error& error) {
        return error;
    }
    return std::nullopt;
}

DeviceRouter upload_router(const MoeWeights& weights) {
    DeviceRouter router;
    router.dtype = weights.router.dtype;
    router.weights = DeviceBuffer(weights.router.num_bytes(), "the router");
    check(cudaMemcpy(router.weights.data(), weights.router.data, weights.router.num_bytes(),
                     cudaMemcpyHostToDevice),
          "copying the router");
    if (weights.router_bias) {
        const std::vector<float> bias = as_floats(*weights.router_bias);
        router.bias = DeviceBuffer(bias.size() * 4, "the router's bias");
        check(cudaMemcpy(router.bias.data(), bias.data(), bias.size() * 4, cudaMemcpyHostToDevice),
              "copying the router's bias");
    }
    return router;
}

}  // namespace

WeightLayoutBytes weight_layout(const MoeConfig& config, int num_held) {
    WeightLayoutBytes at{};
    at.gate_up_code_pitch = round_up(config.hidden_size / 2, kRowPitch);
    at.down_code_pitch = round_up(config.intermediate_size / 2, kRowPitch);
    at.gate_up_chunks = permuted_size(config.hidden_size) / kChunk;
    at.down_chunks = permuted_size(config.intermediate_size) / kChunk;
    std::int64_t end = 0;
    const auto place = [&](std::int64_t bytes_per_expert) {
        const std::int64_t begin = end;
        end = round_up(end + bytes_per_expert * num_held, kPartAlignment);
        return static_cast<std::size_t>(begin);
    };
    at.gate_up_codes = place(2 * config.intermediate_size * at.gate_up_code_pitch);
    at.gate_up_scales = place(at.gate_up_chunks * 2 * config.intermediate_size * kChunkScales);
    at.down_codes = place(config.hidden_size * at.down_code_pitch);
    at.down_scales = place(at.down_chunks * config.hidden_size * kChunkScales);
    at.bytes = static_cast<std::size_t>(end);
    return at;
}

/// Doubles first, so that all are aligned.
void set_scales(PreparedLayer& layer, std::span<const ExpertScaleValues> experts) {
    const std::size_t n = experts.size();
    std::vector<double> globals(3 * n);
    std::vector<float> floats(5 * n);
    for (std::size_t i = 0; i < n; ++i) {
        const moe::InputScales& input = experts[i].input;
        const float inputs[] = {input.gate_up, input.gate_up, input.down};
        for (std::size_t p = 0; p < 3; ++p) {
            globals[p * n + i] = experts[i].global[p];
            floats[p * n + i] = static_cast<float>(static_cast<double>(inputs[p]) * experts[i].global[p]);
        }
        floats[3 * n + i] = input.gate_up;
        floats[4 * n + i] = input.down;
    }
    layer.scale_memory = DeviceBuffer(globals.size() * 8 + floats.size() * 4, "the experts' scales");
    auto* const doubles = reinterpret_cast<double*>(layer.scale_memory.data());
    auto* const singles = reinterpret_cast<float*>(doubles + 3 * n);
    check(cudaMemcpy(doubles, globals.data(), globals.size() * 8, cudaMemcpyHostToDevice), "copying scales");
    check(cudaMemcpy(singles, floats.data(), floats.size() * 4, cudaMemcpyHostToDevice), "copying scales");
    layer.scales = {.gate = doubles,
                    .up = doubles + n,
                    .down = doubles + 2 * n,
                    .gate_factor = singles,
                    .up_factor = singles + n,
                    .down_factor = singles + 2 * n,
                    .input_scale = singles + 3 * n,
                    .h_input_scale = singles + 4 * n};
}

CounterPool::CounterPool() : memory_(kSets * sizeof(sm90::RunCounters), "the counters of a layer") {
    check(cudaMemset(memory_.data(), 0, kSets * sizeof(sm90::RunCounters)), "clearing counters");
    check(cudaStreamSynchronize(nullptr), "clearing counters");  // other streams do not wait for it
}

sm90::RunCounters* CounterPool::of(const void* workspace) {
    for (std::size_t i = 0; i < kSets; ++i) {
        const void* owner = nullptr;
        if (workspaces_[i].compare_exchange_strong(owner, workspace) || owner == workspace)
            return reinterpret_cast<sm90::RunCounters*>(memory_.data()) + i;
    }
    return nullptr;
}

PreparedLayer allocate_layer(const Problem& problem, std::int64_t wgmma_min_rows, int device) {
    PreparedLayer layer;
    layer.wgmma_min_rows = wgmma_min_rows;
    layer.problem = problem;
    layer.top_k = moe::slots_per_token(problem);
    layer.held = moe::held_experts(problem);
    layer.device = device;
    check(cudaDeviceGetAttribute(&layer.num_sms, cudaDevAttrMultiProcessorCount, device),
          "asking for the number of multiprocessors");
    const WeightLayoutBytes at = weight_layout(problem.config, layer.num_held());
    layer.weights = DeviceBuffer(at.bytes, "the weights of a layer");
    make_maps(layer, at);
    layer.counters = std::make_unique<CounterPool>();
    return layer;
}

PreparedLayer prepare_layer(const Problem& problem, std::int64_t wgmma_min_rows, const MoeWeights& weights,
                            int device, UploadPool& uploads) {
    moe::check_weights_fit(problem, weights);
    const std::vector<moe::InputScales> inputs = input_scales(problem, weights);
    moe::check_weights(weights, problem.experts, moe::on_threads(kMostThreads));

    PreparedLayer layer = allocate_layer(problem, wgmma_min_rows, device);
    set_scales(layer, scale_values(layer, weights, inputs));
    upload_experts(layer, weights, uploads);
    layer.router_refusal = router_refusal(problem.config, weights);
    if (!layer.router_refusal) layer.router = upload_router(weights);
    return layer;
}

}  // namespace moe4::cuda
