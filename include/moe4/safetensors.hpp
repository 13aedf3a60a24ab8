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
    /// Throws invalid_argument when there is no such file, broken_file naming the file and the claim that is
    /// false, machine when it cannot be read.
    static SafetensorsFile open(const std::filesystem::path&);

    std::span<const Entry> entries() const;  // sorted by name
    std::optional<TensorView> find(std::string_view name) const;
    std::shared_ptr<const void> owner() const;  // keeps the views alive

private:
    struct State;
    std::shared_ptr<const State> state_;
};

struct TensorSpec {
    std::string name;
    DType dtype = DType::f32;
    Shape shape;
};

/// Writes a file tensor by tensor, so that memory holds one at a time: announce them, append their bytes in
/// the same order, finish. Until then the bytes lie in `<path>.partial-<pid>`, which the destructor removes.
/// Throws machine.
class SafetensorsWriter {
public:
    SafetensorsWriter(const std::filesystem::path&, std::span<const TensorSpec>);
    ~SafetensorsWriter();
    SafetensorsWriter(const SafetensorsWriter&) = delete;
    SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;

    /// Where the bytes lie until finish().
    static std::filesystem::path partial_path(const std::filesystem::path&);

    void append(const void* data, std::size_t bytes);  // in pieces of any size
    void finish();                                     // the file now exists under its name

private:
    void discard() noexcept;
    struct State;
    std::unique_ptr<State> state_;
};

/// All at once; a failure leaves no half file. Throws machine.
void write_safetensors(const std::filesystem::path&, std::span<const NamedTensor>);

}  // namespace moe4
