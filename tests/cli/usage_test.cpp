// Help, arguments, exit codes and a stdout that cannot be written.
#include <algorithm>

#include "checkpoint_fixture.hpp"
#include "command_line.hpp"

namespace moe4::test {
namespace {

const std::vector<std::string> kCommands = {"info",       "inspect",   "plan", "run",
                                            "dequantize", "layertest", "bench"};

TEST(Usage, NoCommandPrintsTheHelpAndExits2) {
    const Finished finished = moe4({});
    EXPECT_EQ(finished.exit_code, 2);
    for (const std::string& command : kCommands)
        EXPECT_NE(finished.out.find("  " + command), std::string::npos);
}

TEST(Usage, HelpNamesCommandsExitCodesAndEnvironment) {
    const Finished finished = moe4({"--help"});
    EXPECT_EQ(finished.exit_code, 0);
    for (const char* word : {"Exit codes", "MOE4_ISA", "MOE4_KERNEL", "--json", "config.json"}) {
        EXPECT_NE(finished.out.find(word), std::string::npos) << word;
    }
}

TEST(Usage, EveryCommandHasHelpWithAnExample) {
    for (const std::string& command : kCommands) {
        const Finished finished = moe4({command, "--help"});
        EXPECT_EQ(finished.exit_code, 0) << command;
        EXPECT_NE(finished.out.find("Example:"), std::string::npos) << command;
        EXPECT_NE(finished.out.find("--json"), std::string::npos) << command;
        EXPECT_EQ(finished.err, "") << command;
    }
}

TEST(Usage, Version) {
    const Finished finished = moe4({"--version"});
    EXPECT_EQ(finished.exit_code, 0);
    EXPECT_EQ(finished.out.rfind("moe4 ", 0), 0U) << finished.out;
}

class WrongArguments : public testing::TestWithParam<std::vector<std::string>> {};

TEST_P(WrongArguments, ExitWith2OnStderrAlone) {
    const Finished finished = moe4(GetParam());
    EXPECT_EQ(finished.exit_code, 2);
    EXPECT_EQ(finished.out, "");
    EXPECT_EQ(finished.err.rfind("moe4: ", 0), 0U) << finished.err;
}

INSTANTIATE_TEST_SUITE_P(
    All, WrongArguments,
    testing::Values(std::vector<std::string>{"nonsense"}, std::vector<std::string>{"info", "--nonsense"},
                    std::vector<std::string>{"run", "DIR"}, std::vector<std::string>{"plan", "DIR"},
                    std::vector<std::string>{"plan", "DIR", "--layer", "x"},
                    std::vector<std::string>{"plan", "DIR", "--layer", "99999999999999999999"},
                    std::vector<std::string>{"plan", "DIR", "--layer", "0", "--tokens", "0"},
                    std::vector<std::string>{"plan", "DIR", "--layer", "0", "--tokens", "-3"},
                    std::vector<std::string>{"plan", "DIR", "--layer", "0", "--tokens", "99999999999"},
                    std::vector<std::string>{"plan", "DIR", "--layer", "0", "--threads", "-1"},
                    std::vector<std::string>{"plan", "DIR", "--layer", "0", "--threads", "0"},
                    std::vector<std::string>{"plan", "DIR", "--layer", "0", "--mode", "w8a8"},
                    std::vector<std::string>{"plan", "DIR", "--layer", "0", "--act-scale", "none"},
                    std::vector<std::string>{"plan", "DIR", "--layer", "0", "--backend", "tpu"},
                    std::vector<std::string>{"info", "inspect"},
                    std::vector<std::string>{"layertest", "DIR", "--layer", "0", "--tokens", "8", "--input",
                                             "X"}));

TEST(Usage, WrongArgumentsAreToldInOneSentence) {
    const std::pair<std::vector<std::string>, std::string> cases[] = {
        {{"nonsense"}, "moe4 does not know nonsense (see moe4 --help)"},
        {{"plan", "DIR", "--lay", "3", "--layer", "0"},
         "moe4 plan does not know --lay (see moe4 plan --help)"},
        {{"plan", "DIR"}, "--layer is missing"},
        {{"plan", "DIR", "--layer"}, "--layer lacks its value"},
        {{"plan", "DIR", "--layer="}, "--layer lacks its value"},
        {{"plan", "DIR", "--layer", "0", "--layer", "1"}, "--layer is given more than once"},
        {{"plan", "DIR", "--layer", "1.5"}, "--layer is \"1.5\", expected a whole number of 0 or more"},
        {{"plan", "DIR", "--layer", ""}, "--layer is \"\", expected a whole number of 0 or more"},
        {{"plan", "DIR", "--layer", "0", "--tokens", "0"},
         "--tokens is \"0\", expected a whole number from 1 to 1073741824"},
        {{"plan", "DIR", "--layer", "0", "--mode", "w8a8"},
         "--mode is \"w8a8\", expected auto, w4a16 or w4a4"},
        {{"plan", "DIR", "--layer", "0", "--experts", ""}, "--experts is empty, expected a value"},
        {{"plan", "", "--layer", "0"}, "DIR is empty, expected a value"},
        {{"layertest", "DIR", "--layer", ""}, "--layer is empty, expected a value"},
        {{"layertest", "DIR", "--layer", "0", "--seed", ""},
         "--seed is \"\", expected a whole number of 0 or more"},
        {{"layertest", "DIR", "--layer", "0", "--seed", "-1"}, "--seed is \"-1\", expected"},
        {{"layertest", "DIR", "--layer", "0", "--reference", ""}, "--reference is empty, expected a value"},
        {{"run", "DIR", "--layer", "0", "--input", "", "--output", "y"},
         "--input is empty, expected a value"},
        {{"bench", "--seconds", "0"}, "--seconds is \"0\", expected a number from 0.01 to 60"},
        {{"info", "--json=true"}, "--json takes no value"}};
    for (const auto& [arguments, sentence] : cases) {
        const Finished finished = moe4(arguments);
        EXPECT_EQ(finished.exit_code, 2) << sentence;
        EXPECT_EQ(finished.err.rfind("moe4: " + sentence, 0), 0U) << finished.err;
        EXPECT_EQ(std::count(finished.err.begin(), finished.err.end(), '\n'), 1) << finished.err;
    }
    EXPECT_EQ(json_error(moe4({"info", "--json=true"})).at("exit_code"), 2);
}

TEST(Usage, ParserErrorsAreJsonTooWhenAskedFor) {
    const Finished finished = moe4({"plan", "DIR", "--json"});
    EXPECT_EQ(finished.exit_code, 2);
    EXPECT_EQ(json_error(finished).at("kind"), "invalid_argument");
}

TEST(Usage, AFullDiskUnderStdoutExits5) {
    for (const char* argument : {"--help", "--version", "info"}) {
        const Finished finished = CommandLine({argument}, {}, ::open("/dev/full", O_WRONLY)).finish();
        EXPECT_EQ(finished.exit_code, 5) << argument;
        EXPECT_NE(finished.err.find("stdout cannot be written"), std::string::npos) << finished.err;
    }
}

TEST(Usage, AReaderThatWentAwayExits5) {
    int ends[2];
    ASSERT_EQ(::pipe(ends), 0);
    ::close(ends[0]);
    const Finished finished = CommandLine({"info"}, {}, ends[1]).finish();
    EXPECT_EQ(finished.exit_code, 5);
    EXPECT_NE(finished.err.find("Broken pipe"), std::string::npos) << finished.err;
}

TEST(Usage, InfoNamesTheKernelsThatWouldBeUsed) {
    const Finished text = moe4({"info"});
    EXPECT_EQ(text.exit_code, 0);
    EXPECT_NE(text.out.find("w4a4 would use"), std::string::npos) << text.out;
    const nlohmann::json document = moe4({"info", "--json"}).json();
    bool has_cpu = false;
    for (const auto& backend : document.at("backends")) {
        if (backend.at("name") != "cpu") continue;
        has_cpu = true;
        EXPECT_TRUE(backend.at("available").get<bool>());
        EXPECT_GE(backend.at("kernels").size(), 2U);
        EXPECT_NE(backend.at("would_use").at("w4a16").at("kernels"), "");
    }
    EXPECT_TRUE(has_cpu);
    EXPECT_FALSE(document.at("version").get<std::string>().empty());
}

TEST(Usage, InfoShowsWhatTheEnvironmentRulesOut) {
    const nlohmann::json document = moe4({"info", "--json"}, {{"MOE4_KERNEL", "scalar_w4a16"}}).json();
    for (const auto& backend : document.at("backends")) {
        if (backend.at("name") != "cpu") continue;
        EXPECT_EQ(backend.at("would_use").at("w4a16").at("kernels"), "scalar_w4a16");
        EXPECT_EQ(backend.at("would_use").at("w4a4").at("kernels"), "");
        EXPECT_NE(backend.at("would_use").at("w4a4").at("reason"), "");
    }
}

TEST(Usage, UnknownWordsInTheEnvironmentAreRefused) {
    const CheckpointFixture checkpoint;
    for (const auto& [variable, known] :
         {std::pair{"MOE4_ISA", "scalar, avx2"}, {"MOE4_KERNEL", "scalar_w4a16"}}) {
        const Finished finished = moe4(
            {"plan", checkpoint.write().string(), "--layer", "0", "--backend", "cpu"}, {{variable, "mmx"}});
        EXPECT_EQ(finished.exit_code, 2);
        for (const char* word : {variable, "mmx", known})
            EXPECT_NE(finished.err.find(word), std::string::npos) << finished.err;
    }
}

TEST(Usage, EachKindOfFailureHasItsExitCode) {
    const TemporaryFolder folder;
    folder.write("config.json", R"({"model_type": "qwen3_moe")");  // cut off
    folder.write("model.safetensors", "short");
    EXPECT_EQ(moe4({"inspect", folder.path().string()}).exit_code, 4);
    const Finished absent = moe4({"inspect", (folder / "absent").string(), "--json"});
    EXPECT_GE(absent.exit_code, 2) << absent.err;
    EXPECT_NE(json_error(absent).at("message").get<std::string>().find("absent"), std::string::npos);
}

}  // namespace
}  // namespace moe4::test
