// What kernels use that is not plain C++: number formats, shared memory, barriers, shuffles,
// matrix instructions and asynchronous copies. On a GPU inline PTX; with GTCO_EMULATE defined the
// same names have a meaning on the CPU (tests/cuda/emulator), so that tests run kernels unchanged.
#pragma once

#ifdef GTCO_PERSISTENT     // one kernel for a whole model: see persistent.cuh
#define GTCO_RESERVED 256  // bytes of shared memory ahead of the stages', for the walk's own use
#else
#define GTCO_RESERVED 0
#endif

#ifdef GTCO_EMULATE
#include "emulator.h"
#else
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long uint64_t;
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;
#if __CUDA_ARCH__ < 750
#error "gtco's kernels need sm_75 or newer"
#endif
#define GTCO_ARCH __CUDA_ARCH__  // 750, 800, 890, 900
#endif

// __restrict__ for the pointer to an activation. A kernel of sm_90 begins while the one before it still
// writes there (after_previous): it would be a false promise, and the compiler moved such loads ahead
// of the wait.
#if GTCO_ARCH >= 900 && !defined(GTCO_PERSISTENT)
#define GTCO_RESTRICT
#else
#define GTCO_RESTRICT __restrict__
#endif

// The formats are bits with a name, and all arithmetic is float32's: cuda_fp16.h is not needed, nor
// any other header of the vendor's.
struct half {
  uint16_t bits;
};
struct bf16 {
  uint16_t bits;
};

namespace gtco {

template <class A, class B>
struct is_same {
  static constexpr bool value = false;
};
template <class A>
struct is_same<A, A> {
  static constexpr bool value = true;
};
}  // namespace gtco

#ifdef GTCO_EMULATE
#include "emulated_device.h"
#else

// `unsigned char* name`: the stage's dynamic shared memory of the block, 128-byte aligned.
#define GTCO_SHARED(name)                                        \
  extern __shared__ __align__(128) unsigned char gtco_dynamic[]; \
  unsigned char* const name = gtco_dynamic + GTCO_RESERVED

namespace gtco {

// The launch before this one has ended, and what it wrote is there (programmatic dependent launch,
// from sm_90 on). The model's graph lets a kernel begin when the blocks of the one before end: its
// start and whatever it does ahead of this call cost no time of their own. All threads call it before
// they touch what another kernel writes or reads. No block says earlier that the next kernel may
// begin (griddepcontrol.launch_dependents): on an H200, ViT-Ti at batch 1 takes 239 us without that,
// 248 with it behind the wait, 337 with it ahead, and 262 with plain edges.
__device__ __forceinline__ void after_previous() {
#if GTCO_ARCH >= 900 && !defined(GTCO_PERSISTENT)
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// ---- number formats: to_float is exact, from_float rounds to nearest even

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(half x) {
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x.bits));
  return wide;
}
__device__ __forceinline__ float to_float(bf16 x) {
  return __uint_as_float(static_cast<uint32_t>(x.bits) << 16);
}

template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ half from_float<half>(float x) {
  half narrow;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(narrow.bits) : "f"(x));
  return narrow;
}
template <>
__device__ __forceinline__ bf16 from_float<bf16>(float x) {
  bf16 narrow;
#if GTCO_ARCH >= 800
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(narrow.bits) : "f"(x));
#else
  const uint32_t u = __float_as_uint(x);
  const bool nan = (u & 0x7fffffffu) > 0x7f800000u;
  narrow.bits = nan ? 0x7fff : static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
#endif
  return narrow;
}

