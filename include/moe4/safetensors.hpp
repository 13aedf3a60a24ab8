#pragma once
// One safetensors file: read in place, or written whole. Format: 8-byte little-endian header length, a JSON
// object name -> {dtype, shape, data_offsets}, then the tensors' bytes without gaps (huggingface/safetensors
// README).
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "moe4/tensor.hpp"

namespace moe4 {

/// A mapped file whose header has been checked in full. Copies share the mapping.
class SafetensorsFile {
public:
    struct Entry {
        std::string_view name;
        TensorView tensor;
    };
    /// Throws broken_file naming the file and the claim that is false, machine when it cannot be read.
    static SafetensorsFile open(const std::filesystem::path&);

    std::span<const Entry> entries() const;  // sorted by name
    std::optional<TensorView> find(std::string_view name) const;
    std::shared_ptr<const void> owner() const;  // keeps the views alive

private:
    struct State;
    std::shared_ptr<const State> state_;
};

struct NamedTensor {
    std::string name;
    TensorView tensor;  // in host memory
};

/// Writes beside the path and renames, so that a failure leaves no half file. Throws machine.
void write_safetensors(const std::filesystem::path&, std::span<const NamedTensor>);

}  // namespace moe4
