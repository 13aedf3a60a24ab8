#include "checkpoint/model_config.hpp"

#include "checkpoint/json_object.hpp"
#include "checkpoint/mapped_file.hpp"
#include "moe4/error.hpp"

namespace moe4::checkpoint {

namespace {

using nlohmann::json;

constexpr std::int64_t kMaxSize = std::int64_t{1} << 24;  // of a dimension
constexpr std::int64_t kMaxCount = 1 << 16;               // of layers, experts, groups

std::string upper(std::string text) {
    for (char& c : text) {
        if (c >= 'a' && c <= 'z') c = static_cast<char>(c - 'a' + 'A');
    }
    return text;
}

NumberScheme read_scheme(const JsonObject& object) {
    NumberScheme scheme{.num_bits = object.integer("num_bits", 1, 64),
                        .group_size = object.integer("group_size", -1, kMaxSize),
                        .symmetric = object.boolean("symmetric"),
                        .type = object.string("type").value_or(""),
                        .strategy = object.string("strategy").value_or(""),
                        .dynamic = ""};
    if (const json* dynamic = object.find("dynamic")) {
        if (dynamic->is_boolean()) {
            scheme.dynamic = dynamic->get<bool>() ? "true" : "false";
        } else {
            scheme.dynamic = *object.string("dynamic");
        }
    }
    return scheme;
}

QuantizationGroup read_group(const JsonObject& object) {
    QuantizationGroup group{.where = object.where(""),
                            .format = object.string("format").value_or(""),
                            .weights = {},
                            .input_activations = {}};
    group.where.pop_back();
    if (const auto weights = object.object("weights")) group.weights = read_scheme(*weights);
    if (const auto inputs = object.object("input_activations"))
        group.input_activations = read_scheme(*inputs);
    return group;
}

std::string read_producer(const JsonObject& object) {
    const auto producer = object.object("producer");
    if (!producer) return "";
    const std::string version = producer->string("version").value_or("");
    return producer->string("name").value_or("") + (version.empty() ? "" : " " + version);
}

Quantization read_quantization(const JsonObject& object) {
    Quantization result;
    result.where = object.where("");
    result.where.pop_back();
    result.method = object.string("quant_method").value_or("");
    result.producer = read_producer(object);
    if (const auto algorithm = object.string("quant_algo"))
        result.algorithm = {upper(*algorithm), object.where("quant_algo")};
    if (const auto format = object.string("format")) result.format = {*format, object.where("format")};
    if (const auto size = object.integer("group_size", -1, kMaxSize))
        result.group_size = {*size, object.where("group_size")};
    if (result.method == "compressed-tensors" && result.producer.empty()) {
        const std::string version = object.string("version").value_or("");
        result.producer = result.method + (version.empty() ? "" : " " + version);
    }
    object.each("config_groups", [&](const std::string&, const JsonObject& group) {
        result.groups.push_back(read_group(group));
    });
    object.each("quantized_layers", [&](const std::string& module, const JsonObject& layer) {
        result.layer_algorithms[module] = upper(layer.string("quant_algo").value_or(""));
    });
    if (const json* transform = object.find("transform_config"); transform != nullptr && !transform->empty())
        result.transform = object.where("transform_config");
    for (const char* key : {"exclude_modules", "ignore"}) {
        for (std::string& module : object.strings(key)) result.excluded.push_back(std::move(module));
    }
    return result;
}

/// config.json holds it at the top, within text_config, or as the older compression_config.
std::optional<Quantization> find_quantization(const JsonObject& top,
                                              const std::optional<JsonObject>& text_config) {
    if (const auto found = top.object("quantization_config")) return read_quantization(*found);
    if (text_config) {
        if (const auto found = text_config->object("quantization_config")) return read_quantization(*found);
    }
    if (const auto found = top.object("compression_config")) return read_quantization(*found);
    return std::nullopt;
}

/// hf_quant_config.json: the algorithm lies one level down, the producer beside it.
Quantization read_hf_quant_config(const JsonObject& top) {
    const auto inner = top.object("quantization");
    if (!inner) fail_at(top.where("quantization"), "is missing, expected an object");
    Quantization result = read_quantization(*inner);
    if (result.producer.empty()) result.producer = read_producer(top);
    return result;
}

/// transformers has three names for the number of experts; a file that holds two of them must agree.
std::optional<Stated<std::int64_t>> read_num_experts(const JsonObject& model) {
    std::optional<Stated<std::int64_t>> found;
    for (const char* key : {"num_experts", "num_local_experts", "n_routed_experts"}) {
        const auto value = model.integer(key, 1, kMaxCount);
        if (!value) continue;
        if (found && found->value != *value) {
            fail_at(model.where(key), "is " + std::to_string(*value) + " but " + found->where + " is " +
                                          std::to_string(found->value));
        }
        found = {*value, model.where(key)};
    }
    return found;
}

void read_router_keys(const JsonObject& model, ModelConfig& config) {
    config.num_experts = read_num_experts(model);
    config.num_experts_per_tok = model.integer("num_experts_per_tok", 1, kMaxCount);
    config.n_shared_experts = model.integer("n_shared_experts", 0, kMaxCount);
    config.scoring_func = model.string("scoring_func");
    config.topk_method = model.string("topk_method");
    config.norm_topk_prob = model.boolean("norm_topk_prob");
    config.n_group = model.integer("n_group", 1, kMaxCount);
    config.topk_group = model.integer("topk_group", 1, kMaxCount);
    config.routed_scaling_factor = model.number("routed_scaling_factor");
}

void read_layer_keys(const JsonObject& model, ModelConfig& config) {
    config.num_hidden_layers = model.integer("num_hidden_layers", 0, kMaxCount);
    config.mlp_only_layers = model.integers("mlp_only_layers", 0, kMaxCount);
    config.decoder_sparse_step = model.integer("decoder_sparse_step", 1, kMaxCount);
    config.first_k_dense_replace = model.integer("first_k_dense_replace", 0, kMaxCount);
    config.moe_layer_freq = model.integer("moe_layer_freq", 1, kMaxCount);
    config.mlp_layer_types = model.strings("mlp_layer_types");
}

std::string_view text_of(const MappedFile& file) {
    return {reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()};
}

}  // namespace

ModelConfig parse_model_config(std::string_view text, const std::string& file, std::string_view hf_quant_text,
                               const std::string& hf_quant_file) {
    const json document = parse_json(text, file);
    const JsonObject top(document, file + ": ");
    const auto text_config = top.object("text_config");
    const JsonObject& model = text_config ? *text_config : top;

    ModelConfig config;
    config.file = file;
    config.model_type = model.string("model_type").value_or(top.string("model_type").value_or(""));
    config.hidden_act = model.string("hidden_act");
    config.hidden_size = model.integer("hidden_size", 1, kMaxSize);
    config.intermediate_size = model.integer("intermediate_size", 1, kMaxSize);
    config.moe_intermediate_size = model.integer("moe_intermediate_size", 1, kMaxSize);
    read_router_keys(model, config);
    read_layer_keys(model, config);

    if (auto found = find_quantization(top, text_config)) config.quantizations.push_back(std::move(*found));
    if (!hf_quant_text.empty()) {
        const json hf_quant = parse_json(hf_quant_text, hf_quant_file);
        config.quantizations.push_back(read_hf_quant_config(JsonObject(hf_quant, hf_quant_file + ": ")));
    }
    return config;
}

ModelConfig read_model_config(const std::filesystem::path& folder) {
    const std::filesystem::path config = folder / "config.json";
    const std::filesystem::path hf_quant_config = folder / "hf_quant_config.json";
    std::error_code ignored;
    if (!std::filesystem::exists(config, ignored)) {
        throw Error(ErrorKind::broken_file,
                    config.string() + " is missing, expected the model's configuration beside its tensors");
    }
    const auto file = MappedFile::open(config, ErrorKind::broken_file);
    if (!std::filesystem::exists(hf_quant_config, ignored))
        return parse_model_config(text_of(*file), config.string());
    const auto hf_quant_file = MappedFile::open(hf_quant_config, ErrorKind::broken_file);
    if (hf_quant_file->bytes().empty()) fail_at(hf_quant_config.string(), "is empty, expected a JSON object");
    return parse_model_config(text_of(*file), config.string(), text_of(*hf_quant_file),
                              hf_quant_config.string());
}

}  // namespace moe4::checkpoint
