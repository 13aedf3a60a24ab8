#include "backends/cuda/limits.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <memory>
#include <random>

#include "backends/cuda/timing.hpp"

namespace moe4::cuda {

namespace {

double read_gb_per_s(int num_sms) {
    constexpr std::size_t kBytes = std::size_t{2} << 30;
    const DeviceBuffer data(kBytes, "measuring the memory");
    const DeviceBuffer sink(16, "measuring the memory");
    check(cudaMemset(data.data(), 0x5A, kBytes), "filling memory");
    const auto read = [&] {
        read_memory(data.data(), kBytes, reinterpret_cast<std::uint32_t*>(sink.data()), num_sms, nullptr);
    };
    double best = 1e9;
    for (int i = 0; i < 10; ++i) best = std::min(best, time(nullptr, read));
    return static_cast<double>(kBytes) / best * 1e-9;
}

/// cuBLAS, opened when it is asked for: the library does not depend on it. Declarations as in cublas_api.h.
class Cublas {
public:
    Cublas() {
        for (const char* name : {"libcublas.so.13", "libcublas.so.12", "libcublas.so"}) {
            library_.reset(dlopen(name, RTLD_NOW | RTLD_LOCAL));
            if (library_) break;
        }
        if (!library_) return;
        create_ = reinterpret_cast<Create>(dlsym(library_.get(), "cublasCreate_v2"));
        destroy_ = reinterpret_cast<Destroy>(dlsym(library_.get(), "cublasDestroy_v2"));
        gemm_ = reinterpret_cast<Gemm>(dlsym(library_.get(), "cublasGemmEx"));
        if (create_ != nullptr && destroy_ != nullptr && gemm_ != nullptr) create_(&handle_);
    }
    ~Cublas() {
        if (handle_ != nullptr) destroy_(handle_);
    }
    Cublas(const Cublas&) = delete;
    Cublas& operator=(const Cublas&) = delete;

    explicit operator bool() const { return handle_ != nullptr; }

    /// c = a^T b, all [n, n] bf16, fp32 sums.
    void multiply(const void* a, const void* b, void* c, int n) const {
        constexpr int kTransposed = 1;
        constexpr int kPlain = 0;
        constexpr int kBf16 = 14;
        constexpr int kComputeF32 = 68;
        constexpr int kDefaultAlgorithm = -1;
        const float one = 1;
        const float zero = 0;
        gemm_(handle_, kTransposed, kPlain, n, n, n, &one, a, kBf16, n, b, kBf16, n, &zero, c, kBf16, n,
              kComputeF32, kDefaultAlgorithm);
    }

private:
    using Create = int (*)(void**);
    using Destroy = int (*)(void*);
    using Gemm = int (*)(void*, int, int, int, int, int, const void*, const void*, int, int, const void*, int,
                         int, const void*, void*, int, int, int, int);
    struct Close {
        void operator()(void* library) const { dlclose(library); }
    };
    std::unique_ptr<void, Close> library_;
    Create create_ = nullptr;
    Destroy destroy_ = nullptr;
    Gemm gemm_ = nullptr;
    void* handle_ = nullptr;
};

}  // namespace

std::vector<MachineLimit> measure_memory(int num_sms) { return {{"dram_read", read_gb_per_s(num_sms)}}; }

std::vector<MachineLimit> measure_arithmetic() {
    const Cublas cublas;
    if (!cublas) return {};
    constexpr int kSize = 8192;
    constexpr std::size_t kElements = std::size_t{kSize} * kSize;
    std::vector<std::uint16_t> values(kElements);  // zeros and constants run faster than numbers do
    std::mt19937 random(1);
    for (std::uint16_t& x : values) x = static_cast<std::uint16_t>((random() & 0x80FFU) | 0x3F00U);
    const DeviceBuffer a(kElements * 2, "a matrix");
    const DeviceBuffer b(kElements * 2, "a matrix");
    const DeviceBuffer c(kElements * 2, "a matrix");
    check(cudaMemcpy(a.data(), values.data(), kElements * 2, cudaMemcpyHostToDevice),
          "copying to the device");
    std::reverse(values.begin(), values.end());
    check(cudaMemcpy(b.data(), values.data(), kElements * 2, cudaMemcpyHostToDevice),
          "copying to the device");
    const auto gop_per_s = [&](int count) {
        const double seconds = time(nullptr, [&] {
            for (int i = 0; i < count; ++i) cublas.multiply(a.data(), b.data(), c.data(), kSize);
        });
        return 2.0 * kSize * kSize * kSize * count / seconds * 1e-9;
    };
    gop_per_s(3);
    const double burst = gop_per_s(10);
    return {{"cublas_bf16", burst}, {"cublas_bf16_sustained", gop_per_s(100)}};
}

}  // namespace moe4::cuda
