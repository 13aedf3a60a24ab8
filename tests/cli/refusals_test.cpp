// What a checkpoint can have wrong, as a user of `run` meets it: the exit code, the sentence, no output file.
#include <cmath>
#include <functional>
#include <limits>

#include "checkpoint_fixture.hpp"
#include "layer_files.hpp"

namespace moe4::test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr const char* kGate = "model.layers.0.mlp.experts.3.gate_proj.";

struct Damage {
    const char* name;
    int exit_code;
    std::string tensor;  // as the message has to name it
    std::function<void(CheckpointFixture&)> apply;
    const char* mode = "w4a16";
};

std::function<void(CheckpointFixture&)> set_gate(const char* leaf, float value) {
    return [=](CheckpointFixture& c) { c.tensor(0, 3, Projection::gate, leaf).set<float>(0, value); };
}
std::function<void(CheckpointFixture&)> set_block_scale(std::uint8_t byte) {
    return [=](CheckpointFixture& c) {
        c.tensor(0, 3, Projection::gate, "weight_scale").set<std::uint8_t>(9, byte);
    };
}
std::function<void(CheckpointFixture&)> add_tensor(const char* leaf) {
    return [=](CheckpointFixture& c) {
        c.tensors[std::string(kGate) + leaf] = {DType::f32, {64}, std::vector<std::uint8_t>(256)};
    };
}

const Damage kDamages[] = {
    {"missing", 4, std::string(kGate) + "weight_scale",
     [](CheckpointFixture& c) { c.tensors.erase(std::string(kGate) + "weight_scale"); }},
    {"dtype", 4, std::string(kGate) + "weight_scale",
     [](CheckpointFixture& c) { c.tensor(0, 3, Projection::gate, "weight_scale").dtype = DType::u8; }},
    {"shape", 4, std::string(kGate) + "weight_scale",
     [](CheckpointFixture& c) { c.tensor(0, 3, Projection::gate, "weight_scale").shape = {64, 2}; }},
    {"nan_block_scale", 4, std::string(kGate) + "weight_scale", set_block_scale(0x7F)},
    {"negative_block_scale", 4, std::string(kGate) + "weight_scale", set_block_scale(0xB8)},
    {"zero_global", 4, std::string(kGate) + "weight_scale_2", set_gate("weight_scale_2", 0.0F)},
    {"negative_global", 4, std::string(kGate) + "weight_scale_2", set_gate("weight_scale_2", -1.0F)},
    {"infinite_global", 4, std::string(kGate) + "weight_scale_2", set_gate("weight_scale_2", kInfinity)},
    {"nan_global", 4, std::string(kGate) + "weight_scale_2", set_gate("weight_scale_2", std::nanf(""))},
    {"zero_input_scale", 4, std::string(kGate) + "input_scale", set_gate("input_scale", 0.0F), "w4a4"},
    {"nan_input_scale", 4, std::string(kGate) + "input_scale", set_gate("input_scale", std::nanf("")),
     "w4a4"},
    {"missing_input_scale", 3, std::string(kGate) + "input_scale",
     [](CheckpointFixture& c) { c.tensors.erase(std::string(kGate) + "input_scale"); }, "w4a4"},
    {"dtype_of_input_scale", 4, std::string(kGate) + "input_scale",
     [](CheckpointFixture& c) { c.tensor(0, 3, Projection::gate, "input_scale").dtype = DType::i32; },
     "w4a4"},
    {"nan_router", 4, "model.layers.0.mlp.gate.weight",
     [](CheckpointFixture& c) {
         c.tensors.at("model.layers.0.mlp.gate.weight").set<std::uint16_t>(70, 0x7FC0);
     }},
    {"pre_quant_scale", 3, std::string(kGate) + "pre_quant_scale", add_tensor("pre_quant_scale")},
    {"bias", 3, std::string(kGate) + "bias", add_tensor("bias")},
    {"fp8_experts", 3, "model.layers.0.mlp.experts.0.gate_proj.weight",
     [](CheckpointFixture& c) {
         for (auto& [name, tensor] : c.tensors) {
             if (!name.ends_with("_proj.weight") || !name.starts_with("model.layers.0.mlp.experts."))
                 continue;
             const bool is_down = name.find("down_proj") != std::string::npos;
             tensor = {DType::f8_e4m3, is_down ? Shape{64, 32} : Shape{32, 64},
                       std::vector<std::uint8_t>(2048)};
         }
     }},
    {"activation", 3, "gelu_fast", [](CheckpointFixture& c) { c.config["hidden_act"] = "gelu_fast"; }},
    {"algorithm", 3, "W4A8_NVFP4_FP8",
     [](CheckpointFixture& c) {
         c.config["quantization_config"]["quant_algo"] = "W4A8_NVFP4_FP8";
         c.hf_quant_config["quantization"]["quant_algo"] = "W4A8_NVFP4_FP8";
     }},
    {"family", 3, "nobodys_moe", [](CheckpointFixture& c) { c.config["model_type"] = "nobodys_moe"; }},
};

