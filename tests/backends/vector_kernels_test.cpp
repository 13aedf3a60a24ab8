// The vector kernels against the scalar ones or others that sum in their order, function by function: every
// count of rows in a group, groups beyond one pass, slices of intermediates and columns, the quantiser's
// corners. Skipped where the CPU lacks the instructions. The conformance suite runs whole layers.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "backends/cpu/kernel_list.hpp"
#include "conformance/layer_runner.hpp"
#include "conformance/random_layer.hpp"

namespace moe4::cpu {
namespace {

using namespace moe4::testing;

const Kernel& kernel_named(const std::string& name) {
    for (const Kernel* kernel : kernel_list()) {
        if (kernel->name == name) return *kernel;
    }
    throw std::logic_error("no kernel " + name);
}

std::uint8_t* bytes_of(const AlignedBuffer& buffer) {
    return static_cast<std::uint8_t*>(buffer.workspace().data);
}

/// An expert as a kernel reads it.
class PreparedExpertData {
public:
    PreparedExpertData(const Kernel& kernel, const ExpertWeights& expert)
        : gate_up_(gate_up_bytes(kernel, expert)), down_(down_bytes(kernel, expert)) {
        data_.gate = expert.gate.weight;
        data_.up = expert.up.weight;
        data_.down = expert.down.weight;
        if (kernel.layout == nullptr) return;
        kernel.layout->pack_gate_up(data_.gate, data_.up, bytes_of(gate_up_));
        kernel.layout->pack_down(data_.down, bytes_of(down_));
        data_.packed_gate_up = bytes_of(gate_up_);
        data_.packed_down = bytes_of(down_);
    }
    const ExpertData& data() const { return data_; }

private:
    static std::size_t gate_up_bytes(const Kernel& kernel, const ExpertWeights& expert) {
        const Nvfp4View& gate = expert.gate.weight;
        return kernel.layout == nullptr ? 0 : kernel.layout->gate_up_bytes(gate.rows, gate.cols);
    }
    static std::size_t down_bytes(const Kernel& kernel, const ExpertWeights& expert) {
        const Nvfp4View& down = expert.down.weight;
        return kernel.layout == nullptr ? 0 : kernel.layout->down_bytes(down.rows, down.cols);
    }
    AlignedBuffer gate_up_, down_;
    ExpertData data_;
};

struct Rows {
    std::int64_t count;
    std::vector<std::uint16_t> hidden;  // bf16 [count, hidden_size]
    std::vector<float> input_scale;     // A1, and A2 alike
};

/// h [count, intermediate_size] widened from bf16, and y [count, hidden_size].
struct Outputs {
    std::vector<float> h, y;
};

/// Encodes rows where the kernel does, and gathers them.
void fill_panel(const Kernel& kernel, const Rows& rows, std::int64_t cols, std::uint8_t* panel) {
    const bool encodes = kernel.encode_rows != nullptr;
    const AlignedBuffer encoded(encodes ? kernel.encoded_bytes(cols) * static_cast<std::size_t>(rows.count)
                                        : 0);
    GatherTask gather{.rows = reinterpret_cast<const std::uint8_t*>(rows.hidden.data()),
                      .index = nullptr,
                      .cols = cols,
                      .num_rows = rows.count,
                      .panel = panel};
    if (encodes) {
        kernel.encode_rows({.values = rows.hidden.data(),
                            .index = nullptr,
                            .input_scale = rows.input_scale.data(),
                            .cols = cols,
                            .first = 0,
                            .last = rows.count,
                            .rows = bytes_of(encoded)});
        gather.rows = bytes_of(encoded);
    }
    kernel.gather_rows(gather);
}

/// Both GEMMs, each in slices of `tiles` tiles; h once as rows and once straight into down's panel.
Outputs run(const Kernel& kernel, const ExpertWeights& expert, const Rows& rows, std::int64_t tiles) {
    const std::int64_t hidden_size = expert.gate.weight.cols;
    const std::int64_t intermediate_size = expert.gate.weight.rows;
    const PreparedExpertData prepared(kernel, expert);
    const AlignedBuffer panel(kernel.panel_bytes(rows.count, hidden_size));
    const AlignedBuffer h_panel(kernel.panel_bytes(rows.count, intermediate_size));
    const AlignedBuffer scratch(kernel.scratch_bytes(rows.count, hidden_size, intermediate_size));
    fill_panel(kernel, rows, hidden_size, bytes_of(panel));

    const std::vector<float> scale(static_cast<std::size_t>(rows.count), 0.01F);
    std::vector<std::uint16_t> h(static_cast<std::size_t>(rows.count * intermediate_size), 0xFFFF);
    const std::int64_t gate_up_step = tiles * kernel.gate_up_tile;
    for (std::int64_t first = 0; first < intermediate_size; first += gate_up_step) {
        GateUpTask task{.expert = &prepared.data(),
                        .panel = bytes_of(panel),
                        .gate_scale = scale.data(),
                        .up_scale = scale.data(),
                        .input_scale = rows.input_scale.data(),
                        .num_rows = rows.count,
                        .hidden_size = hidden_size,
                        .intermediate_size = intermediate_size,
                        .first = first,
                        .last = std::min(intermediate_size, first + gate_up_step),
                        .h_panel = bytes_of(h_panel),
                        .h_rows = nullptr,
                        .scratch = bytes_of(scratch)};
        kernel.gate_up(task);
        task.h_rows = h.data();
        kernel.gate_up(task);
    }

    Outputs out;
    for (const std::uint16_t value : h) out.h.push_back(format::bf16_to_float(value));
    out.y.resize(static_cast<std::size_t>(rows.count * hidden_size));
    const std::int64_t down_step = tiles * kernel.down_tile;
    const std::int64_t y_stride = (down_step + 31) / 32 * 32;
    const AlignedBuffer y(static_cast<std::size_t>(rows.count * y_stride) * sizeof(float));
    for (std::int64_t first = 0; first < hidden_size; first += down_step) {
        const std::int64_t last = std::min(hidden_size, first + down_step);
        auto* sums = reinterpret_cast<float*>(bytes_of(y));
        kernel.down({.expert = &prepared.data(),
                     .panel = bytes_of(h_panel),
                     .scale = scale.data(),
                     .num_rows = rows.count,
                     .hidden_size = hidden_size,
                     .intermediate_size = intermediate_size,
                     .first = first,
                     .last = last,
                     .y = sums,
                     .y_stride = y_stride,
                     .past_caches = first % (2 * down_step) == 0,
                     .scratch = bytes_of(scratch)});
        for (std::int64_t r = 0; r < rows.count; ++r) {
            std::copy(sums + r * y_stride, sums + r * y_stride + (last - first),
                      out.y.begin() + r * hidden_size + first);
        }
    }
    return out;
}

struct Pair {
    const char* kernel;
    const char* other;  // of the same bits
};
std::ostream& operator<<(std::ostream& out, const Pair& pair) { return out << pair.kernel; }

class VectorKernels : public ::testing::TestWithParam<Pair> {
protected:
    void SetUp() override {
        if (detect_isa() == 0) GTEST_SKIP() << "no instruction set of x86 here";
        const Support support = availability(kernel(), read_allowed({}));
        if (!support) GTEST_SKIP() << support.reason;
    }
    static const Kernel& kernel() { return kernel_named(GetParam().kernel); }
    static const Kernel& other() { return kernel_named(GetParam().other); }

