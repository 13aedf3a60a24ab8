// moe4 layertest: the verdict on sound layers, and on each kind of damage.
#include <algorithm>

#include "checkpoint_fixture.hpp"
#include "layer_files.hpp"

namespace moe4::test {
namespace {

/// A quantised checkpoint and the BF16 model that it was made from.
class Layertest : public testing::Test {
protected:
    Finished layertest(std::vector<std::string> more = {}, const std::string& layer = "0") const {
        more.insert(more.begin(),
                    {"layertest", quantised_.write().string(), "--layer", layer, "--tokens", "32"});
        return moe4(more);
    }
    Finished judged(const CheckpointFixture& reference) const {
        return layertest({"--reference", reference.write().string(), "--json"});
    }
    void expect_cause(const Finished& finished, const std::string& cause, const std::string& words) const {
        EXPECT_EQ(finished.exit_code, cause == "none" ? 0 : 1) << finished.err;
        const nlohmann::json document = finished.json();
        EXPECT_EQ(document.at("cause"), cause) << finished.out;
        const auto verdict = document.at("verdict").get<std::string>();
        EXPECT_NE(verdict.find(words), std::string::npos) << verdict;
    }

    CheckpointFixture quantised_{{.hidden_size = 128, .intermediate_size = 64}};
    CheckpointFixture original_{
        {.spelling = Spelling::unquantized, .hidden_size = 128, .intermediate_size = 64}};
};

TEST_F(Layertest, ASoundLayerPasses) {
    const Finished finished = judged(original_);
    expect_cause(finished, "none", "");
    const nlohmann::json document = finished.json();
    for (const char* distance : {"weights", "activations", "engine"}) {
        for (const char* number : {"cosine", "rel_l2", "max_abs"}) {
            EXPECT_TRUE(document.at(distance).at(number).is_number()) << distance << " " << number;
        }
    }
    EXPECT_GT(document.at("weights").at("rel_l2").get<double>(), 0.05);
    EXPECT_LT(document.at("weights").at("rel_l2").get<double>(), 0.13);
    EXPECT_LT(document.at("engine").at("rel_l2").get<double>(),
              document.at("engine").at("limit").get<double>());
    EXPECT_FALSE(document.at("weights").at("worst").empty());
}

TEST_F(Layertest, WithoutAReferenceTheWeightsAreLeftOut) {
    const Finished text = layertest();
    EXPECT_EQ(text.exit_code, 0) << text.err;
    EXPECT_NE(text.out.find("verdict: "), std::string::npos) << text.out;
    EXPECT_NE(text.out.find("no --reference"), std::string::npos) << text.out;
    EXPECT_TRUE(layertest({"--json"}).json().at("weights").is_null());
}

TEST_F(Layertest, SwappedGateAndUpAreNamed) {
    for (const char* leaf : {".weight", ".weight_scale", ".weight_scale_2"}) {
        std::swap(quantised_.tensors.at(quantised_.module(0, 2, Projection::gate) + leaf),
                  quantised_.tensors.at(quantised_.module(0, 2, Projection::up) + leaf));
    }
    expect_cause(judged(original_), "weights", "gate and up are swapped");
}

TEST_F(Layertest, AGlobalScale4TimesOffIsNamed) {
    StoredTensor& global = quantised_.tensor(0, 3, Projection::down, "weight_scale_2");
    global.set<float>(0, 4.0F * global.get<float>());
    const Finished finished = judged(original_);
    expect_cause(finished, "weights", "expert 3 down");
    expect_cause(finished, "weights", "weight_scale_2");
    EXPECT_EQ(finished.json().at("weights").at("matrices_over_limit"), 1);
    EXPECT_EQ(finished.json().at("weights").at("worst").at(0).at("expert"), 3);
}

TEST_F(Layertest, SwappedNibblesAreNamed) {
    for (int expert = 0; expert < 4; ++expert) {
        for (const Projection projection : kProjections) {
            for (std::uint8_t& byte : quantised_.tensor(0, expert, projection, "weight").bytes) {
                byte = static_cast<std::uint8_t>(byte << 4 | byte >> 4);
            }
        }
    }
    expect_cause(judged(original_), "weights", "nibbles");
}

TEST_F(Layertest, AReferenceOfAnotherModelIsSaidToLookLikeThat) {
    const CheckpointFixture other(
        {.spelling = Spelling::unquantized, .hidden_size = 128, .intermediate_size = 64, .seed = 2});
    expect_cause(judged(other), "weights", "another layer or model");
}

TEST_F(Layertest, AReferenceOfAnotherLayerIsSaidToLookLikeThat) {
    const std::string first = "model.layers.0.";
    for (const auto& [name, tensor] : std::map(original_.tensors)) {
        if (!name.starts_with(first)) continue;
        std::swap(original_.tensors.at(name),
                  original_.tensors.at("model.layers.1." + name.substr(first.size())));
    }
    expect_cause(judged(original_), "weights", "another layer or model");
}

TEST_F(Layertest, ActivationScalesThatAreFarTooLargeAreNamed) {
    for (int expert = 0; expert < 4; ++expert) {
        for (const Projection projection : kProjections) {
            quantised_.tensor(0, expert, projection, "input_scale").set<float>(0, 1000.0F);
        }
    }
    expect_cause(judged(original_), "activations", "activations");
}

TEST_F(Layertest, AllLayersAreTestedAndTheFirstAtFaultDecides) {
    StoredTensor& global = quantised_.tensor(1, 0, Projection::gate, "weight_scale_2");
    global.set<float>(0, 4.0F * global.get<float>());
    const Finished finished = layertest({"--reference", original_.write().string(), "--json"}, "all");
    expect_cause(finished, "weights", "expert 0 gate");
    const nlohmann::json document = finished.json();
    ASSERT_EQ(document.at("layers").size(), 2U);
    EXPECT_EQ(document.at("layers").at(0).at("cause"), "none");
    EXPECT_EQ(document.at("layers").at(1).at("cause"), "weights");
    global.set<float>(0, 0.25F * global.get<float>());
    const Finished text = layertest({}, "all");
    EXPECT_EQ(text.exit_code, 0) << text.out;
    EXPECT_NE(text.out.find("layer 1: "), std::string::npos) << text.out;
}

TEST_F(Layertest, TakesTokensAndRoutingFromAFile) {
    const TemporaryFolder folder;
    const std::string input = LayerFile::random(16, 128, 4, 3).write(folder / "x.safetensors");
    for (const char* mode : {"w4a16", "w4a4"}) {
        const Finished finished = moe4({"layertest", quantised_.write().string(), "--layer", "1", "--input",
                                        input, "--mode", mode, "--json"});
        expect_cause(finished, "none", "");
        EXPECT_EQ(finished.json().at("tokens"), 16);
        EXPECT_EQ(finished.json().at("mode"), mode);
    }
}

TEST_F(Layertest, InPlaceIsTestedAlikeAndHasTheBitsOfPackedInW4a4) {
    const auto document = [&](const char* mode, const char* layout) {
        const Finished finished =
            layertest({"--mode", mode, "--layout", layout, "--backend", "cpu", "--json"});
        EXPECT_EQ(finished.exit_code, 0) << finished.err;
        return finished.json();
    };
    EXPECT_EQ(document("w4a4", "in-place").at("engine"), document("w4a4", "auto").at("engine"));
    EXPECT_EQ(document("w4a16", "in-place").at("cause"), "none");
}

TEST_F(Layertest, TheSeedAloneDecidesTheInput) {
    const std::string first = layertest({"--json", "--seed", "5"}).out;
    EXPECT_EQ(first, layertest({"--json", "--seed", "5"}).out);
    EXPECT_NE(first, layertest({"--json", "--seed", "6"}).out);
}

TEST_F(Layertest, AReferenceThatDoesNotFitExitsWith2) {
    const CheckpointFixture narrow(
        {.spelling = Spelling::unquantized, .hidden_size = 128, .intermediate_size = 32});
    const Finished shape = judged(narrow);
    EXPECT_EQ(shape.exit_code, 2) << shape.err;
    EXPECT_NE(shape.err.find("[32, 128]"), std::string::npos) << shape.err;
    const CheckpointFixture shallow(
        {.spelling = Spelling::unquantized, .hidden_size = 128, .intermediate_size = 64, .num_layers = 1});
    const Finished absent = layertest({"--reference", shallow.write().string()}, "1");
    EXPECT_EQ(absent.exit_code, 2) << absent.err;
}

TEST_F(Layertest, ErrorsSayWhichCheckpointTheyAreOf) {
    const std::string name = "model.layers.0.mlp.experts.1.gate_proj.weight";
    const std::string reference = original_.folder().path().string();
    original_.tensors.at(name).set<std::uint16_t>(130, 0x7FC0);
    const Finished nan = judged(original_);
    EXPECT_EQ(nan.exit_code, 4);
    EXPECT_EQ(json_error(nan).at("message"),
              reference + ": " + name + " holds NaN at row 1, column 2, expected finite numbers");
    original_.tensors.erase(name);
    const Finished missing = judged(original_);
    EXPECT_EQ(missing.exit_code, 4);
    EXPECT_NE(missing.err.find(reference + ": " + name + " is missing"), std::string::npos) << missing.err;
    quantised_.tensors.erase(name);
    EXPECT_NE(judged(original_).err.find(quantised_.folder().path().string() + ": " + name + " is missing"),
              std::string::npos);
}

TEST_F(Layertest, ARouterThatIsNotFiniteIsNamed) {
    quantised_.tensors.at("model.layers.0.mlp.gate.weight").set<std::uint16_t>(0, 0xFF80);
    const Finished finished = layertest();
    EXPECT_EQ(finished.exit_code, 4);
    EXPECT_NE(finished.err.find("model.layers.0.mlp.gate.weight holds an infinity"), std::string::npos)
        << finished.err;
}

TEST_F(Layertest, ABrokenLayerKeepsTheResultsBeforeIt) {
    quantised_.tensors.erase(quantised_.module(1, 2, Projection::up) + ".weight_scale");
    const Finished text = layertest({}, "all");
    EXPECT_EQ(text.exit_code, 4);
    EXPECT_NE(text.out.find("layer 0: "), std::string::npos) << text.out;
    EXPECT_NE(text.err.find("layers.1.mlp.experts.2.up_proj.weight_scale is missing"), std::string::npos);
    const Finished json = layertest({"--json"}, "all");
    EXPECT_EQ(json.exit_code, 4);
    EXPECT_EQ(json_error(json).at("kind"), "broken_file");
    EXPECT_EQ(json.json().at("layers").size(), 1U);
    EXPECT_EQ(json.json().at("cause"), "none");
}

TEST_F(Layertest, WithoutATokenForAnExpertNothingIsClaimed) {
    const TemporaryFolder folder;
    LayerFile nobody = LayerFile::random(4, 128, 4, 2);
    nobody.ids.assign(nobody.ids.size(), -1);
    for (const LayerFile& file : {LayerFile::random(0, 128), nobody}) {
        const std::string input = file.write(folder / "x.safetensors");
        const std::vector<std::string> arguments = {
            "layertest", quantised_.write().string(), "--layer", "0", "--input", input};
        const Finished text = moe4(arguments);
        EXPECT_EQ(text.exit_code, 0) << text.err;
        EXPECT_NE(text.out.find("verdict: the engine was not tested"), std::string::npos) << text.out;
        EXPECT_EQ(text.out.find("engine is right"), std::string::npos) << text.out;
        std::vector<std::string> with_json = arguments;
        with_json.push_back("--json");
        EXPECT_TRUE(moe4(with_json).json().at("engine").is_null());
    }
}

TEST_F(Layertest, WhatPrepareRefusesIsRefused) {
    quantised_.tensor(0, 1, Projection::gate, "weight_scale").set<std::uint8_t>(0, 0xFF);
    const Finished finished = layertest();
    EXPECT_EQ(finished.exit_code, 4);
    EXPECT_NE(finished.err.find("experts.1.gate_proj.weight_scale"), std::string::npos) << finished.err;
    EXPECT_EQ(layertest({}, "7").exit_code, 2);
    EXPECT_EQ(layertest({}, "most").exit_code, 2);
}

TEST(Sample, TheSliceOfARealCheckpointPasses) {
    const std::filesystem::path samples = MOE4_SAMPLES;
    const Finished finished = moe4({"layertest", (samples / "tiny-modelopt").string(), "--layer", "0",
                                    "--reference", (samples / "tiny-bf16").string(), "--json"});
    EXPECT_EQ(finished.exit_code, 0) << finished.err << finished.out;
    EXPECT_EQ(finished.json().at("cause"), "none");
    EXPECT_EQ(finished.json().at("weights").at("matrices"), 12);
}

}  // namespace
}  // namespace moe4::test
