#pragma once
// Asynchronous copies from global to shared memory that complete on an mbarrier: plain bytes and tensor
// boxes. PTX ISA 9.0, 9.7.9.25 (cp.async.bulk).
#include <cuda.h>

#include <cstdint>

namespace moe4::cuda::ptx {

/// Both addresses and `bytes` are multiples of 16.
__device__ inline void bulk_copy(std::uint32_t to, const void* from, std::uint32_t bytes,
                                 std::uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
}

/// From shared to global memory; both addresses and `bytes` are multiples of 16. A thread commits the stores
/// that it has issued as a group.
__device__ inline void bulk_store(void* to, std::uint32_t from, std::uint32_t bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from),
                 "r"(bytes)
                 : "memory");
}
__device__ inline void bulk_stores_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

/// Until all but `pending` of this thread's groups have been read from shared memory.
template <int pending>
__device__ inline void bulk_stores_wait() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}

/// A box of a tensor; what lies outside of the tensor arrives as zeros and counts as bytes all the same.
__device__ inline void tensor_copy_2d(std::uint32_t to, const CUtensorMap* map, int x, int y,
                                      std::uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
        "%3}], [%4];" ::"r"(to),
        "l"(map), "r"(x), "r"(y), "r"(barrier)
        : "memory");
}

/// What this thread knows to be written is seen by the copies that it issues from here on.
__device__ inline void order_before_async_copies() { asm volatile("fence.proxy.async;" ::: "memory"); }

/// The same where it lies in shared memory, which takes far less time.
__device__ inline void order_shared_before_async_copies() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ inline void tensor_copy_5d(std::uint32_t to, const CUtensorMap* map, const int (&at)[5],
                                      std::uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
        "%3, %4, %5, %6}], [%7];" ::"r"(to),
        "l"(map), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]), "r"(at[4]), "r"(barrier)
        : "memory");
}

__device__ inline void prefetch_tensor_map(const CUtensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

}  // namespace moe4::cuda::ptx
