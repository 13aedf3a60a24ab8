#include "backends/cuda/prepared_layer.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <system_error>
#include <thread>
#include <vector>

#include "format/bf16.hpp"
#include "moe/routers.hpp"

namespace moe4::cuda {

namespace {

constexpr std::int64_t kRowPitch = 16;  // tensor maps take strides that are multiples of it
constexpr std::int64_t kPartAlignment = 256;

/// A ParallelFor on a few threads.
void parallel_for(int count, void (*body)(void*, int), void* context) {
    std::atomic<int> next{0};
    const auto work = [&] {
        for (int i = next++; i < count; i = next++) body(context, i);
    };
    const int num_threads =
        std::min({count, 16, static_cast<int>(std::max(1U, std::thread::hardware_concurrency()))});
    std::vector<std::jthread> threads;
    try {
        for (int i = 1; i < num_threads; ++i) threads.emplace_back(work);
    } catch (const std::system_error&) {  // as many as the system gives
    }
    work();
}

void upload_experts(const PreparedLayer& layer, const MoeWeights& weights, UploadPool& uploads) {
    const std::int64_t intermediate = layer.problem.config.intermediate_size;
    const std::int64_t hidden = layer.problem.config.hidden_size;
    const WeightLayoutBytes at = weight_layout(layer.problem.config, layer.num_held());
    std::uint8_t* const base = layer.weights.data();
    const auto copy = [&](Uploader& uploader, const Nvfp4View& view, std::uint8_t* codes,
                          std::int64_t code_pitch, std::uint8_t* scales, std::int64_t scale_pitch) {
        uploader.copy_rows(view.packed, view.rows, view.cols / 2, view.packed_stride, codes, code_pitch);
        uploader.copy_rows(view.block_scale, view.rows, view.cols / kNvfp4BlockSize, view.scale_stride,
                           scales, scale_pitch);
        moe::release(weights, view);
    };
    uploads.run(parallel_for, layer.num_held(), [&](Uploader& uploader, int i) {
        const int id = layer.held.first + i;
        const ExpertWeights& expert = weights.experts[static_cast<std::size_t>(id)];
        const Nvfp4View* const gate_up[] = {&expert.gate.weight, &expert.up.weight};
        for (int half = 0; half < 2; ++half) {
            const std::int64_t row = (std::int64_t{2} * i + half) * intermediate;
            copy(uploader, *gate_up[half], base + at.gate_up_codes + row * at.gate_up_code_pitch,
                 at.gate_up_code_pitch, base + at.gate_up_scales + row * at.gate_up_scale_pitch,
                 at.gate_up_scale_pitch);
        }
        copy(uploader, expert.down.weight, base + at.down_codes + i * hidden * at.down_code_pitch,
             at.down_code_pitch, base + at.down_scales + i * hidden * at.down_scale_pitch,
             at.down_scale_pitch);
    });
}

std::uint64_t u(std::int64_t x) { return static_cast<std::uint64_t>(x); }

/// Rows of codes or of scales, for boxes of a chunk of K.
struct RowBytes {
    const std::uint8_t* data;
    std::int64_t pitch, used;
    std::uint32_t box;
};

/// A stack of matrices [experts, halves, rows].
struct MatrixStack {
    RowBytes codes, scales;
    std::int64_t rows;
    int halves, experts;

    MatrixStack(const std::uint8_t* codes_, const std::uint8_t* scales_, std::int64_t code_pitch,
                std::int64_t scale_pitch, std::int64_t cols, std::int64_t rows_, int halves_, int experts_)
        : codes{codes_, code_pitch, cols / 2, kChunk / 2},
          scales{scales_, scale_pitch, cols / 16, kChunk / 16},
          rows(rows_),
          halves(halves_),
          experts(experts_) {}

    template <class Map>
    WeightMaps maps(const Map& map) const {
        return {.codes = map(codes), .scales = map(scales)};
    }

    /// [experts, halves, rows, bytes]: a box of codes is a chunk, one of scales `chunks` side by side.
    WeightMaps in_order(std::uint32_t box_rows, int chunks) const {
        MatrixStack stack = *this;
        stack.scales.box *= u32(chunks);
        return stack.maps([&](const RowBytes& row) {
            const std::array sizes{u(row.used), u(rows), u(halves), u(experts)};
            const std::array strides{u(row.pitch), u(row.pitch * rows), u(row.pitch * rows * halves)};
            const std::array<std::uint32_t, 4> box{row.box, box_rows, u32(halves), 1};
            return byte_tensor_map(row.data, sizes, strides, box);
        });
    }

