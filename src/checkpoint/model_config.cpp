#include "checkpoint/model_config.hpp"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

#include "checkpoint/mapped_file.hpp"
#include "moe4/error.hpp"

namespace moe4::checkpoint {

namespace {

using nlohmann::json;

constexpr int kMaxDepth = 64;
constexpr std::size_t kMaxBytes = std::size_t{32} << 20;  // a document takes ten times its text
constexpr std::int64_t kMaxSize = std::int64_t{1} << 24;  // of a dimension
constexpr std::int64_t kMaxCount = 1 << 16;               // of layers, experts, groups

[[noreturn]] void fail(const std::string& where, const std::string& what) {
    throw Error(ErrorKind::broken_file, where + " " + what);
}

std::string printed(const json& value) {
    constexpr std::size_t kMaxLength = 60;
    if (value.is_object()) return "an object";
    if (value.is_array()) return "an array";
    std::string text = value.dump(-1, ' ', false, json::error_handler_t::replace);
    if (text.size() > kMaxLength) text.replace(kMaxLength, std::string::npos, "...");
    return text;
}

/// The JSON library keeps the last of two equal keys and nests without limit: both are refused here.
json parse_json(std::string_view text, const std::string& file) {
    if (text.size() > kMaxBytes) fail(file, "is larger than 32 MiB");
    std::vector<std::set<std::string>> keys;
    const auto check = [&](int depth, json::parse_event_t event, json& parsed) {
        if (depth > kMaxDepth) fail(file, "is nested more than 64 levels deep");
        if (event == json::parse_event_t::object_start) keys.emplace_back();
        if (event == json::parse_event_t::object_end) keys.pop_back();
        if (event == json::parse_event_t::key && !keys.back().insert(parsed.get<std::string>()).second)
            fail(file, "holds the key " + printed(parsed) + " twice in one object");
        return true;
    };
    try {
        json document = json::parse(text.begin(), text.end(), check);
        if (!document.is_object()) fail(file, "is " + printed(document) + ", expected a JSON object");
        return document;
    } catch (const json::parse_error& error) {
        const std::string_view before = text.substr(0, error.byte);
        const auto line = std::count(before.begin(), before.end(), '\n') + 1;
        fail(file, "is not valid JSON at line " + std::to_string(line) + " (byte " +
                       std::to_string(error.byte) + ")");
    } catch (const json::out_of_range&) {
        fail(file, "holds a number that is out of range");
    }
}

/// A JSON object whose members have the type that is asked for, or are refused. null counts as absent.
class Object {
public:
    Object(const json& object, std::string where) : object_(object), where_(std::move(where)) {}

    std::string where(std::string_view key) const {
        return where_ + (where_.ends_with(": ") ? "" : ".") + std::string(key);
    }

    const json* find(std::string_view key) const {
        const auto found = object_.find(key);
        return found == object_.end() || found->is_null() ? nullptr : &*found;
    }

    std::optional<Object> object(std::string_view key) const {
        const json* value = find(key);
        if (value == nullptr) return std::nullopt;
        if (!value->is_object()) refuse(key, *value, "an object");
        return Object(*value, where(key));
    }

    std::optional<std::string> string(std::string_view key) const {
        const json* value = find(key);
        if (value == nullptr) return std::nullopt;
        if (!value->is_string()) refuse(key, *value, "a string");
        return value->get<std::string>();
    }

    std::optional<bool> boolean(std::string_view key) const {
        const json* value = find(key);
        if (value == nullptr) return std::nullopt;
        if (!value->is_boolean()) refuse(key, *value, "true or false");
        return value->get<bool>();
    }

    std::optional<double> number(std::string_view key) const {
        const json* value = find(key);
        if (value == nullptr) return std::nullopt;
        if (!value->is_number() || !std::isfinite(value->get<double>()))
            refuse(key, *value, "a finite number");
        return value->get<double>();
    }

    std::optional<std::int64_t> integer(std::string_view key, std::int64_t min, std::int64_t max) const {
        const json* value = find(key);
        if (value == nullptr) return std::nullopt;
        return checked_integer(key, *value, min, max);
    }

    std::vector<std::int64_t> integers(std::string_view key, std::int64_t min, std::int64_t max) const {
        std::vector<std::int64_t> result;
        each_element(key, [&](const json& e) { result.push_back(checked_integer(key, e, min, max)); });
        return result;
    }

