#pragma once
// The file given to --output: written tensor by tensor under another name, gone when the command is
// interrupted.
#include <filesystem>
#include <span>

#include "moe4/safetensors.hpp"

namespace moe4::cli {

/// Throws invalid_argument when `output` is `input`, or a file of the folder `input`.
void refuse_to_overwrite(const std::filesystem::path& output, const std::filesystem::path& input);

/// One at a time in a process. Until finish() the bytes lie beside the file (see SafetensorsWriter); SIGINT,
/// SIGTERM and their like remove them before they end the process.
class OutputFile {
public:
    OutputFile(const std::filesystem::path& path, std::span<const TensorSpec> tensors)
        : guard_(path), writer_(path, tensors) {}

    void append(const void* data, std::size_t bytes) { writer_.append(data, bytes); }
    void finish() { writer_.finish(); }

private:
    /// Before the file exists, so that no moment is unguarded.
    struct Guard {
        explicit Guard(const std::filesystem::path& path);
        ~Guard();
    };
    Guard guard_;
    SafetensorsWriter writer_;
};

}  // namespace moe4::cli