    static void expect_same(const ExpertWeights& expert, const Rows& rows, std::int64_t tiles) {
        SCOPED_TRACE(seed_note() + ", " + std::to_string(rows.count) + " rows, slices of " +
                     std::to_string(tiles) + " tiles");
        const Outputs found = run(kernel(), expert, rows, tiles);
        const Outputs expected = run(other(), expert, rows, 1000);
        EXPECT_EQ(count_differences(found.h, expected.h), 0U) << "of h";
        EXPECT_EQ(count_differences(found.y, expected.y), 0U) << "of y";
    }

    static Rows random_rows(std::int64_t count, std::int64_t cols, std::mt19937_64& random) {
        Rows rows{.count = count,
                  .hidden = {},
                  .input_scale = std::vector<float>(static_cast<std::size_t>(count), 0.002F)};
        std::normal_distribution<float> normal;
        for (std::int64_t i = 0; i < count * cols; ++i)
            rows.hidden.push_back(format::bf16_from_float(normal(random)));
        return rows;
    }
};

TEST_P(VectorKernels, AnyNumberOfRows) {
    RandomLayer layer({.hidden_size = 208, .intermediate_size = 80, .num_experts = 1});
    for (const std::int64_t count : {1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 63, 64, 65})
        expect_same(layer.weights().experts[0], random_rows(count, 208, layer.random()), 1000);
}

TEST_P(VectorKernels, AsManyRowsAsABlockHas) {
    RandomLayer layer({.hidden_size = 48, .intermediate_size = 48, .num_experts = 1});
    for (const std::int64_t count : {cpu::kMaxBlockRows - 1, cpu::kMaxBlockRows})
        expect_same(layer.weights().experts[0], random_rows(count, 48, layer.random()), 1000);
}

TEST_P(VectorKernels, AnySlice) {
    for (const BlockScales scales : {BlockScales::ordinary, BlockScales::every, BlockScales::vanishing}) {
        RandomLayer layer(
            {.hidden_size = 704, .intermediate_size = 112, .num_experts = 1, .block_scales = scales});
        for (const std::int64_t tiles : {1, 2, 3, 5}) {
            for (const std::int64_t count : {1, 3, 20})
                expect_same(layer.weights().experts[0], random_rows(count, 704, layer.random()), tiles);
        }
    }
}

TEST_P(VectorKernels, LongRowsAndStrides) {
    RandomLayer layer({.hidden_size = 2880, .intermediate_size = 1856, .num_experts = 1, .padding = 5});
    for (const std::int64_t count : {1, 9})
        expect_same(layer.weights().experts[0], random_rows(count, 2880, layer.random()), 7);
}

/// Blocks whose largest value makes the scale exact, and every other value a tie or its neighbour in bf16.
TEST_P(VectorKernels, TiesOfTheQuantiser) {
    constexpr float kTies[] = {0.25F, 0.75F, 1.25F, 1.75F, 2.5F, 3.5F, 5.0F};
    RandomLayer layer({.hidden_size = 320, .intermediate_size = 64, .num_experts = 1});
    Rows rows = random_rows(4, 320, layer.random());
    rows.input_scale.assign(4, 0.5F);
    for (std::size_t i = 0; i < rows.hidden.size(); ++i) {
        const std::uint16_t tie = format::bf16_from_float(kTies[i % std::size(kTies)]);
        const auto neighbour = static_cast<std::uint16_t>(tie + i / 7 % 3 - 1);
        rows.hidden[i] = static_cast<std::uint16_t>(neighbour | (i % 2 << 15));
        if (i % 16 == 0) rows.hidden[i] = format::bf16_from_float(6.0F);
    }
    expect_same(layer.weights().experts[0], rows, 1000);
}

TEST_P(VectorKernels, SpecialValuesUnderEveryGlobalScale) {
    RandomLayer layer(
        {.hidden_size = 160, .intermediate_size = 64, .num_experts = 1, .block_scales = BlockScales::every});
    for (const float scale : {0.0F, 0x1p-149F, 0x1p-126F, 1e-20F, 0.002F, 1.0F, 1e20F, 3e38F}) {
        SCOPED_TRACE(scale);
        Rows rows = random_rows(11, 160, layer.random());
        rows.input_scale.assign(11, scale);
        const std::uint16_t specials[] = {0x7FC0, 0x7F80, 0xFF80, 0x7F7F, 0xFF7F,
                                          0x0080, 0x0001, 0x8001, 0x8000};
        for (std::size_t r = 0; r < std::size(specials); ++r) rows.hidden[r * 160 + 21] = specials[r];
        std::fill_n(rows.hidden.begin() + 9 * 160, 160, std::uint16_t{0x8000});
        std::fill_n(rows.hidden.begin() + 10 * 160, 160, std::uint16_t{0x0003});
        expect_same(layer.weights().experts[0], rows, 1000);
    }
}

INSTANTIATE_TEST_SUITE_P(Kernels, VectorKernels,
                         ::testing::Values(Pair{"avx512_vnni_w4a4", "scalar_w4a4"},
                                           Pair{"avx512_vnni_w4a4_in_place", "scalar_w4a4"},
                                           Pair{"avx512_w4a16_in_place", "scalar_w4a16"},
                                           Pair{"avx512_w4a16", "scalar_w4a16"},
                                           Pair{"amx_w4a4", "scalar_w4a4"}, Pair{"avx2_w4a4", "scalar_w4a4"},
                                           Pair{"avx2_w4a16", "avx2_w4a16_in_place"},
                                           Pair{"avx2_w4a4_in_place", "scalar_w4a4"}));

}  // namespace
}  // namespace moe4::cpu
