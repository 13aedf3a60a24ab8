// Any bytes as config.json and, after a zero byte, hf_quant_config.json: refused with moe4::Error, or a
// configuration that the families and the claims can be asked about.
#include <cstdint>
#include <string_view>

#include "checkpoint/families.hpp"
#include "checkpoint/model_config.hpp"
#include "checkpoint/quantization_claims.hpp"
#include "moe4/error.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    using namespace moe4::checkpoint;
    const std::string_view text(reinterpret_cast<const char*>(data), size);
    const std::size_t zero = text.find('\0');
    const std::string_view hf_quant_text =
        zero == std::string_view::npos ? std::string_view{} : text.substr(zero + 1);
    try {
        const ModelConfig config =
            parse_model_config(text.substr(0, zero), "config.json", hf_quant_text, "hf_quant_config.json");
        Refusals refusals;
        const std::vector<std::string> modules = {"model.layers.0.mlp.experts.0.gate_proj",
                                                  "model.layers.0.mlp.experts.0.down_proj"};
        check_claims(config, modules, refusals);
        nvfp4_label(config, modules.front());
        requested_precision(config, modules);
        for (const Quantization& quantization : config.quantizations) other_scheme(quantization);
        for (int layer = 0; layer < 4; ++layer) says_moe(config, layer);
        for (const Family& family : families()) moe_config(family, config, refusals);
        find_family(config);
    } catch (const moe4::Error&) {
    }
    return 0;
}