    /// [experts, halves, rows / 64, 64, bytes]: a box has some rows of each of four groups. The last group
    /// may reach into what follows; nobody looks at the sums of those rows.
    WeightMaps by_64(std::uint32_t box_rows) const {
        return maps([&](const RowBytes& row) {
            const std::array sizes{u(row.used), u(64), u((rows + 63) / 64), u(halves), u(experts)};
            const std::array strides{u(row.pitch), u(row.pitch * 64), u(row.pitch * rows),
                                     u(row.pitch * rows * halves)};
            const std::array<std::uint32_t, 5> box{row.box, box_rows, 4, u32(halves), 1};
            return byte_tensor_map(row.data, sizes, strides, box);
        });
    }

    /// [experts, 1, step, rows / step, bytes]: a box has every step-th row, then the ones behind those.
    WeightMaps interleaved(int step, std::uint32_t box_rows) const {
        return maps([&](const RowBytes& row) {
            const std::array sizes{u(row.used), u(rows / step), u(step), u(1), u(experts)};
            const std::array strides{u(row.pitch * step), u(row.pitch), u(row.pitch * rows),
                                     u(row.pitch * rows)};
            const std::array<std::uint32_t, 5> box{row.box, box_rows / u32(step), u32(step), 1, 1};
            return byte_tensor_map(row.data, sizes, strides, box);
        });
    }

private:
    static std::uint32_t u32(int x) { return static_cast<std::uint32_t>(x); }
};

void make_maps(PreparedLayer& layer, const WeightLayoutBytes& at) {
    const MoeConfig& config = layer.problem.config;
    std::uint8_t* const base = layer.weights.data();
    const MatrixStack gate_up(base + at.gate_up_codes, base + at.gate_up_scales, at.gate_up_code_pitch,
                              at.gate_up_scale_pitch, config.hidden_size, config.intermediate_size, 2,
                              layer.num_held());
    const MatrixStack down(base + at.down_codes, base + at.down_scales, at.down_code_pitch,
                           at.down_scale_pitch, config.intermediate_size, config.hidden_size, 1,
                           layer.num_held());
    for (int i = 0; i < sm90::kNumMmaShapes; ++i) {
        const sm90::MmaShape& shape = sm90::kMmaShapes[i];
        const auto half = static_cast<std::uint32_t>(shape.half_rows());
        layer.gate_up_maps[i] = gate_up.in_order(half, shape.split);
        layer.down_maps[i] = down.in_order(2 * half, shape.split);
    }
    for (int i = 0; i < sm90::kNumWgmmaShapes; ++i) {
        const auto rows = static_cast<std::uint32_t>(sm90::kWgmmaShapes[i].rows());
        layer.wgmma_gate_up_maps[i] = gate_up.by_64(rows / 8);
        layer.wgmma_down_maps[i] = down.interleaved(2 * sm90::kWgmmaShapes[i].m_tiles, rows);
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
    at.gate_up_scale_pitch = round_up(config.hidden_size / kNvfp4BlockSize, kRowPitch);
    at.down_code_pitch = round_up(config.intermediate_size / 2, kRowPitch);
    at.down_scale_pitch = round_up(config.intermediate_size / kNvfp4BlockSize, kRowPitch);
    std::int64_t end = 0;
    const auto place = [&](std::int64_t bytes_per_expert) {
        const std::int64_t begin = end;
        end = round_up(end + bytes_per_expert * num_held, kPartAlignment);
        return static_cast<std::size_t>(begin);
    };
    at.gate_up_codes = place(2 * config.intermediate_size * at.gate_up_code_pitch);
    at.gate_up_scales = place(2 * config.intermediate_size * at.gate_up_scale_pitch);
    at.down_codes = place(config.hidden_size * at.down_code_pitch);
    at.down_scales = place(config.hidden_size * at.down_scale_pitch);
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
    moe::check_weights(weights, problem.experts, parallel_for);

    PreparedLayer layer = allocate_layer(problem, wgmma_min_rows, device);
    set_scales(layer, scale_values(layer, weights, inputs));
    upload_experts(layer, weights, uploads);
    layer.router_refusal = router_refusal(problem.config, weights);
    if (!layer.router_refusal) layer.router = upload_router(weights);
    return layer;
}

}  // namespace moe4::cuda