// Two values in one register, as fragments hold them: `low` in the lower half.
template <class T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  return from_float<T>(low).bits | static_cast<uint32_t>(from_float<T>(high).bits) << 16;
}
#if GTCO_ARCH >= 800
template <>
__device__ __forceinline__ uint32_t pack<half>(float low, float high) {
  uint32_t both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
template <>
__device__ __forceinline__ uint32_t pack<bf16>(float low, float high) {
  uint32_t both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
#endif

// ---- threads, barriers, shuffles

// The block's threads [0, THREADS) meet: all that its stage has.
template <int THREADS>
__device__ __forceinline__ void sync() {
#ifdef GTCO_PERSISTENT  // the block may have more
  static_assert(THREADS % 32 == 0, "whole warps");
  asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
#else
  __syncthreads();
#endif
}
// As sync, of threads that may have parted ways before.
template <int THREADS>
__device__ __forceinline__ void rejoin() {
  asm volatile("barrier.sync 1, %0;" ::"n"(THREADS) : "memory");
}
__device__ __forceinline__ void sync_all() { asm volatile("barrier.sync 0;" ::: "memory"); }
__device__ __forceinline__ void sync_warp() { __syncwarp(); }
__device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x & 31u); }
__device__ __forceinline__ int warp() { return static_cast<int>(threadIdx.x >> 5); }

// All 32 lanes take part.
template <class T>
__device__ __forceinline__ T shuffle(T value, int lane) {
  return __shfl_sync(0xffffffffu, value, lane);
}
template <class T>
__device__ __forceinline__ T shuffle_xor(T value, int mask) {
  return __shfl_xor_sync(0xffffffffu, value, mask);
}
template <class T>
__device__ __forceinline__ T shuffle_down(T value, int by) {
  return __shfl_down_sync(0xffffffffu, value, static_cast<unsigned>(by));
}
// A condition that is the same in all lanes of a warp, so that the compiler knows it: without that
// each shuffle behind or inside an `if` of it has a second form, for a warp that has parted.
__device__ __forceinline__ bool whole_warp(bool condition) {
  return __all_sync(0xffffffffu, condition);
}
// Is the condition, another in each lane, true in all of them?
__device__ __forceinline__ bool in_all_lanes(bool condition) {
  return __all_sync(0xffffffffu, condition);
}

// ---- matrix instructions

// Four (two) 8x8 matrices of 16-bit elements: lane i gives the row i % 8 of matrix i / 8, 16 bytes
// in shared memory, and gets of matrix j the elements 2 * (i % 4) and its neighbour of row i / 4
// (with _trans: of column i / 4) in r[j].
__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x2(uint32_t (&r)[2], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(shared_address(row))
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x2_trans(uint32_t (&r)[2], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(shared_address(row))
               : "memory");
}

// d[m, n] += sum over k of a[m, k] * b[k, n], held by the 32 lanes as the PTX manual says.
template <class T>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4],
                                             const uint32_t (&b)[2]) {
  static_assert(GTCO_ARCH >= 800 && sizeof(T) == 2, "m16n8k16 begins with sm_80");
  if constexpr (is_same<T, half>::value) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    static_assert(is_same<T, bf16>::value, "half or bf16");
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
}
template <class T>
__device__ __forceinline__ void mma_m16n8k8(float (&d)[4], const uint32_t (&a)[2],
                                            const uint32_t (&b)[1]) {
  static_assert(is_same<T, half>::value, "m16n8k8 is for half");
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(b[0]));
}

// ---- copies from global to shared memory: there once copy_wait has returned (and, for other
// threads, a barrier behind it); zeros where not valid, and then `global` is not read

__device__ __forceinline__ void copy_16(void* shared, const void* global, bool valid) {
#if GTCO_ARCH >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
               "l"(global), "r"(valid ? 16 : 0)
               : "memory");
#else
  uint4 taken = make_uint4(0, 0, 0, 0);
  if (valid) taken = *static_cast<const uint4*>(global);
  *static_cast<uint4*>(shared) = taken;
#endif
}
__device__ __forceinline__ void copy_4(void* shared, const void* global, bool valid) {
#if GTCO_ARCH >= 800
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(shared)),
               "l"(global), "r"(valid ? 4 : 0)
               : "memory");
#else
  *static_cast<uint32_t*>(shared) = valid ? *static_cast<const uint32_t*>(global) : 0u;