class Refusal : public testing::TestWithParam<Damage> {
protected:
    Finished run(const std::string& mode) {
        const std::string input = LayerFile::random(2, 64).write(folder_ / "x.safetensors");
        return moe4({"run", checkpoint_.write().string(), "--layer", "0", "--input", input, "--output",
                     (folder_ / "y.safetensors").string(), "--mode", mode, "--json"});
    }
    TemporaryFolder folder_;
    CheckpointFixture checkpoint_;
};

TEST_P(Refusal, HasItsExitCodeNamesTheTensorAndLeavesNoFile) {
    const Damage& damage = GetParam();
    damage.apply(checkpoint_);
    const Finished finished = run(damage.mode);
    EXPECT_EQ(finished.exit_code, damage.exit_code) << finished.err;
    const auto message = json_error(finished).at("message").get<std::string>();
    EXPECT_NE(message.find(damage.tensor), std::string::npos) << message;
    EXPECT_EQ(names_in(folder_.path()), std::vector<std::string>{"x.safetensors"});
    const bool is_of_inputs = std::string(damage.mode) == "w4a4";
    if (is_of_inputs) {
        EXPECT_EQ(run("w4a16").exit_code, 0) << "w4a16 never looks at input scales";
    }

    const std::string checkpoint = checkpoint_.folder().path().string();
    const Finished inspected = moe4({"inspect", checkpoint, "--json"});
    EXPECT_EQ(inspected.exit_code, 0) << inspected.err;
    EXPECT_NE(inspected.out.find(damage.tensor), std::string::npos) << inspected.out;
    const std::string output = (folder_ / "w.safetensors").string();
    EXPECT_EQ(moe4({"dequantize", checkpoint, "--layer", "0", "--output", output}).exit_code,
              is_of_inputs ? 0 : damage.exit_code);
}

INSTANTIATE_TEST_SUITE_P(Of, Refusal, testing::ValuesIn(kDamages),
                         [](const auto& instance) { return std::string(instance.param.name); });

TEST(Output, NeverReplacesAnInput) {
    const CheckpointFixture checkpoint;
    const auto folder = checkpoint.write();
    const std::string shard = (folder / "model.safetensors").string();
    const std::string before = read_file(shard);
    const Finished finished = moe4({"dequantize", folder.string(), "--layer", "0", "--output", shard});
    EXPECT_EQ(finished.exit_code, 2);
    EXPECT_NE(finished.err.find("is an input of this command"), std::string::npos) << finished.err;
    EXPECT_EQ(read_file(shard), before);
}

using FileDamage = std::pair<const char*, std::function<void(std::string&)>>;

class BrokenFile : public testing::TestWithParam<FileDamage> {};

TEST_P(BrokenFile, Exits4AtOnceAndNamesTheFile) {
    const CheckpointFixture checkpoint;
    std::string bytes = read_file(checkpoint.write() / "model.safetensors");
    GetParam().second(bytes);
    checkpoint.folder().write("model.safetensors", bytes);
    const Finished finished = moe4({"inspect", checkpoint.folder().path().string()});
    EXPECT_EQ(finished.exit_code, 4) << finished.err;
    EXPECT_NE(finished.err.find("model.safetensors"), std::string::npos) << finished.err;
    EXPECT_EQ(finished.out, "");
}

INSTANTIATE_TEST_SUITE_P(
    Of, BrokenFile,
    testing::Values(FileDamage{"truncated", [](auto& b) { b.pop_back(); }},
                    FileDamage{"trailing", [](auto& b) { b += 'x'; }},
                    FileDamage{"empty", [](auto& b) { b.clear(); }},
                    FileDamage{"huge_header", [](auto& b) { b[6] = 1; }},
                    FileDamage{"zero_header", [](auto& b) { b.replace(0, 8, 8, '\0'); }},
                    FileDamage{"lfs_pointer",
                               [](auto& b) {
                                   b = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n";
                               }}),
    [](const auto& instance) { return std::string(instance.param.first); });

}  // namespace
}  // namespace moe4::test
