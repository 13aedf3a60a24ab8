// The reference, the oracle and the router against a small trained model's golden outputs (MOE4_TEST_DATA).
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "moe/reference.hpp"
#include "moe/routers.hpp"
#include "moe4/safetensors.hpp"
#include "rel_l2.hpp"

namespace moe4::moe {
namespace {

constexpr int kNumExperts = 16;
constexpr int kTopK = 4;

template <class T>
std::vector<T> values(const SafetensorsFile& file, const std::string& name) {
    const auto tensor = file.find(name);
    if (!tensor) throw std::runtime_error("no " + name);
    std::vector<T> result(tensor->num_bytes() / sizeof(T));
    std::memcpy(result.data(), tensor->data, tensor->num_bytes());
    return result;
}

/// One of the two tools' files, read by name: these tests stand without the loader's help.
MoeWeights load(const std::string& folder, const std::string& dialect, int layer) {
    const bool divides = dialect == "compressed-tensors";
    const auto file = SafetensorsFile::open(folder + (divides ? "/tinymoe-ct" : "/tinymoe-modelopt") +
                                            "/model.safetensors");
    const auto scalar = [&](const std::string& name) {
        const auto x = static_cast<double>(values<float>(file, name).at(0));
        return divides ? 1.0 / x : x;
    };
    const std::string block = "model.layers." + std::to_string(layer) + ".mlp.";
    const auto matrix = [&](const std::string& name) {
        const TensorView packed = *file.find(name + (divides ? ".weight_packed" : ".weight"));
        const TensorView scales = *file.find(name + ".weight_scale");
        return ExpertMatrix{
            {static_cast<const std::uint8_t*>(packed.data), static_cast<const std::uint8_t*>(scales.data),
             scalar(name + (divides ? ".weight_global_scale" : ".weight_scale_2")), packed.shape[0],
             packed.shape[1] * 2, packed.shape[1], scales.shape[1]},
            scalar(name + (divides ? ".input_global_scale" : ".input_scale")),
            name};
    };
    MoeWeights weights;
    weights.layer = layer;
    weights.config = {.hidden_size = 512, .intermediate_size = 192, .num_experts = kNumExperts, .router = {}};
    weights.config.router = {.top_k = kTopK, .renormalize = true};
    for (int e = 0; e < kNumExperts; ++e) {
        const std::string expert = block + "experts." + std::to_string(e) + ".";
        weights.experts.push_back(
            {matrix(expert + "gate_proj"), matrix(expert + "up_proj"), matrix(expert + "down_proj")});
    }
    weights.router = *file.find(block + "gate.weight");
    weights.leaves.scales_divide = divides;
    weights.owner = file.owner();
    return weights;
}

class Golden : public testing::TestWithParam<std::tuple<int, const char*, Precision>> {
protected:
    void SetUp() override {
        const char* data = std::getenv("MOE4_TEST_DATA");
        if (data == nullptr) GTEST_SKIP() << "MOE4_TEST_DATA is not set";
        folder_ = data;
    }
    std::string folder_;
};

TEST_P(Golden, ReferenceAndOracleAgree) {
    const auto [layer, dialect, precision] = GetParam();
    const auto golden =
        SafetensorsFile::open(folder_ + "/tinymoe-golden/layer" + std::to_string(layer) + ".safetensors");
    const MoeWeights weights = load(folder_, dialect, layer);
    const auto hidden = values<std::uint16_t>(golden, "hidden");
    const auto ids = values<std::int32_t>(golden, "top_k_ids");
    const auto top_k_weights = values<float>(golden, "top_k_weights");
    const ReferenceInput input{hidden, ids, top_k_weights, static_cast<std::int64_t>(hidden.size()) / 512,
                               kTopK};
    const bool is_w4a4 = precision == Precision::w4a4;
    const auto expected =
        values<float>(golden, std::string("output.") + dialect + (is_w4a4 ? ".w4a4" : ".w4a16"));
    const ReferenceProblem problem{.precision = precision, .experts = {}};

    // The golden data are the oracle's own arithmetic, rounded to fp32 (6e-8). Its sums run in another order,
    // and a difference in the last bit of a double can move one h across a bf16 tie: 5e-6. The reference sums
    // in fp32.
    const double oracle = test::rel_l2(oracle_layer(weights, problem, input), expected);
    const double reference = test::rel_l2(reference_layer(weights, problem, input), expected);
    std::printf("layer %d %s %s: rel-L2 of the oracle %.2g, of the reference %.2g\n", layer, dialect,
                is_w4a4 ? "w4a4" : "w4a16", oracle, reference);
    EXPECT_LT(oracle, 1e-5);
    EXPECT_LT(reference, is_w4a4 ? 3e-3 : 1e-3);
}

INSTANTIATE_TEST_SUITE_P(Tinymoe, Golden,
                         testing::Combine(testing::Values(0, 4),
                                          testing::Values("modelopt", "compressed-tensors"),
                                          testing::Values(Precision::w4a16, Precision::w4a4)));

TEST(GoldenRouter, PicksTheSameExperts) {
    const char* data = std::getenv("MOE4_TEST_DATA");
    if (data == nullptr) GTEST_SKIP() << "MOE4_TEST_DATA is not set";
    for (const int layer : {0, 4}) {
        const auto golden = SafetensorsFile::open(std::string(data) + "/tinymoe-golden/layer" +
                                                  std::to_string(layer) + ".safetensors");
        const MoeWeights weights = load(data, "modelopt", layer);
        const auto hidden = values<std::uint16_t>(golden, "hidden");
        const auto ids = values<std::int32_t>(golden, "top_k_ids");
        const auto top_k_weights = values<float>(golden, "top_k_weights");
        for (std::size_t token = 0; token * 512 < hidden.size(); ++token) {
            std::int32_t found_ids[kTopK];
            float found_weights[kTopK];
            route_token(weights.config, weights.router, {}, &hidden[token * 512], found_ids, found_weights);
            for (std::size_t j = 0; j < kTopK; ++j) {
                EXPECT_EQ(found_ids[j], ids[token * kTopK + j]) << "layer " << layer << ", token " << token;
                EXPECT_NEAR(found_weights[j], top_k_weights[token * kTopK + j], 1e-6F);
            }
        }
    }
}

}  // namespace
}  // namespace moe4::moe
