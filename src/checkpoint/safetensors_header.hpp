#pragma once
// The header of a safetensors file, every claim of it checked before a byte of a tensor is used.
#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <vector>

#include "moe4/tensor.hpp"

namespace moe4::checkpoint {

struct HeaderEntry {
    std::string_view name;
    DType dtype = DType::f32;
    Shape shape;
    std::uint64_t begin = 0;  // bytes from the start of the file
    std::uint64_t end = 0;
};

struct SafetensorsHeader {
    std::vector<HeaderEntry> entries;     // sorted by name; names point into the file or into owned_names
    std::deque<std::string> owned_names;  // of those spelled with escapes
};

/// `file` is all of the file and must outlive the result. Throws broken_file; every message begins with
/// `source`.
SafetensorsHeader parse_safetensors_header(std::string_view file, const std::string& source);

}  // namespace moe4::checkpoint
