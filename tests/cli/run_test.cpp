// moe4 run: against the library to the bit, refusals, and no half file whatever happens.
#include <malloc.h>
#include <signal.h>

#include <bit>
#include <chrono>
#include <thread>

#include "checkpoint_fixture.hpp"
#include "layer_files.hpp"

namespace moe4::test {
namespace {

class Run : public testing::Test {
protected:
    std::vector<std::string> arguments(const std::string& input, std::vector<std::string> more = {}) const {
        std::vector<std::string> all = {
            "run", checkpoint_.write().string(), "--layer", "1", "--input", input, "--output", output()};
        all.insert(all.end(), more.begin(), more.end());
        return all;
    }
    std::string output() const { return (folder_ / "y.safetensors").string(); }
    std::vector<float> f32_output() const {
        return tensor_values<float>(SafetensorsFile::open(output()), "output");
    }
    void expect_refusal(const Finished& finished, int exit_code, const std::string& words) const {
        EXPECT_EQ(finished.exit_code, exit_code) << finished.err;
        EXPECT_NE(finished.err.find(words), std::string::npos) << finished.err;
        EXPECT_EQ(finished.out, "");
        for (const std::string& name : names_in(folder_.path())) {
            EXPECT_EQ(name.find("y.safetensors"), std::string::npos) << "a half file: " << name;
        }
    }

