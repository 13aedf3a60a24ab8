#include "checkpoint/json_scanner.hpp"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "moe4/error.hpp"

namespace moe4::checkpoint {

namespace {

constexpr int kMaxDepth = 64;
constexpr std::size_t kMaxUnescapedBytes = 16U << 20;
constexpr std::size_t kArenaBlock = 64U << 10;
constexpr std::size_t kMaxQuoted = 200;

/// The length of the UTF-8 sequence at the start of `text`; 0 when there is none (RFC 3629: no overlong
/// forms, no surrogates, nothing above U+10FFFF).
std::size_t utf8_length(std::string_view text) {
    const auto byte = [&](std::size_t i) {
        return i < text.size() ? static_cast<unsigned char>(text[i]) : 0U;
    };
    const auto is_tail = [&](std::size_t i) { return (byte(i) & 0xC0U) == 0x80U; };
    const unsigned first = byte(0);
    if (first < 0x80) return 1;
    if (first >= 0xC2 && first <= 0xDF) return is_tail(1) ? 2 : 0;
    if (first >= 0xE0 && first <= 0xEF) {
        const bool is_overlong = first == 0xE0 && byte(1) < 0xA0;
        const bool is_surrogate = first == 0xED && byte(1) > 0x9F;
        return is_tail(1) && is_tail(2) && !is_overlong && !is_surrogate ? 3 : 0;
    }
    if (first >= 0xF0 && first <= 0xF4) {
        const bool is_overlong = first == 0xF0 && byte(1) < 0x90;
        const bool is_too_large = first == 0xF4 && byte(1) > 0x8F;
        return is_tail(1) && is_tail(2) && is_tail(3) && !is_overlong && !is_too_large ? 4 : 0;
    }
    return 0;
}

void append_utf8(std::string& out, std::uint32_t code) {
    const auto put = [&](std::uint32_t byte) { out.push_back(static_cast<char>(byte)); };
    if (code < 0x80) return put(code);
    if (code < 0x800) return put(0xC0 | (code >> 6)), put(0x80 | (code & 63));
    if (code < 0x10000)
        return put(0xE0 | (code >> 12)), put(0x80 | ((code >> 6) & 63)), put(0x80 | (code & 63));
    put(0xF0 | (code >> 18)), put(0x80 | ((code >> 12) & 63)), put(0x80 | ((code >> 6) & 63)),
        put(0x80 | (code & 63));
}

/// Stands for itself in a string, and neither ends it nor is forbidden there.
bool is_plain(char c) { return static_cast<unsigned char>(c) >= 0x20 && c != '"' && c != '\\'; }
bool is_digit(char c) { return c >= '0' && c <= '9'; }

}  // namespace

std::size_t first_invalid_utf8(std::string_view text) {
    std::size_t at = 0;
    while (at < text.size()) {
        std::uint64_t eight = 0;
        if (at + 8 <= text.size()) {
            std::memcpy(&eight, text.data() + at, 8);
            if ((eight & 0x8080'8080'8080'8080U) == 0) {
                at += 8;
                continue;
            }
        }
        const std::size_t length = utf8_length(text.substr(at));
        if (length == 0) return at;
        at += length;
    }
    return at;
}

std::string json_string(std::string_view text) {
    std::string out = "\"";
    for (const char c : text) {
        if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) {
            char escaped[8];
            std::snprintf(escaped, sizeof escaped, "\\u%04x", static_cast<unsigned>(c));
            out += escaped;
            continue;
        }
        if (c == '"' || c == '\\') out.push_back('\\');
        out.push_back(c);
    }
    return out + "\"";
}

std::string in_quotes(std::string_view text) {
    if (text.size() <= kMaxQuoted) return json_string(text);
    std::size_t size = kMaxQuoted;
    while ((static_cast<unsigned char>(text[size]) & 0xC0U) == 0x80U) --size;  // not within a character
    return json_string(text.substr(0, size)) + "...";
}

std::string_view StringArena::keep(std::string_view text) {
    if (blocks_.empty() || blocks_.back().capacity() - blocks_.back().size() < text.size()) {
        blocks_.emplace_back().reserve(std::max(kArenaBlock, text.size()));
    }
    std::string& block = blocks_.back();
    block.append(text);
    num_bytes_ += text.size();
    return std::string_view(block).substr(block.size() - text.size());
}

JsonScanner::JsonScanner(std::string_view text, const std::string& source, StringArena& unescaped)
    : text_(text), source_(source), unescaped_(unescaped) {
    at_ = first_invalid_utf8(text);
    if (at_ < text.size()) fail("the JSON is not valid UTF-8");
    at_ = 0;
}

void JsonScanner::fail(const std::string& what) const {
    throw Error(ErrorKind::broken_file,
                source_ + ": " + what + " (at byte " + std::to_string(at_) + " of the JSON)");
}

void JsonScanner::fail_expected(char c) const {
    if (at_ >= text_.size()) fail("the JSON ends early");
    const char found = text_[at_];
    const bool is_printable = found > 0x20 && found < 0x7F;
    fail((is_printable ? std::string("found '") + found + "'" : "found no printable character") +
         " in the JSON, expected '" + c + "'");
}

char JsonScanner::next() {
    if (at_ >= text_.size()) fail("the JSON ends early");
    return text_[at_++];
}

char JsonScanner::next_in_string() {
    const char c = next();
    if (static_cast<unsigned char>(c) < 0x20) fail("a control character in a string of the JSON");
    return c;
}

void JsonScanner::expect_end() {
    skip_space();
    if (at_ < text_.size()) fail("the JSON goes on after its end");
}

std::string_view JsonScanner::string() {
    expect('"');
    const std::size_t start = at_;
    while (at_ < text_.size() && is_plain(text_[at_])) ++at_;
    char c = next_in_string();
    const std::string_view plain = text_.substr(start, at_ - 1 - start);
    if (c == '"') return plain;

    scratch_ = plain;
    for (; c != '"'; c = next_in_string()) {
        if (c == '\\') {
            append_utf8(scratch_, escape());
        } else {
            scratch_.push_back(c);
        }
        if (unescaped_.num_bytes() + scratch_.size() > kMaxUnescapedBytes) {
            fail("more than 16 MB of strings with escapes in the JSON");
        }
    }
    return unescaped_.keep(scratch_);
}

void JsonScanner::skip_string() {
    expect('"');
    for (char c = next_in_string(); c != '"'; c = next_in_string()) {
        if (c == '\\') escape();
    }
}

std::uint32_t JsonScanner::hex4() {
    std::uint32_t value = 0;
    for (int i = 0; i < 4; ++i) {
        const char c = next();
        const char lower = static_cast<char>(c | 0x20);
        if (!is_digit(c) && (lower < 'a' || lower > 'f')) {
            fail("a \\u in the JSON without four hexadecimal digits");
        }
        value = value * 16 + static_cast<std::uint32_t>(is_digit(c) ? c - '0' : lower - 'a' + 10);
    }
    return value;
}

/// The character whose backslash has just been read.
std::uint32_t JsonScanner::escape() {
    constexpr std::string_view kEscapes = "\"\\/bfnrt";
    constexpr std::string_view kMeanings = "\"\\/\b\f\n\r\t";
    const char c = next();
    if (const std::size_t i = kEscapes.find(c); i != std::string_view::npos) {
        return static_cast<std::uint32_t>(kMeanings[i]);
    }
    if (c != 'u') fail("an unknown escape in a string of the JSON");
    const std::uint32_t code = hex4();
    if (code < 0xD800 || code > 0xDFFF) return code;
    const bool has_second_half = code < 0xDC00 && next() == '\\' && next() == 'u';
    const std::uint32_t low = has_second_half ? hex4() : 0;
    if (low < 0xDC00 || low > 0xDFFF) fail("half a surrogate pair in the JSON");
    return 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
}

std::uint64_t JsonScanner::unsigned_integer() {
    skip_space();
    const std::size_t start = at_;
    std::uint64_t value = 0;
    while (at_ < text_.size() && is_digit(text_[at_])) {
        if (__builtin_mul_overflow(value, std::uint64_t{10}, &value) ||
            __builtin_add_overflow(value, static_cast<std::uint64_t>(text_[at_] - '0'), &value)) {
            fail("a number in the JSON does not fit into 64 bits");
        }
        ++at_;
    }
    const bool has_leading_zero = at_ - start > 1 && text_[start] == '0';
    const bool goes_on = at_ < text_.size() && (text_[at_] == '.' || text_[at_] == 'e' || text_[at_] == 'E');
    if (at_ == start || has_leading_zero || goes_on) fail("expected a whole number of 0 or more in the JSON");
    return value;
}

bool JsonScanner::skip_digits() {
    const std::size_t start = at_;
    while (at_ < text_.size() && is_digit(text_[at_])) ++at_;
    return at_ > start;
}

void JsonScanner::skip_number() {
    const auto skip_one_of = [&](std::string_view choices) {
        const bool is_there = at_ < text_.size() && choices.find(text_[at_]) != std::string_view::npos;
        if (is_there) ++at_;
        return is_there;
    };
    skip_one_of("-");
    bool is_number = skip_one_of("0") || skip_digits();
    if (is_number && skip_one_of(".")) is_number = skip_digits();
    if (is_number && skip_one_of("eE")) {
        skip_one_of("+-");
        is_number = skip_digits();
    }
    if (!is_number) fail("expected a value in the JSON");
}

void JsonScanner::skip_word(std::string_view word) {
    if (!text_.substr(at_).starts_with(word)) fail("expected a value in the JSON");
    at_ += word.size();
}

void JsonScanner::skip_value(int depth) {
    if (depth > kMaxDepth) fail("the JSON is nested more than 64 levels deep");
    skip_space();
    switch (at_ < text_.size() ? text_[at_] : '\0') {
        case '{':
            return object([&](std::string_view) { skip_value(depth + 1); });
        case '[':
            return array([&] { skip_value(depth + 1); });
        case '"':
            return skip_string();
        case 't':
            return skip_word("true");
        case 'f':
            return skip_word("false");
        case 'n':
            return skip_word("null");
        default:
            return skip_number();
    }
}

}  // namespace moe4::checkpoint
