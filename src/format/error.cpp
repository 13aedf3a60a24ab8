#include "moe4/error.hpp"

#include <cstdio>

namespace moe4 {

namespace {

std::string without_control_characters(const std::string& sentence) {
    std::string safe;
    safe.reserve(sentence.size());
    for (const char c : sentence) {
        const auto byte = static_cast<unsigned char>(c);
        if (byte >= 0x20 && byte != 0x7F) {
            safe.push_back(c);
            continue;
        }
        char escaped[8];
        std::snprintf(escaped, sizeof escaped, "\\u%04x", static_cast<unsigned>(byte));
        safe += escaped;
    }
    return safe;
}

}  // namespace

Error::Error(ErrorKind kind, const std::string& sentence)
    : std::runtime_error(without_control_characters(sentence)), kind_(kind) {}

}  // namespace moe4
