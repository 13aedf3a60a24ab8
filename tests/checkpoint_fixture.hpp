#pragma once
// Writes a small random MoE checkpoint as the tools spell it, after a test has bent it as it likes.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "format/bf16.hpp"
#include "format/quantize.hpp"
#include "moe4/moe.hpp"
#include "moe4/safetensors.hpp"
#include "temporary_folder.hpp"

namespace moe4::test {

enum class Spelling { modelopt, compressed_tensors, unquantized };

struct CheckpointOptions {
    std::string family = "qwen3_moe";  // mixtral, deepseek_v3, glm4_moe, minimax_m2
    Spelling spelling = Spelling::modelopt;
    std::int64_t hidden_size = 64;
    std::int64_t intermediate_size = 32;
    int num_experts = 4;
    int top_k = 2;
    int num_layers = 2;
    int first_moe_layer = 0;  // the layers before it are dense
    bool has_input_scales = true;
    std::uint64_t seed = 1;
};

struct StoredTensor {
    DType dtype = DType::f32;
    Shape shape;
    std::vector<std::uint8_t> bytes;

    template <class T>
    void set(std::size_t index, T value) {
        std::memcpy(bytes.data() + index * sizeof(T), &value, sizeof(T));
    }
    template <class T>
    T get(std::size_t index = 0) const {
        T value;
        std::memcpy(&value, bytes.data() + index * sizeof(T), sizeof(T));
        return value;
    }
};

/// The same options with Spelling::unquantized give the BF16 original of a quantised checkpoint.
class CheckpointFixture {
public:
    std::map<std::string, StoredTensor> tensors;
    nlohmann::json config;           // config.json
    nlohmann::json hf_quant_config;  // hf_quant_config.json; null: not written

    explicit CheckpointFixture(const CheckpointOptions& options = {})
        : options_(options), random_(options.seed) {
        add_config();
        add("model.embed_tokens.weight", {16, options.hidden_size}, 1.0F);
        add("model.norm.weight", {options.hidden_size}, 1.0F);
        add("lm_head.weight", {16, options.hidden_size}, 0.1F);
        for (int layer = 0; layer < options.num_layers; ++layer) {
            const std::string prefix = "model.layers." + std::to_string(layer) + ".";
            add(prefix + "input_layernorm.weight", {options.hidden_size}, 1.0F);
            add(prefix + "self_attn.o_proj.weight", {options.hidden_size, options.hidden_size}, 0.1F);
            layer < options.first_moe_layer ? add_mlp(prefix + "mlp.") : add_moe(layer);
        }
    }

    /// "model.layers.3.mlp.experts.17.gate_proj"
    std::string module(int layer, int expert, Projection projection) const {
        static constexpr const char* kProj[] = {"gate_proj", "up_proj", "down_proj"};
        static constexpr const char* kNumbered[] = {"w1", "w3", "w2"};
        return block(layer) + "experts." + std::to_string(expert) + "." +
               (is_numbered() ? kNumbered : kProj)[static_cast<int>(projection)];
    }
    /// "model.layers.3.mlp."
    std::string block(int layer) const {
        return "model.layers." + std::to_string(layer) + (is_numbered() ? ".block_sparse_moe." : ".mlp.");
    }
    StoredTensor& tensor(int layer, int expert, Projection projection, const std::string& leaf) {
        return tensors.at(module(layer, expert, projection) + "." + leaf);
    }
    void rename(const std::string& from, const std::string& to) {
        auto node = tensors.extract(from);
        node.key() = to;
        tensors.insert(std::move(node));
    }

    /// Writes one shard and the configs; again after a change. Returns the folder, which goes with this
    /// object.
    const std::filesystem::path& write() const {
        std::vector<NamedTensor> named;
        for (const auto& [name, tensor] : tensors) {
            named.push_back({name, {tensor.bytes.data(), tensor.dtype, tensor.shape, {}}});
        }
        write_safetensors(folder_ / "model.safetensors", named);
        folder_.write("config.json", config.dump(2));
        if (!hf_quant_config.is_null()) folder_.write("hf_quant_config.json", hf_quant_config.dump(2));
        return folder_.path();
    }
    const TemporaryFolder& folder() const { return folder_; }

private:
    bool is_numbered() const { return options_.family == "mixtral" || options_.family == "minimax_m2"; }
    bool has_deepseek_router() const {
        return options_.family != "qwen3_moe" && options_.family != "mixtral";
    }

