#pragma once
// A strict scanner for the two JSON files that can hold hundreds of thousands of entries: a safetensors
// header and the index of its shards. It reads forward and copies only strings that hold escapes.
#include <cstdint>
#include <deque>
#include <string>
#include <string_view>

namespace moe4::checkpoint {

class JsonScanner {
public:
    /// `source` (a file's name) opens every message; strings with escapes are kept in `owned`. Both must
    /// outlive it. Throws broken_file when the text is not UTF-8.
    JsonScanner(std::string_view text, const std::string& source, std::deque<std::string>& owned);

    /// Consumes `c` (after white space) or throws; `accept` returns whether it was there.
    void expect(char c);
    bool accept(char c);
    std::string_view string();
    std::uint64_t unsigned_integer();  // of at most 64 bits; no sign, fraction or exponent
    void skip_value(int depth = 0);    // any value; at most 64 levels deep
    void expect_end();                 // nothing but white space is left

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
    void skip_space();
    char next();
    std::uint32_t hex4();
    std::string_view unescape(std::size_t start);
    void skip_literal();

    std::string_view text_;
    const std::string& source_;
    std::deque<std::string>& owned_;
    std::size_t at_ = 0;
};

/// The offset of the first byte that is no UTF-8; text.size() when all is.
std::size_t first_invalid_utf8(std::string_view text);

}  // namespace moe4::checkpoint
