// The AVX-512 and AMX kernels on emulated instructions: whole layers against the specification, bit for bit,
// on any CPU. Where there is AMX, its tiles against their emulation.
#include <gtest/gtest.h>

#include "backends/cpu/forward.hpp"
#include "backends/cpu/kernel_list.hpp"
#include "backends/packed_elements.hpp"
#include "conformance/cases.hpp"
#include "conformance/layer_runner.hpp"
#include "emulated/amx_machine.hpp"
#include "format/e2m1.hpp"
#include "format/e4m3.hpp"

// tests.cmake gives these names to the emulated ones.
namespace moe4::cpu::avx512 {
extern const Kernel kW4a16, kW4a16InPlace;
}
namespace moe4::cpu::avx512_bf16 {
extern const Kernel kW4a16, kW4a16InPlace;
}
namespace moe4::cpu::avx512_vnni {
extern const Kernel kW4a4, kW4a4InPlace;
}

namespace moe4::testing {
namespace {

const cpu::Kernel& kernel_named(std::string_view name) {
    for (const cpu::Kernel* kernel : cpu::kernel_list()) {
        if (kernel->name == name) return *kernel;
    }
    throw std::logic_error("no kernel " + std::string(name));
}

template <class Mode, class Tiles>
cpu::Kernel on_emulated_tiles(const cpu::Kernel& amx) {
    cpu::Kernel kernel = cpu::make_amx_kernel<EmulatedMachine, Mode, Tiles>(amx.layout);
    kernel.name = amx.name;
    kernel.combine = amx.combine;
    return kernel;
}
const cpu::Kernel kAmxW4a4 = on_emulated_tiles<cpu::W4a4, cpu::PackedTiles>(cpu::amx::kW4a4);
const cpu::Kernel kAmxW4a4InPlace = on_emulated_tiles<cpu::W4a4, cpu::InPlaceTiles>(cpu::amx::kW4a4InPlace);
const cpu::Kernel kAmxW4a16 = on_emulated_tiles<cpu::W4a16, cpu::PackedTiles>(cpu::amx::kW4a16);
const cpu::Kernel kAmxW4a16InPlace =
    on_emulated_tiles<cpu::W4a16, cpu::InPlaceTiles>(cpu::amx::kW4a16InPlace);

const cpu::Kernel* const kKernels[] = {&kAmxW4a4,
                                       &kAmxW4a4InPlace,
                                       &kAmxW4a16,
                                       &kAmxW4a16InPlace,
                                       &cpu::avx512_vnni::kW4a4,
                                       &cpu::avx512_vnni::kW4a4InPlace,
                                       &cpu::avx512_bf16::kW4a16,
                                       &cpu::avx512_bf16::kW4a16InPlace,
                                       &cpu::avx512::kW4a16,
                                       &cpu::avx512::kW4a16InPlace};

/// Output of a layer served by these kernels alone.
std::vector<float> run(std::vector<const cpu::Kernel*> kernels, ActivationScale scale, const Case& c,
                       const MoeWeights& weights, const Input& input) {
    const Problem problem{.config = weights.config,
                          .precision = kernels.front()->precision,
                          .activation_scale = scale,
                          .max_tokens = std::max<std::int64_t>(1, input.num_tokens),
                          .top_k = c.top_k,
                          .experts = c.experts};
    const auto layer = cpu::prepare_layer(problem, std::move(kernels), weights,
                                          std::make_shared<cpu::Workers>(2, ParallelFor{}));
    const AlignedBuffer workspace(layer.layout.bytes);
    std::vector<float> output(input.hidden.size(), std::numeric_limits<float>::quiet_NaN());
    cpu::forward(layer, {.hidden = input.hidden.data(),
                         .top_k_ids = input.ids.data(),
                         .top_k_weights = input.weights.data(),
                         .num_tokens = input.num_tokens,
                         .output_f32 = output.data(),
                         .output_bf16 = nullptr,
                         .workspace = static_cast<std::uint8_t*>(workspace.workspace().data)});
    return output;
}

std::vector<float> reference(const cpu::Kernel& kernel, ActivationScale scale, const Case& c,
                             const MoeWeights& weights, const Input& input) {
    return moe::reference_layer(weights,
                                {.precision = kernel.precision,
                                 .activation_scale = scale,
                                 .experts = c.experts,
                                 .order = kernel.order},
                                input.reference());
}

void expect_the_bits_of_the_reference(const std::vector<const cpu::Kernel*>& kernels, const Case& c) {
    RandomLayer layer(c.layer);
    const Input input = random_input(layer.weights().config, c.num_tokens, c.top_k, c.ids, layer.random());
    for (const ActivationScale scale : {ActivationScale::layer_max, ActivationScale::dynamic_token}) {
        if (kernels.front()->precision == Precision::w4a16 && scale != ActivationScale::layer_max) continue;
        const auto output = run(kernels, scale, c, layer.weights(), input);
        const auto expected = reference(*kernels.front(), scale, c, layer.weights(), input);
        EXPECT_EQ(count_differences(output, expected), 0U) << kernels.front()->name << " " << seed_note();
    }
}

class EmulatedKernels : public ::testing::TestWithParam<std::size_t> {};

TEST_P(EmulatedKernels, HaveTheBitsOfTheReference) {
    const Case& c = cases()[GetParam()];
    if (c.num_tokens == 0) GTEST_SKIP() << "no tokens, no kernel";
    for (const cpu::Kernel* kernel : kKernels) expect_the_bits_of_the_reference({kernel}, c);
}

std::string case_name(const ::testing::TestParamInfo<std::size_t>& info) { return cases()[info.param].name; }
INSTANTIATE_TEST_SUITE_P(All, EmulatedKernels, ::testing::Range(std::size_t{0}, cases().size()), case_name);

TEST(EmulatedKernels, ManyRowsInSeveralBlocks) {
    const Case c{.name = "many", .layer = {48, 32, 1}, .num_tokens = 700, .top_k = 1, .ids = Ids::one_expert};
    for (const cpu::Kernel* kernel : kKernels) expect_the_bits_of_the_reference({kernel}, c);
}

/// A panel is larger than the second cache.
TEST(EmulatedKernels, WideRowsInSeveralPasses) {
    for (const std::int64_t num_tokens : {40, 60}) {
        const Case c{.name = "wide",
                     .layer = {7168, 16, 1},
                     .num_tokens = num_tokens,
                     .top_k = 1,
                     .ids = Ids::one_expert};
        for (const cpu::Kernel* kernel : kKernels) expect_the_bits_of_the_reference({kernel}, c);
    }
}

/// 8192 columns are the most that AMX multiplies without tiles.
TEST(EmulatedKernels, ARowAloneOfAnyLength) {
    for (const std::int64_t hidden_size : {8192, 8208}) {
        const Case c{.name = "row", .layer = {hidden_size, 16, 2}, .num_tokens = 1, .top_k = 2};
        for (const cpu::Kernel* kernel : kKernels) expect_the_bits_of_the_reference({kernel}, c);
    }
}

/// y is larger than the caches are taken to be.
TEST(EmulatedKernels, OutputsPastTheCaches) {
    const Case c{
        .name = "large", .layer = {8192, 16, 1}, .num_tokens = 513, .top_k = 1, .ids = Ids::one_expert};
    for (const cpu::Kernel* kernel : {&kAmxW4a4, &kAmxW4a16}) expect_the_bits_of_the_reference({kernel}, c);
}

TEST(EmulatedKernels, ThatSwitchByRowsKeepTheBits) {
    const Case c{.name = "switch", .layer = {208, 80, 16}, .num_tokens = 60, .top_k = 4, .ids = Ids::zipf};
    expect_the_bits_of_the_reference({&kAmxW4a4, &cpu::avx512_vnni::kW4a4}, c);
}

TEST(EmulatedKernels, PackedLayoutHoldsEveryElementAndZeros) {
    expect_every_element_and_zeros(cpu::kPackedLayout);
}

TEST(Amx, EveryWeightIsDecodedExactly) {
    for (int byte = 0; byte <= 0x7E; ++byte) {
        alignas(64) cpu::PackedHalf half;
        std::memset(half.scale, byte, sizeof(half.scale));
        for (int i = 0; i < 8; ++i) {
            for (int row = 0; row < 16; ++row) {
                for (int j = 0; j < 4; ++j)
                    half.codes[i][row][j] =
                        static_cast<std::uint8_t>((row + i) % 16 | (row + j + 3) % 16 << 4);
            }
        }
        alignas(64) std::uint16_t tiles[8][4][16][2];  // [i][nibble][row][half of the pair]
        for (std::uint64_t block = 0; block < 4; ++block)
            cpu::decode_block<EmulatedMachine>(half, block,
                                               reinterpret_cast<std::uint8_t*>(tiles[2 * block]));
        for (int i = 0; i < 8; ++i) {
            for (int row = 0; row < 16; ++row) {
                for (int k = 0; k < 8; ++k) {
                    const int code = half.codes[i][row][k / 2] >> (k % 2 * 4) & 15;
                    const float weight = format::e2m1_decode(static_cast<std::uint8_t>(code)) *
                                         format::e4m3_decode(static_cast<std::uint8_t>(byte));
                    ASSERT_EQ(format::bf16_to_float(tiles[i][k % 4][row][k / 4]) * 0x1p112F, weight)
                        << "scale byte " << byte << " code " << code;
                }
            }
        }
    }
}

/// 2^16 and more times 2^112 is beyond bf16; the row's power of two keeps it.
TEST(Amx, W4a16KeepsLargeActivations) {
    const Case c{.name = "large", .layer = {.hidden_size = 96, .intermediate_size = 48}, .num_tokens = 20};
    RandomLayer layer(c.layer);
    Input input = random_input(layer.weights().config, c.num_tokens, c.top_k, c.ids, layer.random());
    for (std::size_t i = 0; i < input.hidden.size() / 2; ++i)
        input.hidden[i] = format::bf16_from_float(0x1p20F * format::bf16_to_float(input.hidden[i]));
    const auto output = run({&kAmxW4a16}, ActivationScale::layer_max, c, layer.weights(), input);
    const auto expected = reference(kAmxW4a16, ActivationScale::layer_max, c, layer.weights(), input);
    for (const float x : expected) ASSERT_TRUE(std::isfinite(x));
    EXPECT_EQ(count_differences(output, expected), 0U) << seed_note();
}

TEST(Amx, InstructionsMatchTheirEmulation) {
    if (const Support support = cpu::availability(kernel_named("amx_w4a4"), cpu::read_allowed({})); !support)
        GTEST_SKIP() << support.reason;
    for (const std::int64_t num_tokens : {1, 9, 16, 17, 33, 70, 130}) {
        const Case c{.name = "instructions",
                     .layer = {.hidden_size = 720, .intermediate_size = 208, .num_experts = 2},
                     .num_tokens = num_tokens};
        RandomLayer layer(c.layer);
        const Input input =
            random_input(layer.weights().config, c.num_tokens, c.top_k, c.ids, layer.random());
        for (const cpu::Kernel* emulation : {&kAmxW4a4, &kAmxW4a4InPlace, &kAmxW4a16, &kAmxW4a16InPlace}) {
            const cpu::Kernel* real = &kernel_named(emulation->name);
            const auto output = run({real}, ActivationScale::layer_max, c, layer.weights(), input);
            const auto expected = run({emulation}, ActivationScale::layer_max, c, layer.weights(), input);
            EXPECT_EQ(count_differences(output, expected), 0U) << real->name << " " << seed_note();
        }
    }
}

}  // namespace
}  // namespace moe4::testing