    std::vector<std::uint16_t> random_bf16(std::int64_t count, float deviation) {
        std::normal_distribution<float> normal(0.0F, deviation);
        std::vector<std::uint16_t> values(static_cast<std::size_t>(count));
        for (auto& value : values) value = format::bf16_from_float(normal(random_));
        return values;
    }

    template <class T>
    void store(const std::string& name, DType dtype, Shape shape, const std::vector<T>& values) {
        StoredTensor& tensor = tensors[name] = {dtype, shape, {}};
        tensor.bytes.resize(values.size() * sizeof(T));
        std::memcpy(tensor.bytes.data(), values.data(), tensor.bytes.size());
    }
    void add(const std::string& name, Shape shape, float deviation) {
        store(name, DType::bf16, shape, random_bf16(shape.num_elements(), deviation));
    }

    void add_mlp(const std::string& prefix) {
        add(prefix + "gate_proj.weight", {options_.intermediate_size, options_.hidden_size}, 0.1F);
        add(prefix + "up_proj.weight", {options_.intermediate_size, options_.hidden_size}, 0.1F);
        add(prefix + "down_proj.weight", {options_.hidden_size, options_.intermediate_size}, 0.1F);
    }

    void add_moe(int layer) {
        add(block(layer) + "gate.weight", {options_.num_experts, options_.hidden_size}, 0.1F);
        if (has_deepseek_router()) {
            std::vector<float> bias(static_cast<std::size_t>(options_.num_experts));
            for (float& b : bias) b = std::normal_distribution<float>(0.0F, 0.05F)(random_);
            const char* name = is_numbered() ? "e_score_correction_bias" : "gate.e_score_correction_bias";
            store(block(layer) + name, DType::f32, {options_.num_experts}, bias);
        }
        if (config.contains("n_shared_experts")) add_mlp(block(layer) + "shared_experts.");
        for (int expert = 0; expert < options_.num_experts; ++expert) add_expert(layer, expert);
    }

    void add_expert(int layer, int expert) {
        const std::int64_t H = options_.hidden_size;
        const std::int64_t I = options_.intermediate_size;
        const auto gate = random_bf16(I * H, 1.0F / std::sqrt(static_cast<float>(H)));
        const auto up = random_bf16(I * H, 1.0F / std::sqrt(static_cast<float>(H)));
        const auto down = random_bf16(H * I, 1.0F / std::sqrt(static_cast<float>(I)));
        const float gate_up_amax = std::max(format::largest_magnitude(gate), format::largest_magnitude(up));
        const float gate_up_input_amax = 6.0F;  // of N(0,1) rows
        const float down_input_amax = 4.0F + 0.25F * static_cast<float>(expert);
        add_linear(module(layer, expert, Projection::gate), gate, {I, H}, gate_up_amax, gate_up_input_amax);
        add_linear(module(layer, expert, Projection::up), up, {I, H}, gate_up_amax, gate_up_input_amax);
        add_linear(module(layer, expert, Projection::down), down, {H, I}, format::largest_magnitude(down),
                   down_input_amax);
    }

    void add_linear(const std::string& name, const std::vector<std::uint16_t>& bf16, Shape shape, float amax,
                    float input_amax) {
        if (options_.spelling == Spelling::unquantized)
            return store(name + ".weight", DType::bf16, shape, bf16);
        const bool is_modelopt = options_.spelling == Spelling::modelopt;
        const auto quantize = is_modelopt ? format::quantize_modelopt : format::quantize_compressed_tensors;
        const format::Nvfp4Matrix matrix = quantize(bf16, shape[0], shape[1], amax);
        const Shape scalar = is_modelopt ? Shape{} : Shape{1};
        store(name + (is_modelopt ? ".weight" : ".weight_packed"), DType::u8, {shape[0], shape[1] / 2},
              matrix.packed);
        store(name + ".weight_scale", DType::f8_e4m3, {shape[0], shape[1] / kNvfp4BlockSize},
              matrix.block_scale);
        store(name + (is_modelopt ? ".weight_scale_2" : ".weight_global_scale"), DType::f32, scalar,
              std::vector<float>{matrix.stored_global_scale});
        if (!options_.has_input_scales) return;
        store(name + (is_modelopt ? ".input_scale" : ".input_global_scale"), DType::f32, scalar,
              std::vector<float>{is_modelopt ? input_amax / 2688.0F : 2688.0F / input_amax});
    }

