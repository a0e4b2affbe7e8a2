// The Hopper instructions that the kernels use, each wrapped once: mbarrier, TMA, wgmma, registers.
#ifndef FLASHATTN_CUDA_PTX_SM90_CUH_
#define FLASHATTN_CUDA_PTX_SM90_CUH_

#include <cuda.h>

#include <cstdint>

#include "ptx.cuh"
#include "wgmma.cuh"

namespace flashattn {

// ---- mbarrier. All addresses are shared-memory addresses of this block.
__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes initialised barriers visible to the async proxy and to the other blocks of a cluster.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_expect_tx(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier, int times) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(times)
               : "memory");
}
// Predicated rather than branched, for loops with products in flight.
__device__ __forceinline__ void mbarrier_arrive_if(bool condition, uint32_t barrier) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %1, 0; @p mbarrier.arrive.shared::cta.b64 _, [%0];}" ::"r"(
          barrier),
      "r"(static_cast<int>(condition))
      : "memory");
}
// Spins until the phase of this parity has completed. The spin is a basic-block edge: ptxas moves
// no arithmetic across it, which the main loops rely on.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{.reg .pred p;\nW: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@p bra D;\nbra W;\nD:}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Orders this thread's ordinary writes to shared memory before later TMA or wgmma reads of it.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// The same for global memory, and the other way round: bulk copies before, ordinary accesses after.
__device__ __forceinline__ void fence_async_proxy_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// ---- TMA. Tensor maps are 5-D {64 columns, rows, 64-column chunk, head, batch}: one instruction
// moves a whole tile, chunk after chunk, each chunk `rows` x 128 bytes in the 128-byte swizzle.
__device__ __forceinline__ void tma_prefetch_descriptor(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
__device__ __forceinline__ void tma_load_5d(uint32_t shared, const CUtensorMap* map,
                                            uint32_t barrier, int row, int chunk, int head,
                                            int batch) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3,%4,%5,%6,%7}], [%2];" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(0), "r"(row), "r"(chunk), "r"(head), "r"(batch)
      : "memory");
}
// The same tile by a 4-D map {head dim, rows, head, batch}, one instruction a 64-column chunk:
// columns beyond any head dim read as zero and are not stored.
__device__ __forceinline__ void tma_load_4d(uint32_t shared, const CUtensorMap* map,
                                            uint32_t barrier, int column, int row, int head,
                                            int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3,%4,%5,%6}], [%2];" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(batch)
      : "memory");
}
__device__ __forceinline__ void tma_store_4d(const CUtensorMap* map, uint32_t shared, int column,
                                             int row, int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group "
      "[%0, {%2,%3,%4,%5}], [%1];" ::"l"(map),
      "r"(shared), "r"(column), "r"(row), "r"(head), "r"(batch)
      : "memory");
}
// By a map {head dim, group, rows, heads / group, batch} (encode_tensor_map_packed): the heads of a
// group become rows, head fastest.
__device__ __forceinline__ void tma_load_packed(uint32_t shared, const CUtensorMap* map,
                                                uint32_t barrier, int column, int row, int head,
                                                int batch) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3,%4,%5,%6,%7}], [%2];" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(column), "r"(0), "r"(row), "r"(head), "r"(batch)
      : "memory");
}
__device__ __forceinline__ void tma_store_packed(const CUtensorMap* map, uint32_t shared,
                                                 int column, int row, int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group "
      "[%0, {%2,%3,%4,%5,%6}], [%1];" ::"l"(map),
      "r"(shared), "r"(column), "r"(0), "r"(row), "r"(head), "r"(batch)
      : "memory");
}
// global[0..bytes) += shared[0..bytes), fp32, contiguous; bytes a multiple of 16.
// With its commit, where the condition holds.
__device__ __forceinline__ void bulk_reduce_add_f32_if(bool condition, float* global,
                                                       uint32_t shared, uint32_t bytes) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %3, 0; "
      "@p cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2; "
      "@p cp.async.bulk.commit_group;}" ::"l"(global),
      "r"(shared), "r"(bytes), "r"(static_cast<int>(condition))
      : "memory");
}
// global[0..bytes) = shared[0..bytes), likewise.
__device__ __forceinline__ void bulk_store(float* global, uint32_t shared, uint32_t bytes) {
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2; "
      "cp.async.bulk.commit_group;" ::"l"(global),
      "r"(shared), "r"(bytes)
      : "memory");
}
// shared[0..bytes) = global[0..bytes), contiguous, 16-byte aligned; completes on the barrier.
__device__ __forceinline__ void bulk_load(uint32_t shared, const void* global, uint32_t bytes,
                                          uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(shared),
      "l"(global), "r"(bytes), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Until at most Pending groups still read their shared memory / are not complete.
template <int Pending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Pending) : "memory");
}
template <int Pending>
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(Pending) : "memory");
}

