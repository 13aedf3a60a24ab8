#pragma once
// Runs a prepared layer on host inputs, with everything that it must write filled with NaN beforehand.
#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "conformance/random_layer.hpp"
#include "moe4/backend.hpp"

namespace moe4::testing {

/// Exactly the bytes asked for, aligned to 64, full of NaN: a sanitizer sees any step beyond.
class AlignedBuffer {
public:
    explicit AlignedBuffer(std::size_t bytes)
        : data_(static_cast<std::byte*>(::operator new(bytes, std::align_val_t{64}))), bytes_(bytes) {
        poison();
    }
    void poison() { std::memset(data_.get(), 0xFF, bytes_); }
    Workspace workspace() const { return {data_.get(), bytes_}; }

private:
    struct Delete {
        void operator()(std::byte* data) const { ::operator delete(data, std::align_val_t{64}); }
    };
    std::unique_ptr<std::byte, Delete> data_;
    std::size_t bytes_;
};

inline Routing routing(const Input& input) {
    const Shape shape{input.num_tokens, input.top_k};
    return {.top_k_ids = {input.ids.data(), DType::i32, shape, {}},
            .top_k_weights = {input.weights.data(), DType::f32, shape, {}}};
}

inline TensorView hidden_view(const Input& input, std::int64_t hidden_size) {
    return {input.hidden.data(), DType::bf16, {input.num_tokens, hidden_size}, {}};
}

/// [num_tokens, hidden_size], Element float or std::uint16_t (bf16).
template <class Element>
std::vector<Element> run_layer(const Layer& layer, const Input& input, const Workspace& workspace) {
    const std::int64_t hidden_size = layer.plan().problem.config.hidden_size;
    std::vector<Element> output(static_cast<std::size_t>(input.num_tokens * hidden_size));
    if (!output.empty()) std::memset(output.data(), 0xFF, output.size() * sizeof(Element));
    layer.run(
        hidden_view(input, hidden_size), routing(input),
        {output.data(), sizeof(Element) == 4 ? DType::f32 : DType::bf16, {input.num_tokens, hidden_size}, {}},
        workspace);
    return output;
}

template <class Element>
std::vector<Element> run_layer(const Layer& layer, const Input& input) {
    const AlignedBuffer workspace(layer.plan().workspace_bytes);
    return run_layer<Element>(layer, input, workspace.workspace());
}

/// The same bits, or NaN in both: a NaN's sign and payload are nobody's contract.
inline bool same(float a, float b) { return std::memcmp(&a, &b, 4) == 0 || (a != a && b != b); }

inline std::size_t count_differences(const std::vector<float>& a, const std::vector<float>& b) {
    std::size_t count = a.size() == b.size() ? 0 : std::max(a.size(), b.size());
    for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) count += same(a[i], b[i]) ? 0 : 1;
    return count;
}

}  // namespace moe4::testing
