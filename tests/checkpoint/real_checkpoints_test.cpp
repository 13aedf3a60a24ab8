// The small MoE as ModelOpt and llm-compressor wrote it: loads, dequantises to the tools' bits, and is what
// the quantisers make of its BF16 original. Needs MOE4_TEST_DATA.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <span>

#include "format/quantize.hpp"
#include "moe4/checkpoint.hpp"
#include "sha256.hpp"

namespace moe4 {
namespace {

constexpr const char* kProjectionNames[] = {"gate_proj", "up_proj", "down_proj"};

struct Tool {
    const char* folder;
    const char* name;  // in the golden file, and our dialect
    format::Nvfp4Matrix (*quantize)(std::span<const std::uint16_t>, std::int64_t, std::int64_t, float);
};
constexpr Tool kTools[] = {
    {"tinymoe-modelopt", "modelopt", format::quantize_modelopt},
    {"tinymoe-ct", "compressed-tensors", format::quantize_compressed_tensors},
};

class RealCheckpoint : public testing::TestWithParam<Tool> {
protected:
    void SetUp() override {
        const char* folder = std::getenv("MOE4_TEST_DATA");
        if (folder == nullptr) GTEST_SKIP() << "MOE4_TEST_DATA is not set";
        data_ = folder;
    }
    std::filesystem::path data_;
};

std::vector<std::uint16_t> bf16_values(const TensorView& tensor) {
    EXPECT_EQ(tensor.dtype, DType::bf16);
    std::vector<std::uint16_t> values(static_cast<std::size_t>(tensor.shape.num_elements()));
    std::memcpy(values.data(), tensor.data, values.size() * sizeof values[0]);
    return values;
}

std::string dequantized_sha256(const Nvfp4View& matrix) {
    std::vector<float> values(static_cast<std::size_t>(matrix.rows * matrix.cols), -7.0F);
    dequantize(matrix, values.data());
    for (float& value : values) value += 0.0F;  // -0 becomes +0
    return test::sha256(
        {reinterpret_cast<const std::uint8_t*>(values.data()), values.size() * sizeof(float)});
}

TEST_P(RealCheckpoint, LoadsEveryLayer) {
    const auto checkpoint = Checkpoint::open(data_ / GetParam().folder);
    EXPECT_EQ(checkpoint.dialect(), GetParam().name);
    EXPECT_EQ(checkpoint.family(), "qwen3_moe");
    EXPECT_EQ(checkpoint.moe_layers(), (std::vector<int>{0, 1, 2, 3, 4}));
    EXPECT_EQ(checkpoint.warnings(), std::vector<std::string>{});
    EXPECT_EQ(checkpoint.disagreements(), std::vector<std::string>{});
    EXPECT_EQ(checkpoint.unmatched(), std::vector<std::string>{"lm_head"});  // tied to the embedding
    EXPECT_EQ(checkpoint.unused(), std::vector<std::string>{});
    for (const int layer : checkpoint.moe_layers()) {
        const LayerInfo info = checkpoint.inspect_layer(layer, Checkpoint::Scan::block_scales);
        EXPECT_EQ(info.format, "nvfp4");
        EXPECT_EQ(info.refusals, std::vector<std::string>{});
        EXPECT_EQ(info.modes, (std::vector{Precision::w4a16, Precision::w4a4}));
        EXPECT_EQ(info.block_scales->total, 16U * 3 * 192 * 512 / 16);
        EXPECT_EQ(info.gate_up_global_mismatches, 0);
        EXPECT_EQ(checkpoint.preferred_precision(layer).precision, Precision::w4a4);
        const MoeWeights weights = checkpoint.moe_layer(layer);
        EXPECT_EQ(weights.config.router.top_k, 4);
        EXPECT_TRUE(weights.config.router.renormalize);
        EXPECT_EQ(weights.router.shape, (Shape{16, 512}));
    }
}

TEST_P(RealCheckpoint, DequantizesToTheToolsBits) {
    const auto golden =
        nlohmann::json::parse(std::ifstream(data_ / "tinymoe-golden" / "dequantized-sha256.json"));
    const auto checkpoint = Checkpoint::open(data_ / GetParam().folder);
    int matrices = 0;
    for (const int layer : checkpoint.moe_layers()) {
        const MoeWeights weights = checkpoint.moe_layer(layer);
        for (std::size_t expert = 0; expert < weights.experts.size(); ++expert) {
            for (const Projection projection : kProjections) {
                const std::string key = std::to_string(layer) + "." + std::to_string(expert) + "." +
                                        kProjectionNames[static_cast<int>(projection)];
                EXPECT_EQ(dequantized_sha256(weights.experts[expert][projection].weight),
                          golden[GetParam().name][key].get<std::string>())
                    << key;
                ++matrices;
            }
        }
    }
    EXPECT_EQ(matrices, 240);
}

TEST_P(RealCheckpoint, IsWhatTheQuantizerMakesOfTheOriginal) {
    const auto checkpoint = Checkpoint::open(data_ / GetParam().folder);
    const auto original = Checkpoint::open(data_ / "tinymoe");
    EXPECT_EQ(original.dialect(), "unquantized");
    for (const int layer : checkpoint.moe_layers()) {
        const MoeWeights weights = checkpoint.moe_layer(layer);
        for (int expert = 0; expert < weights.config.num_experts; ++expert) {
            float amax[3];
            for (const Projection projection : kProjections) {
                amax[static_cast<int>(projection)] = format::largest_magnitude(
                    bf16_values(original.unquantized_matrix(layer, expert, projection).tensor));
            }
            amax[0] = amax[1] = std::max(amax[0], amax[1]);  // both tools let gate and up share a global
            for (const Projection projection : kProjections) {
                const ExpertMatrix& found = weights.experts[static_cast<std::size_t>(expert)][projection];
                SCOPED_TRACE(found.name);
                const Nvfp4View& view = found.weight;
                const format::Nvfp4Matrix made = GetParam().quantize(
                    bf16_values(original.unquantized_matrix(layer, expert, projection).tensor), view.rows,
                    view.cols, amax[static_cast<int>(projection)]);
                EXPECT_TRUE(std::equal(made.packed.begin(), made.packed.end(), view.packed));
                EXPECT_TRUE(std::equal(made.block_scale.begin(), made.block_scale.end(), view.block_scale));
                const auto stored = static_cast<double>(made.stored_global_scale);
                EXPECT_EQ(weights.leaves.scales_divide ? 1.0 / stored : stored, view.global_scale);
            }
        }
    }
}

INSTANTIATE_TEST_SUITE_P(Tools, RealCheckpoint, testing::ValuesIn(kTools),
                         [](const auto& tool) { return tool.index == 0 ? "Modelopt" : "CompressedTensors"; });

TEST(Sha256, KnownDigests) {
    const auto digest = [](std::string_view text) {
        return test::sha256({reinterpret_cast<const std::uint8_t*>(text.data()), text.size()});
    };
    EXPECT_EQ(digest(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    EXPECT_EQ(digest("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
              "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
}

}  // namespace
}  // namespace moe4