    std::vector<std::string> strings(std::string_view key) const {
        std::vector<std::string> result;
        each_element(key, [&](const json& e) {
            if (!e.is_string()) refuse(key, e, "strings");
            result.push_back(e.get<std::string>());
        });
        return result;
    }

    /// member(name, object) for every member of an object of objects; nothing when the key is absent.
    template <class Member>
    void each(std::string_view key, Member member) const {
        const auto container = object(key);
        if (!container) return;
        for (const auto& [name, value] : container->object_.items()) {
            if (!value.is_object()) container->refuse(name, value, "an object");
            member(name, Object(value, container->where(name)));
        }
    }

    [[noreturn]] void refuse(std::string_view key, const json& found, const std::string& expected) const {
        fail(where(key), "is " + printed(found) + ", expected " + expected);
    }

private:
    std::int64_t checked_integer(std::string_view key, const json& value, std::int64_t min,
                                 std::int64_t max) const {
        const bool fits = value.is_number_unsigned()
                              ? value.get<std::uint64_t>() <= static_cast<std::uint64_t>(max) &&
                                    value.get<std::int64_t>() >= min
                              : value.is_number_integer() && value.get<std::int64_t>() >= min &&
                                    value.get<std::int64_t>() <= max;
        if (!fits) {
            refuse(key, value, "a whole number from " + std::to_string(min) + " to " + std::to_string(max));
        }
        return value.get<std::int64_t>();
    }

    /// element(value) for every element of an array; nothing when the key is absent.
    template <class Element>
    void each_element(std::string_view key, Element element) const {
        const json* value = find(key);
        if (value == nullptr) return;
        if (!value->is_array()) refuse(key, *value, "an array");
        for (const json& e : *value) element(e);
    }

    const json& object_;
    std::string where_;
};

std::string upper(std::string text) {
    for (char& c : text) {
        if (c >= 'a' && c <= 'z') c = static_cast<char>(c - 'a' + 'A');
    }
    return text;
}

NumberScheme read_scheme(const Object& object) {
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

QuantizationGroup read_group(const Object& object) {
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

std::string read_producer(const Object& object) {
    const auto producer = object.object("producer");
    if (!producer) return "";
    const std::string version = producer->string("version").value_or("");
    return producer->string("name").value_or("") + (version.empty() ? "" : " " + version);
}

Quantization read_quantization(const Object& object) {
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
    object.each("config_groups",
                [&](const std::string&, const Object& group) { result.groups.push_back(read_group(group)); });
    object.each("quantized_layers", [&](const std::string& module, const Object& layer) {
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
std::optional<Quantization> find_quantization(const Object& top, const std::optional<Object>& text_config) {
    if (const auto found = top.object("quantization_config")) return read_quantization(*found);
    if (text_config) {
        if (const auto found = text_config->object("quantization_config")) return read_quantization(*found);
    }
    if (const auto found = top.object("compression_config")) return read_quantization(*found);
    return std::nullopt;
}

/// hf_quant_config.json: the algorithm lies one level down, the producer beside it.
Quantization read_hf_quant_config(const Object& top) {
    const auto inner = top.object("quantization");
    if (!inner) fail(top.where("quantization"), "is missing, expected an object");
    Quantization result = read_quantization(*inner);
    if (result.producer.empty()) result.producer = read_producer(top);
    return result;
}

/// transformers has three names for the number of experts; a file that holds two of them must agree.
std::optional<Stated<std::int64_t>> read_num_experts(const Object& model) {
    std::optional<Stated<std::int64_t>> found;
    for (const char* key : {"num_experts", "num_local_experts", "n_routed_experts"}) {
        const auto value = model.integer(key, 1, kMaxCount);
        if (!value) continue;
        if (found && found->value != *value) {
            fail(model.where(key), "is " + std::to_string(*value) + " but " + found->where + " is " +
                                       std::to_string(found->value));
        }
        found = {*value, model.where(key)};
    }
    return found;
}

void read_router_keys(const Object& model, ModelConfig& config) {
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

void read_layer_keys(const Object& model, ModelConfig& config) {
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
    const Object top(document, file + ": ");
    const auto text_config = top.object("text_config");
    const Object& model = text_config ? *text_config : top;

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
        config.quantizations.push_back(read_hf_quant_config(Object(hf_quant, hf_quant_file + ": ")));
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
    if (hf_quant_file->bytes().empty()) fail(hf_quant_config.string(), "is empty, expected a JSON object");
    return parse_model_config(text_of(*file), config.string(), text_of(*hf_quant_file),
                              hf_quant_config.string());
}

}  // namespace moe4::checkpoint
