#pragma once
// A strict scanner for the two JSON files that can hold hundreds of thousands of entries: a safetensors
// header and the index of its shards. It reads forward and copies only strings that hold escapes.
#include <cstdint>
#include <deque>
#include <string>
#include <string_view>

namespace moe4::checkpoint {

/// Keeps copies of strings at addresses that never move, also when the arena does.
class StringArena {
public:
    std::string_view keep(std::string_view text);
    std::size_t num_bytes() const { return num_bytes_; }

private:
    std::deque<std::string> blocks_;
    std::size_t num_bytes_ = 0;
};

class JsonScanner {
public:
    /// `source` (a file's name) opens every message; strings with escapes are kept in `unescaped`, at most
    /// 16 MB of them. All three must outlive it. Throws broken_file when the text is not UTF-8.
    JsonScanner(std::string_view text, const std::string& source, StringArena& unescaped);

    /// Consumes `c` (after white space) or throws; `accept` returns whether it was there.
    void expect(char c) {
        if (!accept(c)) fail_expected(c);
    }
    bool accept(char c) {
        skip_space();
        if (at_ >= text_.size() || text_[at_] != c) return false;
        ++at_;
        return true;
    }
    std::string_view string();
    std::uint64_t unsigned_integer();  // of at most 64 bits; no sign, fraction or exponent
    void skip_string();                // checked, but not kept
    void skip_value(int depth = 0);    // any value; at most 64 levels deep
    void expect_end();                 // nothing but white space is left

    std::size_t position() const { return at_; }
    void return_to(std::size_t position) { at_ = position; }

    /// member(key) for every member of an object; it must consume the value.
    template <class Member>
    void object(Member member) {
        expect('{');
        if (accept('}')) return;
        do {
            const std::string_view key = string();
            expect(':');
            member(key);
        } while (accept(','));
        expect('}');
    }

    /// element() for every element of an array; it must consume the value.
    template <class Element>
    void array(Element element) {
        expect('[');
        if (accept(']')) return;
        do {
            element();
        } while (accept(','));
        expect(']');
    }

    [[noreturn]] void fail(const std::string& what) const;  // broken_file: source, what, byte offset

private:
    [[noreturn]] void fail_expected(char c) const;
    void skip_space() {
        while (at_ < text_.size() && is_space(text_[at_])) ++at_;
    }
    static bool is_space(char c) { return c == ' ' || c == '\n' || c == '\r' || c == '\t'; }
    char next();
    char next_in_string();
    std::uint32_t hex4();
    std::uint32_t escape();
    bool skip_digits();
    void skip_number();
    void skip_word(std::string_view word);

    std::string_view text_;
    const std::string& source_;
    StringArena& unescaped_;
    std::string scratch_;  // the string that is being unescaped
    std::size_t at_ = 0;
};

/// The offset of the first byte that is no UTF-8; text.size() when all is.
std::size_t first_invalid_utf8(std::string_view text);

/// As JSON spells it, in quotes.
std::string json_string(std::string_view text);

/// For messages: as json_string, but cut after some 200 bytes, because a hostile name can be megabytes long.
std::string in_quotes(std::string_view text);

}  // namespace moe4::checkpoint
