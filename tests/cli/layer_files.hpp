#pragma once
// Input files for `moe4 run`, and the layer computed through the library to compare with.
#include <random>

#include "command_line.hpp"
#include "moe4/moe4.hpp"

namespace moe4::test {

struct LayerFile {
    std::int64_t num_tokens = 0;
    std::int64_t hidden_size = 0;
    std::vector<std::uint16_t> hidden = {};
    int top_k = 0;  // 0: no routing
    std::vector<std::int32_t> ids = {};
    std::vector<float> weights = {};

    static LayerFile random(std::int64_t num_tokens, std::int64_t hidden_size, int num_experts = 0,
                            int top_k = 0) {
        LayerFile file{.num_tokens = num_tokens, .hidden_size = hidden_size, .top_k = top_k};
        std::mt19937_64 random(7);
        std::normal_distribution<float> normal;
        for (std::int64_t i = 0; i < num_tokens * hidden_size; ++i) {
            file.hidden.push_back(round_to_bf16(normal(random)));
        }
        for (std::int64_t i = 0; i < num_tokens * top_k; ++i) {
            file.ids.push_back(static_cast<std::int32_t>(random() % static_cast<unsigned>(num_experts)));
            file.weights.push_back(0.25F + 0.5F * static_cast<float>(random() % 1000) / 1000.0F);
        }
        return file;
    }

    std::vector<NamedTensor> tensors() const {
        std::vector<NamedTensor> list = {
            {"hidden", {hidden.data(), DType::bf16, {num_tokens, hidden_size}, {}}}};
        if (top_k > 0) {
            list.push_back({"top_k_ids", {ids.data(), DType::i32, {num_tokens, top_k}, {}}});
            list.push_back({"top_k_weights", {weights.data(), DType::f32, {num_tokens, top_k}, {}}});
        }
        return list;
    }
    std::string write(const std::filesystem::path& path) const {
        write_safetensors(path, tensors());
        return path.string();
    }
};

/// The f32 output of the library on the same rows and routing.
inline std::vector<float> library_output(const std::filesystem::path& folder, int layer_number,
                                         const LayerFile& file, Precision precision,
                                         ExpertRange experts = {}) {
    const MoeWeights weights = Checkpoint::open(folder).moe_layer(layer_number);
    const auto backend = moe4::open_backend();
    const auto layer = backend->prepare(backend->plan({.config = weights.config,
                                                       .precision = precision,
                                                       .max_tokens = file.num_tokens,
                                                       .top_k = file.top_k,
                                                       .experts = experts}),
                                        weights);
    std::vector<std::int32_t> ids = file.ids;
    std::vector<float> slot_weights = file.weights;
    const int top_k = file.top_k > 0 ? file.top_k : weights.config.router.top_k;
    const Shape slots{file.num_tokens, top_k};
    const TensorView hidden = file.tensors()[0].tensor;
    ids.resize(static_cast<std::size_t>(slots.num_elements()));
    slot_weights.resize(ids.size());
    const MutableTensorView id_view{ids.data(), DType::i32, slots, {}};
    const MutableTensorView weight_view{slot_weights.data(), DType::f32, slots, {}};
    if (file.top_k == 0) layer->route(hidden, id_view, weight_view);
    std::vector<float> output(file.hidden.size(), -1e30F);
    std::vector<std::byte> workspace(layer->plan().workspace_bytes + 64);
    void* data = workspace.data();
    std::size_t bytes = workspace.size();
    std::align(64, layer->plan().workspace_bytes, data, bytes);
    layer->run(hidden, {id_view, weight_view}, {output.data(), DType::f32, hidden.shape, {}}, {data, bytes});
    return output;
}

}  // namespace moe4::test
