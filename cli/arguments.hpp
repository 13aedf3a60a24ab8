#pragma once
// What arguments may be, and the sentences for those that are not. CLI11 reads them; its own texts stay
// inside.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <charconv>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "moe4/error.hpp"

namespace moe4::cli {

/// For Option::check(): one of these words.
CLI::Validator one_of(const std::vector<std::string>& words);

/// For Option::check(): a number from min to max, a whole one where T is.
template <class T>
CLI::Validator number_in(T min, T max = std::numeric_limits<T>::max()) {
    const bool is_bounded = max < std::numeric_limits<T>::max();
    const std::string range =
        is_bounded ? fmt::format("from {} to {}", min, max) : fmt::format("of {} or more", min);
    const auto fault = [=](const std::string& text) -> std::string {
        T value{};
        const char* const end = text.data() + text.size();
        const auto [parsed, error] = std::from_chars(text.data(), end, value);
        if (error == std::errc{} && parsed == end && value >= min && value <= max) return "";
        const char* const kind = std::is_integral_v<T> ? "whole number" : "number";
        return fmt::format("is \"{}\", expected a {} {}", text, kind, range);
    };
    return {fault, is_bounded ? fmt::format("[{} .. {}]", min, max) : ""};
}

/// --json
void add_json_option(CLI::App& command, bool& is_json);

/// An empty argument is a script's variable that was not set, and never means the default.
void refuse_empty_arguments(CLI::App& command);

/// "--mode is \"w8a8\", expected auto, w4a16 or w4a4 (see moe4 plan --help)"
Error usage_error(const CLI::App& app, const CLI::ParseError& error);

}  // namespace moe4::cli