#endif
}
// Ends a group of copies; copy_wait<N> waits until at most the N latest groups are under way.
__device__ __forceinline__ void copy_commit() {
#if GTCO_ARCH >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int N>
__device__ __forceinline__ void copy_wait() {
#if GTCO_ARCH >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}

// ---- stores to global memory where they are valid, without a branch: into one, the compiler would
// put all that they depend on, and a load in a branch waits for those in the branches before it.
// They have no "memory" clobber, so that later loads go ahead of them: what they store, the kernel
// must not read by plain loads

__device__ __forceinline__ void store_16(void* global, uint4 x, bool valid) {
  asm volatile(
      "{ .reg .pred p; setp.ne.u32 p, %5, 0; @p st.global.v4.u32 [%0], {%1, %2, %3, %4}; }" ::"l"(
          global),
      "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "r"(valid ? 1 : 0));
}
__device__ __forceinline__ void store_8(void* global, uint2 x, bool valid) {
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %3, 0; @p st.global.v2.u32 [%0], {%1, %2}; }" ::"l"(
                   global),
               "r"(x.x), "r"(x.y), "r"(valid ? 1 : 0));
}
__device__ __forceinline__ void store_4(void* global, uint32_t x, bool valid) {
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p st.global.u32 [%0], %1; }" ::"l"(global),
               "r"(x), "r"(valid ? 1 : 0));
}

__device__ __forceinline__ void atomic_add(float* where, float value) { atomicAdd(where, value); }

// Of `count` blocks that share something, one has done its part: how many said so before. A block's
// first thread says it, with all that the block wrote before it last met, and knows what those
// before it wrote, as its block does once it has met again. The last one sets the word back to zero,
// for the kernel's next run.
__device__ __forceinline__ uint32_t take_ticket(uint32_t* word, uint32_t count) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(word), "r"(count - 1)
               : "memory");
  return before;
}

// ---- all blocks of a cooperative kernel

// A block's first thread comes to the barrier of all blocks, with all that the block wrote before it
// last met, and waits there for the others. A barrier adds 2^31 to the word, in all: it is passed
// where the highest bit is another than before, and the word needs no reset.
__device__ __forceinline__ uint32_t grid_arrive(uint32_t* word) {
  const uint32_t share = blockIdx.x == 0 ? 0x80000000u - (gridDim.x - 1) : 1u;
  uint32_t ticket;
  asm volatile("atom.release.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(ticket)
               : "l"(word), "r"(share)
               : "memory");
  return ticket;
}
// By a whole warp, with its first lane's ticket: behind a loop of one thread the compiler would take
// all warps for parted.
__device__ __forceinline__ void grid_wait(uint32_t* word, uint32_t ticket) {
  uint32_t now;
  ticket = shuffle(ticket, 0);
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(word) : "memory");
  } while (whole_warp(((now ^ ticket) & 0x80000000u) == 0));
}

// The line of 128 bytes goes to L2.
__device__ __forceinline__ void prefetch(const void* global) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
}

// The same pointer, known to be one to global memory. By the casts: an assumption that it is one is
// lost in some functions, which then load and store generically. Something must stand between the
// casts, or the compiler takes both away.
template <class T>
__device__ __forceinline__ T* in_global(T* pointer) {
  uint64_t global = __cvta_generic_to_global(pointer);
  asm("" : "+l"(global));
  return static_cast<T*>(__cvta_global_to_generic(global));
}

}  // namespace gtco
#endif

namespace gtco {

// The same number, in a register: the compiler does not know what it is computed from.
__device__ __forceinline__ int kept(int x) {
  asm("" : "+r"(x));
  return x;
}

// In every lane, of the 32 lanes' values.
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int mask = 16; mask; mask >>= 1) value += shuffle_xor(value, mask);
  return value;
}
__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int mask = 16; mask; mask >>= 1) value = fmaxf(value, shuffle_xor(value, mask));
  return value;
}

}  // namespace gtco
