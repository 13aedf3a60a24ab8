#include <gtest/gtest.h>

#include "moe4/backend.hpp"
#include "moe4/error.hpp"

namespace moe4 {
namespace {

TEST(Registry, ListsEveryBackendWithItsKernels) {
    const auto infos = backends();
    ASSERT_EQ(infos.size(), 2U);
    EXPECT_EQ(infos[0].name, "cuda") << "best first";
    EXPECT_EQ(infos[1].name, "cpu");
    EXPECT_TRUE(infos[1].available) << infos[1].available.reason;
    EXPECT_FALSE(infos[1].kernels.empty());
    EXPECT_TRUE(infos[0].available || !infos[0].available.reason.empty());
}

TEST(Registry, AutoOpensTheBestThatIsAvailable) {
    for (const BackendInfo& info : backends()) {
        if (!info.available) continue;
        EXPECT_EQ(open_backend()->name(), info.name);
        return;
    }
    FAIL() << "the CPU is always available";
}

TEST(Registry, AutoOpensTheBackendThatHasTheKernelAskedFor) {
    for (const BackendInfo& info : backends()) {
        for (const KernelInfo& kernel : info.kernels) {
            BackendOptions options;
            options.kernel = kernel.name;
            try {
                EXPECT_EQ(open_backend("auto", options)->name(), info.name) << kernel.name;
            } catch (const Error& error) {  // cuda's without a GPU
                EXPECT_FALSE(info.available) << kernel.name;
                EXPECT_EQ(error.what(), info.available.reason) << kernel.name;
            }
        }
    }
}

TEST(Registry, SaysWhatItKnows) {
    try {
        open_backend("tpu");
        FAIL();
    } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::unsupported);
        EXPECT_STREQ(error.what(), "there is no backend \"tpu\", expected one of auto, cuda, cpu");
    }
}

}  // namespace
}  // namespace moe4