// Stores four 8x8 matrices; lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void stmatrix_x4(uint32_t address, uint32_t a, uint32_t b, uint32_t c,
                                            uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t address, uint32_t a, uint32_t b,
                                                  uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

// ---- wgmma (the products themselves are in the generated wgmma.cuh)
// Before the first product, and again whenever its registers were touched by ordinary instructions.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int Pending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

// Matrix descriptors of the 128-byte swizzle. The high word is constant: 1024 bytes from one group
// of 8 rows to the next. The low word is address >> 4 plus, for MN-major operands, the distance
// between 64-column chunks. Kernels keep only low words in registers (see opaque).
constexpr uint32_t kDescriptorHigh = 64u | (1u << 30);
__device__ __forceinline__ uint32_t descriptor_low_k_major(uint32_t shared) {
  return ((shared & 0x3FFFF) >> 4) | (1u << 16);
}
__device__ __forceinline__ uint32_t descriptor_low_mn_major(uint32_t shared, int chunk_rows) {
  return ((shared & 0x3FFFF) >> 4) | (static_cast<uint32_t>(chunk_rows * 8) << 16);
}
__device__ __forceinline__ uint64_t descriptor(uint32_t low) {
  uint64_t r;
  asm("mov.b64 %0, {%1,%2};" : "=l"(r) : "r"(low), "r"(kDescriptorHigh));
  return r;
}
// Hides a value from the optimiser, so that descriptor arithmetic stays inside the loop; hoisted,
// its many results would spill.
__device__ __forceinline__ void opaque(uint32_t& x) { asm volatile("" : "+r"(x)); }

// ---- programmatic dependent launch: lets the next kernel of the stream start / waits until
// everything that the previous one wrote is visible.
__device__ __forceinline__ void grid_dependency_trigger() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
__device__ __forceinline__ void grid_dependency_wait() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// ---- thread block clusters
// The arrive has no release semantics: those cost a MEMBAR.ALL.GPU, and mbarrier_init_fence() is
// all that the other blocks need to find this block's barriers initialised.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// The same shared-memory address in another block of the cluster.
__device__ __forceinline__ uint32_t cluster_address(uint32_t shared, int block) {
  uint32_t r;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(shared), "r"(block));
  return r;
}
// Stores that complete on a barrier of the block that they go to.
__device__ __forceinline__ void store_async(uint32_t cluster_shared, float4 x,
                                            uint32_t cluster_barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];" ::
          "r"(cluster_shared),
      "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(cluster_barrier)
      : "memory");
}
__device__ __forceinline__ void store_async(uint32_t cluster_shared, float2 x,
                                            uint32_t cluster_barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1,%2}, [%3];" ::"r"(
          cluster_shared),
      "f"(x.x), "f"(x.y), "r"(cluster_barrier)
      : "memory");
}
// mbarrier_wait for what other blocks of the cluster have stored.
__device__ __forceinline__ void mbarrier_wait_cluster(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{.reg .pred p;\nW: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1;\n"
      "@p bra D;\nbra W;\nD:}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// ---- registers: all warps of a warpgroup; the pool is what the launch gave the block.
template <int Registers>
__device__ __forceinline__ void registers_release() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}
template <int Registers>
__device__ __forceinline__ void registers_claim() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}

}  // namespace flashattn

#endif  // FLASHATTN_CUDA_PTX_SM90_CUH_
