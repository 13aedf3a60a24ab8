// moe4 bench: its document and its report of a layer that takes no time, and refusals.
#include "command_line.hpp"
#include "moe4/backend.hpp"

namespace moe4::test {
namespace {

TEST(Bench, JsonHasARowOfEveryCellAndHtmlItsPlot) {
    const TemporaryFolder folder;
    const std::string html = (folder / "report.html").string();
    const Finished finished = moe4({"bench", "--shape", "256,128,4,4", "--tokens", "1,3", "--mode",
                                    "w4a4,w4a16", "--routing", "uniform,zipf", "--threads", "1", "--seconds",
                                    "0.01", "--backend", "cpu", "--json", "--html", html});
    ASSERT_EQ(finished.exit_code, 0) << finished.err;
    const nlohmann::json document = finished.json();
    EXPECT_NE(document.at("machine").get<std::string>(), "");
    EXPECT_GT(document.at("limits").at("dram_read").get<double>(), 0.0);
    const std::string report = read_file(html);
    EXPECT_NE(report.find("<svg"), std::string::npos);

    std::vector<std::string> found;
    for (const nlohmann::json& row : document.at("rows")) {
        const auto tokens = row.at("tokens").get<std::int64_t>();
        const auto mode = row.at("mode").get<std::string>();
        const auto kernel = row.at("kernel").get<std::string>();
        found.push_back(mode + " " + row.at("routing").get<std::string>() + " " + std::to_string(tokens));
        EXPECT_EQ(row.at("shape"), "256,128,4,4");
        EXPECT_EQ(row.at("threads"), 1);
        EXPECT_NE(kernel.find(mode), std::string::npos) << kernel;
        const double us = row.at("us").get<double>();
        const double gb_per_s = row.at("gb_per_s").get<double>();
        const double gop_per_s = row.at("gop_per_s").get<double>();
        ASSERT_GT(us, 0.0);
        // All four experts are hit, by every token.
        EXPECT_NEAR(gb_per_s, 1e-3 * 4 * 3 * 256 * 128 * 9 / 16 / us, 1e-6 * gb_per_s);
        EXPECT_NEAR(gop_per_s, 1e-3 * 2 * 3 * 256 * 128 * 4 * static_cast<double>(tokens) / us,
                    1e-6 * gop_per_s);
        const double reached = row.at("limit") == "dram_read" ? gb_per_s : gop_per_s;
        EXPECT_NEAR(row.at("ratio").get<double>() * row.at("limit_value").get<double>(), reached,
                    1e-6 * reached);
        EXPECT_NE(report.find("<circle", report.find(std::to_string(tokens) + " tokens, " + kernel) - 200),
                  std::string::npos);
    }
    EXPECT_EQ(found, (std::vector<std::string>{"w4a4 uniform 1", "w4a4 uniform 3", "w4a4 zipf 1",
                                               "w4a4 zipf 3", "w4a16 uniform 1", "w4a16 uniform 3",
                                               "w4a16 zipf 1", "w4a16 zipf 3"}));
}

TEST(Bench, WrongArgumentsExitWith2) {
    const std::pair<std::vector<std::string>, std::string> cases[] = {
        {{"--tokens", "0"}, "--tokens is \"0\", expected a whole number from 1 to 1048576"},
        {{"--tokens", "8,many"}, "--tokens is \"many\", expected"},
        {{"--routing", "even"}, "--routing is \"even\", expected uniform or zipf"},
        {{"--mode", "w8a8"}, "--mode is \"w8a8\", expected w4a16 or w4a4"},
        {{"--shape", "qwen9"},
         "the shape is \"qwen9\", expected HIDDEN,INTERMEDIATE,EXPERTS,TOP_K or one of"},
        {{"--shape", "256,128,4"}, "the shape is \"256,128,4\", expected HIDDEN,INTERMEDIATE,EXPERTS,TOP_K"},
        {{"--shape", "100,128,4,2"}, "the shape is 100,128,4,2, expected multiples of 16"},
        {{"--shape", "256,128,2,4"}, "the shape is 256,128,2,4, expected multiples of 16 and no more slots"}};
    for (const auto& [arguments, sentence] : cases) {
        std::vector<std::string> all = {"bench"};
        all.insert(all.end(), arguments.begin(), arguments.end());
        const Finished finished = moe4(all);
        EXPECT_EQ(finished.exit_code, 2) << sentence;
        EXPECT_EQ(finished.err.rfind("moe4: " + sentence, 0), 0U) << finished.err;
        EXPECT_EQ(finished.out, "");
    }
}

}  // namespace
}  // namespace moe4::test
