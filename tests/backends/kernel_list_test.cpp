// Which kernels a plan takes, on machines and with lists of kernels that need not exist.
#include "backends/cpu/kernel_list.hpp"

#include <gtest/gtest.h>

#include <cstdlib>
#include <optional>
#include <string>

#include "expect_error.hpp"
#include "moe/problem.hpp"
#include "moe4/error.hpp"

namespace moe4::cpu {
namespace {

constexpr PackedLayout kTiles{"tiles", nullptr, nullptr, nullptr, nullptr};
constexpr PackedLayout kPairs{"pairs", nullptr, nullptr, nullptr, nullptr};

Kernel fake(const char* name, IsaSet needs, int min_rows, const PackedLayout* layout,
            Precision precision = Precision::w4a4) {
    Kernel kernel{};
    kernel.name = name;
    kernel.needs = needs;
    kernel.precision = precision;
    kernel.min_rows = min_rows;
    kernel.layout = layout;
    return kernel;
}

const Kernel kAmx = fake("amx_w4a4", kAmxBf16 | kAvx512, 9, &kTiles);
const Kernel kVnni = fake("avx512_vnni_w4a4", kAvx512 | kAvx512Vnni, 1, &kTiles);
const Kernel kOther = fake("avx2_w4a4", kAvx2, 1, &kPairs);
const Kernel kInPlace = fake("avx2_in_place_w4a4", kAvx2, 1, nullptr);
const Kernel kPlain = fake("scalar_w4a4", 0, 1, nullptr);
const Kernel kPlain16 = fake("scalar_w4a16", 0, 1, nullptr, Precision::w4a16);
constexpr const Kernel* kList[] = {&kAmx, &kVnni, &kOther, &kInPlace, &kPlain, &kPlain16};

constexpr IsaSet kEverything = ~IsaSet{0};
const Problem kW4a4{.config = {}, .precision = Precision::w4a4};

std::string names(const Selection& selection) {
    std::string result;
    for (const Kernel* kernel : selection.kernels) result.append(kernel->name).append(" ");
    return result;
}

std::string reason(const Selection& selection, std::string_view kernel) {
    for (const auto& rejection : selection.rejections) {
        if (rejection.kernel == kernel) return rejection.reason;
    }
    return "not rejected";
}

Allowed allowed(IsaSet machine) {
    Allowed result;
    result.machine = machine;
    return result;
}

TEST(Select, KernelsOfOneLayoutShareALayer) {
    const Selection selection = select(kList, kW4a4, allowed(kEverything));
    EXPECT_EQ(names(selection), "amx_w4a4 avx512_vnni_w4a4 ");
    EXPECT_EQ(selection.rejections.size(), 3U) << "those of the other precision are not listed";
    EXPECT_EQ(reason(selection, "avx2_w4a4"),
              "reads weights packed as pairs, and amx_w4a4 reads weights packed as tiles");
    EXPECT_EQ(reason(selection, "scalar_w4a4"),
              "reads the checkpoint in place, and amx_w4a4 reads weights packed as tiles");
}

TEST(Select, LacksAreNamed) {
    const Selection selection = select(kList, kW4a4, allowed(kAvx2 | kAvx512));
    EXPECT_EQ(names(selection), "avx2_w4a4 ");
    EXPECT_EQ(reason(selection, "amx_w4a4"), "this CPU lacks amx_bf16");
    EXPECT_EQ(reason(selection, "avx512_vnni_w4a4"), "this CPU lacks avx512_vnni");
}

TEST(Select, TheCeilingIsNotTheMachinesFault) {
    Allowed limited = allowed(kEverything);
    limited.ceiling = isa_up_to("avx2");
    limited.ceiling_name = "MOE4_ISA=avx2";
    const Selection selection = select(kList, kW4a4, limited);
    EXPECT_EQ(names(selection), "avx2_w4a4 ");
    EXPECT_EQ(reason(selection, "amx_w4a4"), "MOE4_ISA=avx2 rules out avx512 amx_bf16");
}

TEST(Select, TheSlowerOfTwoIsSaidToBe) {
    const Kernel* list[] = {&kInPlace, &kPlain};
    const Selection selection = select(list, kW4a4, allowed(kEverything));
    EXPECT_EQ(names(selection), "avx2_in_place_w4a4 ");
    EXPECT_EQ(reason(selection, "scalar_w4a4"), "avx2_in_place_w4a4 is faster");
}

TEST(Select, KernelsOfOneLayerSumInOneOrder) {
    Kernel pairs = kAmx;
    pairs.order = {.kind = moe::SumOrder::two_chains, .pair_distance = 4};
    const Kernel* list[] = {&pairs, &kVnni};
    const Selection selection = select(list, kW4a4, allowed(kEverything));
    EXPECT_EQ(names(selection), "amx_w4a4 ");
    EXPECT_EQ(reason(selection, "avx512_vnni_w4a4"), "sums in another order than amx_w4a4");
}

TEST(Select, TheLayoutCanBeAskedFor) {
    Problem problem = kW4a4;
    problem.layout = WeightLayout::in_place;
    const Selection in_place = select(kList, problem, allowed(kEverything));
    EXPECT_EQ(names(in_place), "avx2_in_place_w4a4 ");
    EXPECT_EQ(reason(in_place, "amx_w4a4"),
              "reads weights packed as tiles, and the checkpoint in place was asked for");
    problem.layout = WeightLayout::packed;
    const Selection packed = select(kList, problem, allowed(kAvx2));
    EXPECT_EQ(names(packed), "avx2_w4a4 ");
    EXPECT_EQ(reason(packed, "scalar_w4a4"),
              "reads the checkpoint in place, and packed weights were asked for");
}

TEST(Select, OneKernelCanBeAskedFor) {
    Allowed forced = allowed(kEverything);
    forced.kernel = "avx512_vnni_w4a4";
    const Selection selection = select(kList, kW4a4, forced);
    EXPECT_EQ(names(selection), "avx512_vnni_w4a4 ");
    EXPECT_EQ(reason(selection, "scalar_w4a4"), "avx512_vnni_w4a4 was asked for");
}

std::string refusal(std::span<const Kernel* const> list, const Problem& problem, const Allowed& machine) {
    return test::refusal([&] { select(list, problem, machine); }, ErrorKind::unsupported);
}

TEST(Select, ARefusalGivesEveryReason) {
    const Kernel* list[] = {&kAmx, &kVnni};
    EXPECT_EQ(refusal(list, kW4a4, allowed(kAvx512)),
              "no CPU kernel serves this w4a4 problem; amx_w4a4: this CPU lacks amx_bf16; avx512_vnni_w4a4: "
              "this CPU lacks avx512_vnni");
    Allowed forced = allowed(kEverything);
    forced.kernel = "scalar_w4a16";
    EXPECT_NE(refusal(kList, kW4a4, forced).find("scalar_w4a16: computes w4a16"), std::string::npos);
}

/// Sets an environment variable for a scope.
class Setting {
public:
    Setting(const char* name, const char* value) : name_(name) {
        if (const char* before = std::getenv(name)) before_ = before;
        value == nullptr ? unsetenv(name) : setenv(name, value, 1);
    }
    ~Setting() { before_ ? setenv(name_, before_->c_str(), 1) : unsetenv(name_); }
    Setting(const Setting&) = delete;
    Setting& operator=(const Setting&) = delete;

private:
    const char* name_;
    std::optional<std::string> before_;
};

std::string opening_error() {
    return test::refusal([] { open_backend("cpu"); }, ErrorKind::invalid_argument);
}

TEST(Environment, UnknownNamesAreErrorsThatListTheKnownOnes) {
    const Setting no_kernel("MOE4_KERNEL", nullptr);
    {
        const Setting isa("MOE4_ISA", "avx3");
        EXPECT_EQ(opening_error(), "MOE4_ISA is \"avx3\", expected one of scalar, avx2, avx512, amx");
        for (const BackendInfo& info : backends()) {
            if (info.name != "cpu") continue;
            EXPECT_EQ(info.available.reason, opening_error());
        }
    }
    const Setting no_isa("MOE4_ISA", nullptr);
    const Setting kernel("MOE4_KERNEL", "fastest");
    EXPECT_NE(opening_error().find("MOE4_KERNEL is \"fastest\""), std::string::npos) << opening_error();
    EXPECT_NE(opening_error().find("scalar_w4a4"), std::string::npos) << opening_error();
}

TEST(Environment, IsaIsACeiling) {
    const Setting no_kernel("MOE4_KERNEL", nullptr);
    const Setting isa("MOE4_ISA", "scalar");
    Problem problem = kW4a4;
    problem.config.hidden_size = 64;
    problem.config.intermediate_size = 32;
    problem.config.num_experts = 2;
    problem.top_k = 1;
    const Plan plan = open_backend("cpu")->plan(problem);
    ASSERT_EQ(plan.choices.size(), 1U);
    EXPECT_EQ(plan.choices[0].kernel, "scalar_w4a4");
}

TEST(Environment, KernelIsForcedAndTheOptionGoesFirst) {
    const Setting no_isa("MOE4_ISA", nullptr);
    const Setting kernel("MOE4_KERNEL", "scalar_w4a16");
    EXPECT_EQ(read_allowed({}).kernel, "scalar_w4a16");
    BackendOptions options;
    options.kernel = "scalar_w4a4";
    EXPECT_EQ(read_allowed(options).kernel, "scalar_w4a4");
    options.kernel = "none";
    EXPECT_THROW(read_allowed(options), Error);
}

TEST(KernelList, NamesAreUniqueAndSayThePrecision) {
    for (const Kernel* kernel : kernel_list()) {
        const std::string_view name = kernel->name;
        EXPECT_NE(name.find(moe::precision_name(kernel->precision)), std::string_view::npos) << name;
        int count = 0;
        for (const Kernel* other : kernel_list()) count += name == other->name ? 1 : 0;
        EXPECT_EQ(count, 1) << name;
        EXPECT_EQ(kernel->gate_up_tile % kNvfp4BlockSize, 0) << name;
        EXPECT_EQ(kernel->down_tile % kNvfp4BlockSize, 0) << name;
    }
}

TEST(Isa, LevelsRise) {
    EXPECT_EQ(isa_up_to("scalar"), 0U);
    EXPECT_EQ(isa_up_to("avx2") & ~isa_up_to("avx512"), 0U);
    EXPECT_EQ(isa_up_to("avx512") & ~isa_up_to("amx"), 0U);
    EXPECT_EQ(isa_names(kAvx512 | kAvx512Vnni), "avx512 avx512_vnni");
    EXPECT_EQ(isa_names(0), "scalar");
    EXPECT_FALSE(cpu_name().empty());
}

}  // namespace
}  // namespace moe4::cpu
