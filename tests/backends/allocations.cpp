// `run` and `route` allocate nothing: every way to the heap is counted while they work. An executable of its
// own, because it replaces operator new and the C allocator's entry points for the whole program.
#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <new>

#include "conformance/layer_runner.hpp"
#include "conformance/random_layer.hpp"

namespace {
std::atomic<long> g_num_allocations{0};
}

#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)

// glibc's own allocator under the names that replace it: operator new and std::aligned_alloc end here as
// well.
extern "C" {
void* __libc_malloc(std::size_t);
void* __libc_calloc(std::size_t, std::size_t);
void* __libc_realloc(void*, std::size_t);
void* __libc_memalign(std::size_t, std::size_t);

void* malloc(std::size_t bytes) {
    ++g_num_allocations;
    return __libc_malloc(bytes);
}
void* calloc(std::size_t count, std::size_t bytes) {
    ++g_num_allocations;
    return __libc_calloc(count, bytes);
}
void* realloc(void* old, std::size_t bytes) {
    ++g_num_allocations;
    return __libc_realloc(old, bytes);
}
void* aligned_alloc(std::size_t alignment, std::size_t bytes) {
    ++g_num_allocations;
    return __libc_memalign(alignment, bytes);
}
int posix_memalign(void** result, std::size_t alignment, std::size_t bytes) {
    ++g_num_allocations;
    *result = __libc_memalign(alignment, bytes);
    return *result == nullptr ? ENOMEM : 0;
}
}

#else

void* operator new(std::size_t bytes) {
    ++g_num_allocations;
    if (void* result = std::malloc(bytes)) return result;
    throw std::bad_alloc();
}
void operator delete(void* bytes) noexcept { std::free(bytes); }
void operator delete(void* bytes, std::size_t) noexcept { std::free(bytes); }

#endif

namespace moe4::testing {
namespace {

TEST(Allocations, AreCounted) {
    const long before = g_num_allocations;
    delete new volatile int(1);
    EXPECT_EQ(g_num_allocations, before + 1);
}

TEST(Allocations, RunAndRouteMakeNone) {
    RandomLayer random({.hidden_size = 192, .intermediate_size = 80, .num_experts = 8, .has_router = true});
    const MoeConfig& config = random.weights().config;
    BackendOptions options;
    options.threads = 3;
    const auto backend = open_backend("cpu", options);
    for (const Precision precision : {Precision::w4a16, Precision::w4a4}) {
        for (const auto scale : {ActivationScale::layer_max, ActivationScale::per_expert,
                                 ActivationScale::dynamic, ActivationScale::dynamic_token}) {
            Problem problem;
            problem.config = config;
            problem.precision = precision;
            problem.activation_scale = scale;
            problem.max_tokens = 100;
            problem.top_k = config.router.top_k;
            const auto layer = backend->prepare(backend->plan(problem), random.weights());
            Input input = random_input(config, 100, problem.top_k, Ids::zipf, random.random());
            const AlignedBuffer workspace(layer->plan().workspace_bytes);
            std::vector<float> output(input.hidden.size());
            const MutableTensorView out{output.data(), DType::f32, {100, config.hidden_size}, {}};
            const Shape slots{100, problem.top_k};

            const long before = g_num_allocations;
            layer->route(hidden_view(input, config.hidden_size), {input.ids.data(), DType::i32, slots, {}},
                         {input.weights.data(), DType::f32, slots, {}});
            layer->run(hidden_view(input, config.hidden_size), routing(input), out, workspace.workspace());
            EXPECT_EQ(g_num_allocations, before);
        }
    }
}

}  // namespace
}  // namespace moe4::testing
