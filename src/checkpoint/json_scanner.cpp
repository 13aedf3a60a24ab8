#include "checkpoint/json_scanner.hpp"

#include <cstring>

#include "moe4/error.hpp"

namespace moe4::checkpoint {

namespace {

constexpr int kMaxDepth = 64;

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

JsonScanner::JsonScanner(std::string_view text, const std::string& source, std::deque<std::string>& owned)
    : text_(text), source_(source), owned_(owned) {
    at_ = first_invalid_utf8(text);
    if (at_ < text.size()) fail("the JSON is not valid UTF-8");
    at_ = 0;
}

void JsonScanner::fail(const std::string& what) const {
    throw Error(ErrorKind::broken_file,
                source_ + ": " + what + " (at byte " + std::to_string(at_) + " of the JSON)");
}

void JsonScanner::skip_space() {
    while (at_ < text_.size()) {
        const char c = text_[at_];
        if (c != ' ' && c != '\n' && c != '\r' && c != '\t') return;
        ++at_;
    }
}

char JsonScanner::next() {
    if (at_ >= text_.size()) fail("the JSON ends early");
    return text_[at_++];
}

bool JsonScanner::accept(char c) {
    skip_space();
    if (at_ >= text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
}

void JsonScanner::expect(char c) {
    if (accept(c)) return;
    if (at_ >= text_.size()) fail("the JSON ends early");
    fail(std::string("found '") + text_[at_] + "' in the JSON, expected '" + c + "'");
}

void JsonScanner::expect_end() {
    skip_space();
    if (at_ < text_.size()) fail("the JSON goes on after its end");
}

std::string_view JsonScanner::string() {
    expect('"');
    const std::size_t start = at_;
    for (;;) {
        const char c = next();
        if (c == '"') return text_.substr(start, at_ - 1 - start);
        if (c == '\\') return unescape(start);
        if (static_cast<unsigned char>(c) < 0x20) fail("a control character in a string of the JSON");
    }
}

std::uint32_t JsonScanner::hex4() {
    std::uint32_t value = 0;
    for (int i = 0; i < 4; ++i) {
        const char c = next();
        const char lower = static_cast<char>(c | 0x20);
        if (!is_digit(c) && (lower < 'a' || lower > 'f'))
            fail("a \\u in the JSON without four hexadecimal digits");
        value = value * 16 + static_cast<std::uint32_t>(is_digit(c) ? c - '0' : lower - 'a' + 10);
    }
    return value;
}

/// The rest of a string whose first backslash has just been read; it began at `start`.
std::string_view JsonScanner::unescape(std::size_t start) {
    std::string& out = owned_.emplace_back(text_.substr(start, at_ - 1 - start));
    --at_;
    for (;;) {
        char c = next();
        if (c == '"') return out;
        if (static_cast<unsigned char>(c) < 0x20) fail("a control character in a string of the JSON");
        if (c != '\\') {
            out.push_back(c);
            continue;
        }
        c = next();
        constexpr std::string_view kEscapes = "\"\\/bfnrt";
        constexpr std::string_view kMeanings = "\"\\/\b\f\n\r\t";
        if (const std::size_t i = kEscapes.find(c); i != std::string_view::npos) {
            out.push_back(kMeanings[i]);
        } else if (c == 'u') {
            std::uint32_t code = hex4();
            if (code >= 0xD800 && code <= 0xDBFF) {
                if (next() != '\\' || next() != 'u') fail("half a surrogate pair in the JSON");
                const std::uint32_t low = hex4();
                if (low < 0xDC00 || low > 0xDFFF) fail("half a surrogate pair in the JSON");
                code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
            } else if (code >= 0xDC00 && code <= 0xDFFF) {
                fail("half a surrogate pair in the JSON");
            }
            append_utf8(out, code);
        } else {
            fail("an unknown escape in a string of the JSON");
        }
    }
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

void JsonScanner::skip_literal() {
    const std::size_t start = at_;
    while (at_ < text_.size() &&
           std::string_view(" \t\r\n,:]}[{\"").find(text_[at_]) == std::string_view::npos)
        ++at_;
    const std::string_view word = text_.substr(start, at_ - start);
    if (word == "true" || word == "false" || word == "null") return;
    const bool is_number =
        !word.empty() && word.find_first_not_of("+-0123456789.eE") == std::string_view::npos;
    if (!is_number) fail("an unknown word in the JSON");
}

void JsonScanner::skip_value(int depth) {
    if (depth > kMaxDepth) fail("the JSON is nested more than 64 levels deep");
    skip_space();
    const char c = at_ < text_.size() ? text_[at_] : '\0';
    if (c == '{') {
        object([&](std::string_view) { skip_value(depth + 1); });
    } else if (c == '[') {
        array([&] { skip_value(depth + 1); });
    } else if (c == '"') {
        string();
    } else {
        skip_literal();
    }
}

}  // namespace moe4::checkpoint