    TemporaryFolder folder_;
    CheckpointFixture checkpoint_;
};

TEST_F(Run, WithTheRoutersOwnIdsEqualsTheLibraryToTheBit) {
    const LayerFile file = LayerFile::random(9, 64);
    for (const Precision precision : {Precision::w4a16, Precision::w4a4}) {
        const std::string mode = precision == Precision::w4a4 ? "w4a4" : "w4a16";
        const Finished finished =
            moe4(arguments(file.write(folder_ / "x.safetensors"), {"--output-dtype", "f32", "--mode", mode}));
        ASSERT_EQ(finished.exit_code, 0) << finished.err;
        EXPECT_NE(finished.err.find(mode), std::string::npos) << finished.err;
        EXPECT_EQ(f32_output(), library_output(checkpoint_.write(), 1, file, precision));
        const auto y = SafetensorsFile::open(output());
        EXPECT_EQ(y.find("top_k_ids")->shape, (Shape{9, 2}));
        EXPECT_EQ(y.find("top_k_ids")->dtype, DType::i32);
        EXPECT_EQ(y.find("top_k_weights")->dtype, DType::f32);
    }
}

TEST_F(Run, Bf16IsTheF32OutputRounded) {
    const LayerFile file = LayerFile::random(5, 64, 4, 3);
    ASSERT_EQ(moe4(arguments(file.write(folder_ / "x.safetensors"), {"--mode", "w4a16"})).exit_code, 0);
    const auto bf16 = tensor_values<std::uint16_t>(SafetensorsFile::open(output()), "output");
    const std::vector<float> f32 = library_output(checkpoint_.write(), 1, file, Precision::w4a16);
    ASSERT_EQ(bf16.size(), f32.size());
    for (std::size_t i = 0; i < f32.size(); ++i) EXPECT_EQ(bf16[i], round_to_bf16(f32[i])) << i;
}

TEST_F(Run, RoutingThatWasBroughtAlongComesBackAsGiven) {
    const LayerFile file = LayerFile::random(6, 64, 4, 5);  // more slots than the router's
    ASSERT_EQ(moe4(arguments(file.write(folder_ / "x.safetensors"))).exit_code, 0);
    const auto y = SafetensorsFile::open(output());
    EXPECT_EQ(tensor_values<std::int32_t>(y, "top_k_ids"), file.ids);
    EXPECT_EQ(tensor_values<float>(y, "top_k_weights"), file.weights);
}

TEST_F(Run, WideIdsDoNotWrapAround) {
    LayerFile file = LayerFile::random(4, 64, 4, 2);
    std::vector<std::int64_t> wide(file.ids.begin(), file.ids.end());
    wide[1] = (std::int64_t{1} << 32) + 2;  // as 32 bits it would be expert 2
    wide[4] = 77;
    auto tensors = file.tensors();
    tensors[1].tensor = {wide.data(), DType::i64, {4, 2}, {}};
    write_safetensors(folder_ / "x.safetensors", tensors);
    const Finished finished =
        moe4(arguments((folder_ / "x.safetensors").string(), {"--output-dtype", "f32", "--mode", "w4a16"}));
    ASSERT_EQ(finished.exit_code, 0) << finished.err;
    EXPECT_NE(finished.err.find("2 of the top_k_ids name none of the 4 experts"), std::string::npos)
        << finished.err;
    file.ids[1] = file.ids[4] = -1;
    EXPECT_EQ(f32_output(), library_output(checkpoint_.write(), 1, file, Precision::w4a16));
}

TEST_F(Run, ExpertsOutsideTheRangeAddNothing) {
    const LayerFile file = LayerFile::random(4, 64, 4, 2);
    const Finished finished =
        moe4(arguments(file.write(folder_ / "x.safetensors"),
                       {"--output-dtype", "f32", "--mode", "w4a16", "--experts", "1:2"}));
    ASSERT_EQ(finished.exit_code, 0) << finished.err;
    EXPECT_EQ(f32_output(),
              library_output(checkpoint_.write(), 1, file, Precision::w4a16, {.first = 1, .count = 2}));
}

TEST_F(Run, F32InputIsRoundedToBf16First) {
    const LayerFile file = LayerFile::random(3, 64);
    std::vector<float> hidden;
    for (const std::uint16_t bits : file.hidden) {
        const float x = std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
        hidden.push_back(x * 1.0001F);  // less than half a bf16 step away
    }
    const NamedTensor tensors[] = {{"hidden", {hidden.data(), DType::f32, {3, 64}, {}}}};
    write_safetensors(folder_ / "x.safetensors", tensors);
    const Finished finished =
        moe4(arguments((folder_ / "x.safetensors").string(), {"--output-dtype", "f32", "--mode", "w4a16"}));
    ASSERT_EQ(finished.exit_code, 0) << finished.err;
    EXPECT_EQ(f32_output(), library_output(checkpoint_.write(), 1, file, Precision::w4a16));
}

TEST_F(Run, ADataSectionAtAnOddAddressIsRead) {
    const LayerFile file = LayerFile::random(3, 64, 4, 2);
    std::string bytes = read_file(file.write(folder_ / "aligned.safetensors"));
    ++bytes[0];  // the header's length, of which nothing carries
    std::uint64_t length = 0;
    std::memcpy(&length, bytes.data(), sizeof length);
    bytes.insert(bytes.begin() + 8 + static_cast<std::ptrdiff_t>(length) - 1, ' ');
    const std::string path = folder_.write("x.safetensors", bytes).string();
    ASSERT_EQ(reinterpret_cast<std::uintptr_t>(SafetensorsFile::open(path).find("hidden")->data) % 2, 1U);
    ASSERT_EQ(moe4(arguments(path, {"--output-dtype", "f32", "--mode", "w4a16"})).exit_code, 0);
    EXPECT_EQ(f32_output(), library_output(checkpoint_.write(), 1, file, Precision::w4a16));
}

TEST_F(Run, NoTokensGiveAnEmptyResult) {
    const LayerFile file = LayerFile::random(0, 64);
    const Finished finished = moe4(arguments(file.write(folder_ / "x.safetensors")));
    ASSERT_EQ(finished.exit_code, 0) << finished.err;
    EXPECT_EQ(SafetensorsFile::open(output()).find("output")->shape, (Shape{0, 64}));
}

TEST_F(Run, JsonSaysWhatRan) {
    const std::string input = LayerFile::random(4, 64).write(folder_ / "x.safetensors");
    const nlohmann::json document = moe4(arguments(input, {"--json"})).json();
    EXPECT_EQ(document.at("layer"), 1);
    EXPECT_EQ(document.at("mode"), "w4a4");  // calibrated, and the config asks for it
    EXPECT_EQ(document.at("activation_scale"), "layer-max");
    EXPECT_FALSE(document.at("mode_reason").get<std::string>().empty());
    EXPECT_EQ(document.at("tokens"), 4);
    EXPECT_EQ(document.at("routing"), "router");
}

TEST_F(Run, ASharedExpertIsNamedAsNotIncluded) {
    const CheckpointFixture deepseek({.family = "deepseek_v3"});
    const std::string input = LayerFile::random(2, 64).write(folder_ / "x.safetensors");
    const Finished finished =
        moe4({"run", deepseek.write().string(), "--layer", "1", "--input", input, "--output", output()});
    ASSERT_EQ(finished.exit_code, 0) << finished.err;
    EXPECT_NE(finished.err.find("shared expert of layer 1 is not included"), std::string::npos)
        << finished.err;
}

TEST_F(Run, InputsThatDoNotFitExitWith2) {
    const LayerFile file = LayerFile::random(4, 64, 4, 2);
    const std::string path = (folder_ / "x.safetensors").string();
    const auto run_with = [&](const std::vector<NamedTensor>& tensors) {
        write_safetensors(path, tensors);
        return moe4(arguments(path));
    };
    auto tensors = file.tensors();
    expect_refusal(run_with({tensors[1], tensors[2]}), 2, "has no tensor hidden");
    expect_refusal(run_with({tensors[0], tensors[1]}), 2, "top_k_ids without top_k_weights");
    expect_refusal(run_with({tensors[0], tensors[2]}), 2, "top_k_weights without top_k_ids");
    tensors[0].tensor.dtype = DType::f16;
    expect_refusal(run_with(tensors), 2, "hidden is F16 [4, 64], expected BF16 or F32 [tokens, 64]");
    tensors = file.tensors();
    tensors[0].tensor.shape = {8, 32};
    expect_refusal(run_with(tensors), 2, "hidden is BF16 [8, 32]");
    tensors = file.tensors();
    tensors[1].tensor.dtype = DType::u32;
    expect_refusal(run_with(tensors), 2, "top_k_ids is U32 [4, 2], expected I32 or I64 [4, k]");
    tensors = file.tensors();
    tensors[2].tensor.shape = {2, 4};
    expect_refusal(run_with(tensors), 2, "top_k_weights is F32 [2, 4], expected F32 [4, 2]");
    tensors = file.tensors();
    tensors[1].tensor.shape = {2, 4};
    expect_refusal(run_with(tensors), 2, "top_k_ids is I32 [2, 4]");
}

TEST_F(Run, ArgumentsThatDoNotFitExitWith2) {
    const std::string input = LayerFile::random(4, 64).write(folder_ / "x.safetensors");
    for (const char* experts :
         {"3:0", "-1:2", "x", "1", "1:", ":1", "1:2:3", "4:1", "2:3", "0:99999999999"}) {
        const std::string flag = std::string("--experts=") + experts;
        expect_refusal(moe4(arguments(input, {flag})), 2, "expert");
    }
    expect_refusal(moe4(arguments(input, {"--mode", "w4a16", "--act-scale", "dynamic"})), 2, "--act-scale");
    for (const char* layer : {"2", "-1"}) {
        const Finished finished = moe4({"run", checkpoint_.write().string(), std::string("--layer=") + layer,
                                        "--input", input, "--output", output()});
        expect_refusal(finished, 2, "0");  // lists the layers that there are
        EXPECT_NE(finished.err.find("1"), std::string::npos) << finished.err;
    }
}

TEST_F(Run, BrokenInputExitsWith4) {
    expect_refusal(moe4(arguments(folder_.write("x.safetensors", "not a tensor in sight").string())), 4,
                   "x.safetensors");
}

TEST_F(Run, WeightsThatCannotMeanAnythingExitWith4AndLeaveNoFile) {
    checkpoint_.tensor(1, 3, Projection::up, "weight_scale").set<std::uint8_t>(5, 0x7F);
    const std::string input = LayerFile::random(4, 64).write(folder_ / "x.safetensors");
    expect_refusal(moe4(arguments(input)), 4, "model.layers.1.mlp.experts.3.up_proj.weight_scale");
}

TEST_F(Run, MissingInputScalesRefuseW4a4Alone) {
    const CheckpointFixture uncalibrated({.has_input_scales = false});
    const std::string input = LayerFile::random(4, 64).write(folder_ / "x.safetensors");
    const std::vector<std::string> start = {
        "run", uncalibrated.write().string(), "--layer", "1", "--input", input, "--output", output()};
    const auto with = [&](std::vector<std::string> more) {
        more.insert(more.begin(), start.begin(), start.end());
        return moe4(more);
    };
    expect_refusal(with({"--mode", "w4a4"}), 3, "input_scale");
    EXPECT_EQ(with({"--mode", "w4a4", "--act-scale", "dynamic-token"}).exit_code, 0);
    const Finished chosen = with({"--json"});
    EXPECT_EQ(chosen.json().at("mode"), "w4a16");
    EXPECT_NE(chosen.err.find("w4a16, because"), std::string::npos) << chosen.err;
}

TEST_F(Run, AnOutputThatCannotBeWrittenExitsWith5) {
    const std::string input = LayerFile::random(4, 64).write(folder_ / "x.safetensors");
    const std::vector<std::string> start = {"run", checkpoint_.write().string(), "--layer", "1", "--input",
                                            input};
    for (const std::string& path :
         {(folder_ / "absent" / "y.safetensors").string(), folder_.path().string()}) {
        std::vector<std::string> all = start;
        all.insert(all.end(), {"--output", path});
        const Finished finished = moe4(all);
        EXPECT_EQ(finished.exit_code, 5) << finished.err;
        EXPECT_NE(finished.err.find("cannot be written"), std::string::npos) << finished.err;
    }
    EXPECT_EQ(names_in(folder_.path()), std::vector<std::string>{"x.safetensors"});
}

TEST_F(Run, ALinkInThePlaceOfTheOutputIsReplaced) {
    const std::string input = LayerFile::random(4, 64).write(folder_ / "x.safetensors");
    folder_.write("target", "untouched");
    for (const char* target : {"target", "nowhere"}) {
        std::filesystem::create_symlink(target, output());
        const Finished finished = moe4(arguments(input));
        EXPECT_EQ(finished.exit_code, 0) << finished.err;
        EXPECT_TRUE(std::filesystem::is_regular_file(std::filesystem::symlink_status(output())));
        EXPECT_TRUE(SafetensorsFile::open(output()).find("output"));
        std::filesystem::remove(output());
    }
    EXPECT_EQ(read_file(folder_ / "target"), "untouched");
    EXPECT_FALSE(std::filesystem::exists(folder_ / "nowhere"));
}

TEST_F(Run, ARefusalKeepsTheResultOfARunBefore) {
    const std::string input = LayerFile::random(4, 64).write(folder_ / "x.safetensors");
    ASSERT_EQ(moe4(arguments(input)).exit_code, 0);
    const std::string before = read_file(output());
    checkpoint_.tensor(1, 0, Projection::gate, "weight_scale_2").set<float>(0, -1.0F);
    EXPECT_EQ(moe4(arguments(input)).exit_code, 4);
    EXPECT_EQ(read_file(output()), before);
    EXPECT_EQ(names_in(folder_.path()).size(), 2U);
}

TEST_F(Run, BatchesGiveTheBitsOfOneBatch) {
    // So many tokens that their workspace passes what one batch may take.
    const CheckpointFixture wide({.hidden_size = 1024, .intermediate_size = 32});
    const LayerFile file = LayerFile::random(6000, 1024, 4, 2);
    const std::string input = file.write(folder_ / "x.safetensors");
    const Finished finished = moe4({"run", wide.write().string(), "--layer", "0", "--input", input,
                                    "--output", output(), "--output-dtype", "f32", "--mode", "w4a4"});
    ASSERT_EQ(finished.exit_code, 0) << finished.err;
    EXPECT_EQ(f32_output(), library_output(wide.write(), 0, file, Precision::w4a4));
}

TEST_F(Run, InPlaceGivesTheBitsOfPackedInW4a4) {
    const CheckpointFixture odd({.hidden_size = 208, .intermediate_size = 80});
    const std::string input = LayerFile::random(70, 208, 4, 2).write(folder_ / "x.safetensors");
    for (const char* scale : {"layer-max", "per-expert", "dynamic", "dynamic-token"}) {
        std::vector<std::vector<float>> outputs;
        for (const char* layout : {"auto", "in-place"}) {
            const Finished finished = moe4({"run", odd.write().string(), "--layer", "0", "--input", input,
                                            "--output", output(), "--output-dtype", "f32", "--mode", "w4a4",
                                            "--act-scale", scale, "--layout", layout, "--backend", "cpu"});
            ASSERT_EQ(finished.exit_code, 0) << finished.err;
            outputs.push_back(f32_output());
        }
        EXPECT_EQ(outputs[0], outputs[1]) << scale;
    }
}

TEST_F(Run, AnInterruptRemovesTheHalfFile) {
    const LayerFile file = LayerFile::random(20000, 64, 4, 4);
    const std::string input = file.write(folder_ / "x.safetensors");
    for (const int signal : {SIGINT, SIGTERM}) {
        CommandLine command(arguments(input), {{"MOE4_ISA", "scalar"}});
        const auto has_begun = [&] { return names_in(folder_.path()).size() == 2; };
        for (int i = 0; i < 20000 && !has_begun(); ++i)
            std::this_thread::sleep_for(std::chrono::microseconds(500));
        ASSERT_TRUE(has_begun());
        ::kill(command.pid(), signal);
        EXPECT_EQ(command.finish().exit_code, -signal);
        EXPECT_EQ(names_in(folder_.path()), std::vector<std::string>{"x.safetensors"});
    }
}

/// Copies of two experts, so that a large layer takes no longer to make than a small one.
void multiply_experts(CheckpointFixture& checkpoint, int num_experts) {
    for (int expert = 2; expert < num_experts; ++expert) {
        for (const Projection projection : kProjections) {
            for (const char* leaf : {".weight", ".weight_scale", ".weight_scale_2", ".input_scale"}) {
                checkpoint.tensors[checkpoint.module(0, expert, projection) + leaf] =
                    checkpoint.tensors.at(checkpoint.module(0, expert % 2, projection) + leaf);
            }
        }
    }
    StoredTensor& router = checkpoint.tensors.at(checkpoint.block(0) + "gate.weight");
    const std::vector<std::uint8_t> two_rows = router.bytes;
    for (int expert = 2; expert < num_experts; expert += 2) {
        router.bytes.insert(router.bytes.end(), two_rows.begin(), two_rows.end());
    }
    router.shape = {num_experts, router.shape[1]};
    checkpoint.config["num_experts"] = num_experts;
}

class RunMemory : public Run {
protected:
    void SetUp() override {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
        GTEST_SKIP() << "a sanitizer's shadow memory is not the layer's";
#endif
        multiply_experts(large_, kNumExperts);
        checkpoint_folder_ = large_.write().string();
        input_ = LayerFile::random(512, 2048, kNumExperts, 8).write(folder_ / "x.safetensors");
    }
    void expect_peak(const std::string& layout, double most_bytes) {
        ::malloc_trim(0);  // a command's peak is at least what this process has when it forks
        for (const char* mode : {"w4a16", "w4a4"}) {
            const Finished finished =
                moe4({"run", checkpoint_folder_, "--layer", "0", "--input", input_, "--output", output(),
                      "--mode", mode, "--backend", "cpu", "--layout", layout});
            ASSERT_EQ(finished.exit_code, 0) << finished.err;
            const double peak = static_cast<double>(finished.peak_kilobytes) * 1024.0;
            std::printf("%s %s: peak %.1f MB, the layer has %.1f MB\n", mode, layout.c_str(), peak * 1e-6,
                        kLayerBytes * 1e-6);
            RecordProperty(std::string("peak_bytes_") + mode, std::to_string(peak));
            EXPECT_LE(peak, most_bytes);
        }
    }

    static constexpr int kNumExperts = 30;
    static constexpr double kLayerBytes = kNumExperts * 3.0 * 2048 * 1024 * 9 / 16;
    CheckpointFixture large_{
        {.hidden_size = 2048, .intermediate_size = 1024, .num_experts = 2, .top_k = 2, .num_layers = 1}};
    std::string checkpoint_folder_, input_;
};

TEST_F(RunMemory, PeaksWithin1Point1LayersAnd64MB) { expect_peak("auto", 1.1 * kLayerBytes + 64e6); }

TEST_F(RunMemory, PeaksInPlaceWithinTheLayerAnd64MB) { expect_peak("in-place", kLayerBytes + 64e6); }

}  // namespace
}  // namespace moe4::test