    void add_config() {
        config = {{"model_type", options_.family},
                  {"hidden_act", "silu"},
                  {"hidden_size", options_.hidden_size},
                  {"num_hidden_layers", options_.num_layers},
                  {"num_experts_per_tok", options_.top_k},
                  {"rms_norm_eps", 1e-6},
                  {"rope_theta", 10000.0},
                  {"torch_dtype", "bfloat16"},
                  {"vocab_size", 16}};
        if (options_.family == "qwen3_moe") {
            std::vector<int> dense;
            for (int layer = 0; layer < options_.first_moe_layer; ++layer) dense.push_back(layer);
            config.update({{"num_experts", options_.num_experts},
                           {"moe_intermediate_size", options_.intermediate_size},
                           {"intermediate_size", 3 * options_.intermediate_size},
                           {"norm_topk_prob", true},
                           {"mlp_only_layers", dense},
                           {"decoder_sparse_step", 1}});
        } else if (is_numbered()) {
            config.update({{"num_local_experts", options_.num_experts},
                           {"intermediate_size", options_.intermediate_size}});
            if (has_deepseek_router())
                config.update({{"scoring_func", "sigmoid"}, {"use_routing_bias", true}});
        } else {
            const bool has_groups = options_.family == "deepseek_v3" && options_.num_experts % 2 == 0;
            config.update({{"n_routed_experts", options_.num_experts},
                           {"moe_intermediate_size", options_.intermediate_size},
                           {"intermediate_size", 3 * options_.intermediate_size},
                           {"norm_topk_prob", true},
                           {"n_group", has_groups ? 2 : 1},
                           {"topk_group", 1},
                           {"routed_scaling_factor", 2.5},
                           {"first_k_dense_replace", options_.first_moe_layer},
                           {"n_shared_experts", 1}});
            if (options_.family == "deepseek_v3")
                config.update(
                    {{"scoring_func", "sigmoid"}, {"topk_method", "noaux_tc"}, {"moe_layer_freq", 1}});
        }
        if (options_.spelling == Spelling::modelopt) add_modelopt_config();
        if (options_.spelling == Spelling::compressed_tensors) add_compressed_tensors_config();
    }

    void add_modelopt_config() {
        const char* algorithm = options_.has_input_scales ? "NVFP4" : "W4A16_NVFP4";
        const nlohmann::json four_bits = {
            {"dynamic", false}, {"num_bits", 4}, {"type", "float"}, {"group_size", 16}};
        nlohmann::json group = {{"weights", four_bits}, {"targets", {"Linear"}}};
        if (options_.has_input_scales) group["input_activations"] = four_bits;
        const nlohmann::json producer = {{"name", "modelopt"}, {"version", "0.47.0"}};
        config["quantization_config"] = {{"config_groups", {{"group_0", group}}},
                                         {"ignore", not_quantized()},
                                         {"quant_algo", algorithm},
                                         {"producer", producer},
                                         {"quant_method", "modelopt"}};
        hf_quant_config = {{"producer", producer},
                           {"quantization",
                            {{"quant_algo", algorithm},
                             {"kv_cache_quant_algo", nullptr},
                             {"group_size", 16},
                             {"exclude_modules", not_quantized()}}}};
    }

    void add_compressed_tensors_config() {
        const auto scheme = [](nlohmann::json dynamic) {
            return nlohmann::json{{"dynamic", std::move(dynamic)}, {"group_size", 16},  {"num_bits", 4},
                                  {"strategy", "tensor_group"},    {"symmetric", true}, {"type", "float"}};
        };
        nlohmann::json group = {{"format", "nvfp4-pack-quantized"},
                                {"input_activations", nullptr},
                                {"output_activations", nullptr},
                                {"targets", {"Linear"}},
                                {"weights", scheme(false)}};
        if (options_.has_input_scales) group["input_activations"] = scheme("local");
        config["quantization_config"] = {{"config_groups", {{"group_0", group}}},
                                         {"format", "nvfp4-pack-quantized"},
                                         {"ignore", not_quantized()},
                                         {"quant_method", "compressed-tensors"},
                                         {"quantization_status", "compressed"},
                                         {"version", "0.19.0"}};
    }

    std::vector<std::string> not_quantized() const {
        std::vector<std::string> modules = {"lm_head"};
        for (int layer = 0; layer < options_.num_layers; ++layer) {
            modules.push_back("model.layers." + std::to_string(layer) + ".self_attn.o_proj");
            if (layer >= options_.first_moe_layer) modules.push_back(block(layer) + "gate");
        }
        return modules;
    }

    CheckpointOptions options_;
    std::mt19937_64 random_;
    TemporaryFolder folder_;
};

}  // namespace moe4::test
