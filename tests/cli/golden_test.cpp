// The command line on two checkpoints of a small trained model, as ModelOpt and llm-compressor wrote them
// (MOE4_TEST_DATA).
#include "command_line.hpp"
#include "layer_files.hpp"
#include "rel_l2.hpp"
#include "sha256.hpp"

namespace moe4::test {
namespace {

constexpr std::pair<const char*, const char*> kFolders[] = {{"modelopt", "tinymoe-modelopt"},
                                                            {"compressed-tensors", "tinymoe-ct"}};

class Golden : public testing::Test {
protected:
    void SetUp() override {
        const char* data = std::getenv("MOE4_TEST_DATA");
        if (data == nullptr) GTEST_SKIP() << "MOE4_TEST_DATA is not set";
        data_ = data;
    }

    std::vector<float> run(const std::string& name, const std::string& layer, const std::string& mode,
                           const std::vector<NamedTensor>& input) const {
        const std::string x = (folder_ / "x.safetensors").string();
        const std::string y = (folder_ / "y.safetensors").string();
        write_safetensors(x, input);
        const Finished finished = moe4({"run", (data_ / name).string(), "--layer", layer, "--input", x,
                                        "--output", y, "--output-dtype", "f32", "--mode", mode});
        EXPECT_EQ(finished.exit_code, 0) << finished.err;
        return tensor_values<float>(SafetensorsFile::open(y), "output");
    }

    std::filesystem::path data_;
    TemporaryFolder folder_;
};

TEST_F(Golden, RunAgreesWithGivenIdsAndWithTheLayersOwnRouter) {
    for (const auto& [tool, name] : kFolders) {
        for (const std::string layer : {"0", "4"}) {
            const auto golden =
                SafetensorsFile::open(data_ / "tinymoe-golden" / ("layer" + layer + ".safetensors"));
            const std::vector<NamedTensor> given = {{"hidden", *golden.find("hidden")},
                                                    {"top_k_ids", *golden.find("top_k_ids")},
                                                    {"top_k_weights", *golden.find("top_k_weights")}};
            for (const auto& [mode, limit] : {std::pair{"w4a16", 1e-3}, std::pair{"w4a4", 3e-3}}) {
                const auto expected =
                    tensor_values<float>(golden, std::string("output.") + tool + "." + mode);
                const double with_ids = test::rel_l2(run(name, layer, mode, given), expected);
                const double with_router = test::rel_l2(run(name, layer, mode, {given[0]}), expected);
                std::printf("%s layer %s %s: rel-L2 %.2e with the given ids, %.2e with the layer's router\n",
                            tool, layer.c_str(), mode, with_ids, with_router);
                EXPECT_LE(with_ids, limit);
                EXPECT_LE(with_router, limit);
            }
        }
    }
}

/// With -0 written as +0, as the golden file has them.
std::string digest(const SafetensorsFile& file, const std::string& name) {
    std::vector<float> values = tensor_values<float>(file, name);
    for (float& x : values) x += 0.0F;
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(values.data());
    return sha256({bytes, values.size() * sizeof(float)});
}

TEST_F(Golden, DequantizeGivesTheToolsBitsOfAllMatrices) {
    const auto golden =
        nlohmann::json::parse(read_file(data_ / "tinymoe-golden" / "dequantized-sha256.json"));
    int compared = 0;
    for (const auto& [tool, name] : kFolders) {
        for (int layer = 0; layer < 5; ++layer) {
            const std::string output = (folder_ / "w.safetensors").string();
            ASSERT_EQ(moe4({"dequantize", (data_ / name).string(), "--layer", std::to_string(layer),
                            "--output", output})
                          .exit_code,
                      0);
            const auto found = SafetensorsFile::open(output);
            for (int expert = 0; expert < 16; ++expert) {
                for (const std::string projection : {"gate_proj", "up_proj", "down_proj"}) {
                    const std::string suffix = std::to_string(expert) + "." + projection;
                    const std::string key = std::to_string(layer) + "." + suffix;
                    EXPECT_EQ(digest(found, "experts." + suffix + ".weight"), golden.at(tool).at(key))
                        << tool << key;
                    ++compared;
                }
            }
        }
    }
    EXPECT_EQ(compared, 480);
    std::printf("%d matrices have the tools' SHA-256\n", compared);
}

TEST_F(Golden, InspectAndLayertestFindNothingWrong) {
    for (const auto& [tool, name] : kFolders) {
        const Finished inspected = moe4({"inspect", (data_ / name).string(), "--json"});
        ASSERT_EQ(inspected.exit_code, 0) << inspected.err;
        const nlohmann::json document = inspected.json();
        EXPECT_EQ(document.at("dialect"), tool);
        EXPECT_EQ(document.at("layers").size(), 5U);
        EXPECT_EQ(document.at("refusals"), nlohmann::json::array());
        const Finished tested = moe4({"layertest", (data_ / name).string(), "--layer", "all", "--reference",
                                      (data_ / "tinymoe").string(), "--json"});
        EXPECT_EQ(tested.exit_code, 0) << tested.out << tested.err;
        const nlohmann::json judged = tested.json();
        EXPECT_EQ(judged.at("layers").size(), 5U);
        for (const auto& layer : judged.at("layers")) {
            std::printf("%s layer %d: weights %.4f, activations %.4f, engine %.1e\n", tool,
                        layer.at("layer").get<int>(), layer.at("weights").at("rel_l2").get<double>(),
                        layer.at("activations").at("rel_l2").get<double>(),
                        layer.at("engine").at("rel_l2").get<double>());
        }
    }
}

}  // namespace
}  // namespace moe4::test
