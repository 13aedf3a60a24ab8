// moe4 dequantize: the library's bits, expert by expert.
#include "checkpoint_fixture.hpp"
#include "command_line.hpp"
#include "moe4/moe4.hpp"

namespace moe4::test {
namespace {

constexpr std::pair<Projection, const char*> kProjections[] = {
    {Projection::gate, "gate"}, {Projection::up, "up"}, {Projection::down, "down"}};

class Dequantize : public testing::Test {
protected:
    Finished dequantize(std::vector<std::string> more) const {
        more.insert(more.begin(),
                    {"dequantize", checkpoint_.write().string(), "--layer", "1", "--output", output()});
        return moe4(more);
    }
    std::string output() const { return (folder_ / "w.safetensors").string(); }
    std::vector<float> expected(int expert, Projection projection) const {
        const MoeWeights weights = Checkpoint::open(checkpoint_.write()).moe_layer(1);
        const Nvfp4View& matrix = weights.experts[static_cast<std::size_t>(expert)][projection].weight;
        std::vector<float> values(static_cast<std::size_t>(matrix.rows * matrix.cols));
        moe4::dequantize(matrix, values.data());
        return values;
    }

    TemporaryFolder folder_;
    CheckpointFixture checkpoint_;
};

TEST_F(Dequantize, AllExpertsInF32AreTheLibrarysBits) {
    const Finished finished = dequantize({});
    ASSERT_EQ(finished.exit_code, 0) << finished.err;
    const auto file = SafetensorsFile::open(output());
    EXPECT_EQ(file.entries().size(), 12U);
    for (int expert = 0; expert < 4; ++expert) {
        for (const auto& [projection, name] : kProjections) {
            const std::string tensor = "experts." + std::to_string(expert) + "." + name + "_proj.weight";
            const Shape shape = projection == Projection::down ? Shape{64, 32} : Shape{32, 64};
            ASSERT_TRUE(file.find(tensor)) << tensor;
            EXPECT_EQ(file.find(tensor)->shape, shape);
            EXPECT_EQ(tensor_values<float>(file, tensor), expected(expert, projection)) << tensor;
        }
    }
}

TEST_F(Dequantize, OneExpertInBf16IsRoundedToNearestEven) {
    const Finished finished = dequantize({"--expert", "2", "--dtype", "bf16", "--json"});
    ASSERT_EQ(finished.exit_code, 0) << finished.err;
    EXPECT_EQ(finished.json().at("matrices"), 3);
    const auto file = SafetensorsFile::open(output());
    EXPECT_EQ(file.entries().size(), 3U);
    const auto bits = tensor_values<std::uint16_t>(file, "experts.2.down_proj.weight");
    const std::vector<float> values = expected(2, Projection::down);
    ASSERT_EQ(bits.size(), values.size());
    for (std::size_t i = 0; i < bits.size(); ++i) EXPECT_EQ(bits[i], round_to_bf16(values[i]));
}

TEST_F(Dequantize, RefusalsLeaveNoFile) {
    EXPECT_EQ(dequantize({"--expert", "4"}).exit_code, 2);
    EXPECT_EQ(dequantize({"--expert", "-1"}).exit_code, 2);
    EXPECT_EQ(dequantize({"--dtype", "f16"}).exit_code, 2);
    checkpoint_.tensors.erase(checkpoint_.module(1, 3, Projection::up) + ".weight_scale");
    const Finished missing = dequantize({"--json"});
    EXPECT_EQ(missing.exit_code, 4);
    EXPECT_NE(json_error(missing).at("message").get<std::string>().find(
                  "model.layers.1.mlp.experts.3.up_proj.weight_scale"),
              std::string::npos);
    EXPECT_TRUE(names_in(folder_.path()).empty());
}

}  // namespace
}  // namespace moe4::test
