// The JSON scanner accepts what RFC 8259 calls JSON, and nothing else.
#include "checkpoint/json_scanner.hpp"

#include <gtest/gtest.h>

#include <string>

#include "moe4/error.hpp"

namespace moe4::checkpoint {
namespace {

const std::string kSource = "some.json";

std::string refusal(const std::string& text) {
    StringArena unescaped;
    try {
        JsonScanner json(text, kSource, unescaped);
        json.skip_value();
        json.expect_end();
    } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::broken_file);
        return error.what();
    }
    return "";
}

std::string string_of(const std::string& text) {
    StringArena unescaped;
    JsonScanner json(text, kSource, unescaped);
    return std::string(json.string());
}

TEST(JsonScanner, SkipsEveryValue) {
    for (const char* text : {"0", "-0", "12", "-1.5", "1e5", "1E+5", "0.5e-3", "true", "false", "null",
                             "\"\"", "[]", "{}", " [ 1 , [ ] , { \"a\" : [ null ] } ] \r\n\t",
                             "{\"a\":1,\"a\":2}", "\"\\u0000\\ud83d\\ude00 \xC3\xA9\""}) {
        EXPECT_EQ(refusal(text), "") << text;
    }
}

TEST(JsonScanner, RefusesWhatIsNoJson) {
    for (const char* text : {"",
                             " ",
                             "01",
                             "+1",
                             "-",
                             ".5",
                             "1.",
                             "1e",
                             "1e+",
                             "1-2",
                             "--1",
                             "0x1",
                             "NaN",
                             "tru",
                             "nul",
                             "truex",
                             "'a'",
                             "\"",
                             "\"\\",
                             "\"\\u12",
                             "\"\\u12g4\"",
                             "\"\\ud800\"",
                             "\"\\udc00\"",
                             "\"\\ud800\\u0041\"",
                             "\"\t\"",
                             "[1,]",
                             "[,1]",
                             "[1 2]",
                             "[",
                             "]",
                             "{\"a\"}",
                             "{\"a\":}",
                             "{\"a\":1,}",
                             "{a:1}",
                             "{1:1}",
                             "[}",
                             "{} {}",
                             "\xEF\xBB\xBF{}",
                             "\"\xED\xA0\x80\"",
                             "\"\xF4\x90\x80\x80\"",
                             "\"\xC3\"",
                             "\x80"}) {
        EXPECT_NE(refusal(text).find("some.json: "), std::string::npos) << text;
    }
}

TEST(JsonScanner, DepthIsLimited) {
    EXPECT_EQ(refusal(std::string(60, '[') + std::string(60, ']')), "");
    EXPECT_NE(refusal(std::string(5'000'000, '[')).find("more than 64 levels"), std::string::npos);
}

TEST(JsonScanner, StringsWithEscapesAreCopied) {
    EXPECT_EQ(string_of(R"("plain")"), "plain");
    EXPECT_EQ(string_of(R"("\"\\\/\b\f\n\r\t")"), "\"\\/\b\f\n\r\t");
    EXPECT_EQ(string_of(R"("a\u0000b\u00e9\u20AC\ud83d\ude00c")"),
              std::string("a\0b\u00e9\u20ac\U0001F600c", 13));
    std::string long_one(100'000, 'x');
    EXPECT_EQ(string_of("\"" + long_one + "\\n\""), long_one + "\n");
}

TEST(JsonScanner, ViewsOutliveTheArenasMove) {
    StringArena arena;
    const std::string_view first = arena.keep("first");
    std::string big(200'000, 'y');
    const std::string_view second = arena.keep(big);
    for (int i = 0; i < 10'000; ++i) arena.keep("some more");
    const StringArena moved = std::move(arena);
    EXPECT_EQ(first, "first");
    EXPECT_EQ(second, big);
    EXPECT_EQ(moved.num_bytes(), 5 + 200'000 + 90'000U);
}

TEST(JsonScanner, EscapedStringsTakeLittleMemory) {
    const std::string text = "\"" + std::string(17'000'000, 'x') + "\\n\"";
    try {
        string_of(text);
        ADD_FAILURE() << "accepted";
    } catch (const Error& error) {
        EXPECT_NE(std::string(error.what()).find("more than 16 MB"), std::string::npos);
    }
    EXPECT_EQ(refusal(text), "") << "a skipped string is not kept";
}

TEST(JsonScanner, WholeNumbers) {
    const std::string text = "[0, 7,18446744073709551615 ]";
    StringArena unescaped;
    JsonScanner json(text, kSource, unescaped);
    std::vector<std::uint64_t> numbers;
    json.array([&] { numbers.push_back(json.unsigned_integer()); });
    EXPECT_EQ(numbers, (std::vector<std::uint64_t>{0, 7, UINT64_MAX}));
    for (const std::string bad : {"18446744073709551616", "-1", "1.0", "1e3", "00", "", "\"1\""}) {
        JsonScanner other(bad, kSource, unescaped);
        EXPECT_THROW(other.unsigned_integer(), Error) << bad;
    }
}

TEST(InQuotes, IsShortAndPrintable) {
    EXPECT_EQ(in_quotes("a\"b\\\n\x1b"), R"("a\"b\\\u000a\u001b")");
    const std::string cut = in_quotes(std::string(199, 'x') + "\u00e9" + std::string(1000, 'y'));
    EXPECT_EQ(cut, "\"" + std::string(199, 'x') + "\"...") << "not within a character";
    EXPECT_EQ(first_invalid_utf8(cut), cut.size());
}

}  // namespace
}  // namespace moe4::checkpoint
