// moe4 inspect: its document, and what it says of checkpoints that run would refuse.
#include "checkpoint_fixture.hpp"
#include "command_line.hpp"

namespace moe4::test {
namespace {

nlohmann::json inspect(const CheckpointFixture& checkpoint, std::vector<std::string> more = {}) {
    std::vector<std::string> arguments = {"inspect", checkpoint.write().string(), "--json"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const Finished finished = moe4(arguments);
    EXPECT_EQ(finished.exit_code, 0) << finished.err;
    return finished.json();
}

TEST(Inspect, JsonHasWhatTheHelpPromises) {
    const nlohmann::json document = inspect(CheckpointFixture());
    EXPECT_EQ(document.at("dialect"), "modelopt");
    EXPECT_EQ(document.at("producer"), "modelopt 0.47.0");
    EXPECT_EQ(document.at("family"), "qwen3_moe");
    for (const char* list : {"disagreements", "unmatched", "unused", "warnings", "refusals"}) {
        EXPECT_EQ(document.at(list), nlohmann::json::array()) << list;
    }
    ASSERT_EQ(document.at("layers").size(), 2U);
    const nlohmann::json& layer = document.at("layers").at(1);
    EXPECT_EQ(layer.at("layer"), 1);
    EXPECT_EQ(layer.at("format"), "nvfp4");
    EXPECT_EQ(layer.at("num_experts"), 4);
    EXPECT_EQ(layer.at("hidden_size"), 64);
    EXPECT_EQ(layer.at("intermediate_size"), 32);
    EXPECT_EQ(layer.at("modes"), (nlohmann::json{"w4a16", "w4a4"}));
    EXPECT_EQ(layer.at("block_scales").at("nan"), 0);
    EXPECT_EQ(layer.at("block_scales").at("negative"), 0);
    EXPECT_EQ(layer.at("block_scales").at("total"), 4 * 3 * 64 * 32 / 16);
    EXPECT_EQ(layer.at("gate_up_global_mismatches"), 0);
    for (const char* projection : {"gate", "up", "down"}) {
        const nlohmann::json& range = layer.at("input_scale").at(projection);
        EXPECT_GT(range.at("min").get<double>(), 0.0);
        EXPECT_GE(range.at("max").get<double>(), range.at("min").get<double>());
        EXPECT_EQ(range.at("faults"), nlohmann::json::array());
        EXPECT_GT(layer.at("global_scale").at(projection).at("min").get<double>(), 0.0);
    }
    EXPECT_GT(layer.at("bytes").get<int>(), 4 * 3 * 64 * 32 / 2);
}

TEST(Inspect, TextAndJsonTellTheSame) {
    const CheckpointFixture checkpoint({.family = "deepseek_v3", .num_layers = 3, .first_moe_layer = 1});
    const Finished finished = moe4({"inspect", checkpoint.write().string()});
    EXPECT_EQ(finished.exit_code, 0);
    EXPECT_EQ(finished.err, "");
    for (const char* word : {"modelopt 0.47.0", "deepseek_v3", "nvfp4", "w4a16 w4a4", "2 MoE layers"}) {
        EXPECT_NE(finished.out.find(word), std::string::npos) << word << "\n" << finished.out;
    }
}

TEST(Inspect, WithoutAScanThereAreNoCounts) {
    const nlohmann::json layer = inspect(CheckpointFixture(), {"--no-scan"}).at("layers").at(0);
    EXPECT_TRUE(layer.at("block_scales").is_null());
    EXPECT_EQ(layer.at("format"), "nvfp4");
}

TEST(Inspect, NamesWhatRunWouldRefuseAndExits0) {
    CheckpointFixture checkpoint;
    checkpoint.tensor(0, 2, Projection::down, "weight_scale_2").set<float>(0, -2.0F);
    checkpoint.tensor(0, 1, Projection::up, "weight_scale").set<std::uint8_t>(3, 0x7F);
    checkpoint.tensor(0, 1, Projection::up, "weight_scale").set<std::uint8_t>(4, 0x90);
    const nlohmann::json document = inspect(checkpoint);
    const nlohmann::json& layer = document.at("layers").at(0);
    EXPECT_EQ(layer.at("block_scales").at("nan"), 1);
    EXPECT_EQ(layer.at("block_scales").at("negative"), 1);
    EXPECT_EQ(document.at("layers").at(1).at("block_scales").at("nan"), 0);
    const std::string refusals = document.at("refusals").dump();
    EXPECT_NE(refusals.find("model.layers.0.mlp.experts.2.down_proj.weight_scale_2"), std::string::npos)
        << refusals;
    EXPECT_NE(refusals.find("-2"), std::string::npos) << refusals;
    EXPECT_NE(refusals.find("model.layers.0.mlp.experts.1.up_proj.weight_scale"), std::string::npos)
        << refusals;
    const std::string text = moe4({"inspect", checkpoint.folder().path().string()}).out;
    EXPECT_NE(text.find("run would refuse"), std::string::npos) << text;
}

TEST(Inspect, AScaleThatIsNotANumberStaysValidJson) {
    CheckpointFixture checkpoint;
    for (int expert = 0; expert < 4; ++expert) {
        checkpoint.tensor(1, expert, Projection::gate, "input_scale").set<float>(0, std::nanf(""));
    }
    const nlohmann::json range = inspect(checkpoint).at("layers").at(1).at("input_scale").at("gate");
    EXPECT_TRUE(range.at("min").is_null());
    EXPECT_EQ(range.at("faults").size(), 4U);
}

TEST(Inspect, NumbersInAConfigAreNoWork) {
    CheckpointFixture checkpoint;
    checkpoint.config["num_experts"] = 65536;
    const Finished finished = moe4({"inspect", checkpoint.write().string(), "--json"});
    EXPECT_EQ(finished.exit_code, 0) << finished.err;
    EXPECT_LT(finished.out.size(), 20'000U);
    const nlohmann::json document = finished.json();
    ASSERT_EQ(document.at("refusals").size(), 1U) << "of both layers";
    EXPECT_NE(
        document.at("refusals").at(0).get<std::string>().find("num_experts is 65536, expected at most 1024"),
        std::string::npos);
    EXPECT_EQ(moe4({"plan", checkpoint.write().string(), "--layer", "0"}).exit_code, 3);
}

TEST(Inspect, CountsGateAndUpThatDiffer) {
    CheckpointFixture checkpoint;
    StoredTensor& global = checkpoint.tensor(0, 1, Projection::up, "weight_scale_2");
    global.set<float>(0, global.get<float>() * 2.0F);
    EXPECT_EQ(inspect(checkpoint).at("layers").at(0).at("gate_up_global_mismatches"), 1);
}

TEST(Inspect, ANameThatIsNoUtf8StaysValidJson) {
    CheckpointFixture checkpoint;
    checkpoint.tensors["model.layers.0.mlp.experts.0.odd\xFF"] = {DType::u8, {1}, {0}};
    const Finished finished = moe4({"inspect", checkpoint.write().string(), "--json"});
    EXPECT_NO_THROW(finished.json()) << finished.out;
}

TEST(Inspect, AnAbsentShardIsNamedAndTheOtherLayersAreShown) {
    CheckpointFixture checkpoint;
    const std::filesystem::path folder = checkpoint.write();
    nlohmann::json index;
    for (const auto& [name, tensor] : checkpoint.tensors) {
        const bool is_absent = name.rfind("model.layers.1.", 0) == 0;
        index["weight_map"][name] = is_absent ? "absent.safetensors" : "model.safetensors";
    }
    for (const auto& [name, file] : index["weight_map"].items()) {
        if (file == "absent.safetensors") checkpoint.tensors.erase(name);
    }
    checkpoint.write();
    checkpoint.folder().write("model.safetensors.index.json", index.dump());
    const Finished finished = moe4({"inspect", folder.string(), "--json"});
    EXPECT_EQ(finished.exit_code, 0) << finished.err;  // every file that is there could be read
    const nlohmann::json document = finished.json();
    EXPECT_NE(document.at("refusals").dump().find("absent.safetensors"), std::string::npos) << finished.out;
    EXPECT_EQ(document.at("layers").at(0).at("format"), "nvfp4");
}

}  // namespace
}  // namespace moe4::test
