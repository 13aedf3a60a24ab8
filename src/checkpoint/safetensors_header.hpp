#pragma once
// The header of a safetensors file, every claim of it checked before a byte of a tensor is used.
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/json_scanner.hpp"
#include "moe4/safetensors.hpp"

namespace moe4::checkpoint {

struct SafetensorsHeader {
    std::vector<SafetensorsFile::Entry> entries;  // sorted by name; they point into the file
    StringArena unescaped_names;                  // or, the names that are spelled with escapes, here
};

/// `file` is all of the file and must outlive the result. Throws broken_file; every message begins with
/// `source`.
SafetensorsHeader parse_safetensors_header(std::string_view file, const std::string& source);

}  // namespace moe4::checkpoint
