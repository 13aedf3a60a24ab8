// The order of names against std::sort, on names that begin alike, hold NULs, are long or stand twice.
#include "checkpoint/name_order.hpp"

#include <gtest/gtest.h>

#include <numeric>
#include <random>
#include <string>
#include <vector>

namespace moe4::checkpoint {
namespace {

void expect_as_std_sort(const std::vector<std::string>& names) {
    std::vector<std::uint32_t> expected(names.size());
    std::iota(expected.begin(), expected.end(), 0U);
    std::stable_sort(expected.begin(), expected.end(),
                     [&](std::uint32_t a, std::uint32_t b) { return names[a] < names[b]; });
    EXPECT_EQ(order_by_name(names.size(), [&](std::uint32_t i) { return std::string_view(names[i]); }),
              expected);
}

TEST(NameOrder, AgreesWithStdSort) {
    std::mt19937 random(7);
    const std::string prefixes[] = {"", "model.layers.", std::string(7, '\0'), std::string(200, 'x')};
    for (const std::string& prefix : prefixes) {
        std::vector<std::string> names;
        for (int i = 0; i < 2000; ++i) {
            std::string name = prefix;
            for (auto length = random() % 20; length > 0; --length) {
                name.push_back("ab\xC3\xFF\0"[random() % 5]);
            }
            names.push_back(name);
        }
        expect_as_std_sort(names);
    }
}

TEST(NameOrder, FewSortedAndEqualNames) {
    expect_as_std_sort({});
    expect_as_std_sort({"only"});
    expect_as_std_sort({"a", "b", "b", "c"});
    expect_as_std_sort({"b", std::string("a\0", 2), "a", ""});
    expect_as_std_sort(std::vector<std::string>(100, "the same"));
}

}  // namespace
}  // namespace moe4::checkpoint
