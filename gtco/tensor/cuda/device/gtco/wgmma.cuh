// Products of a warp group, four warps whose first one's number is a multiple of four (sm_90a):
// d[m, n] += sum over k of a[m, k] b[n, k] of 64 x N x 16, while the warps go on. What they share
// with others is the asynchronous proxy's view of shared memory, so that
//
//   what was copied or stored there: copy_wait, fence_proxy, barrier, and then a product reads it;
//   wgmma_fence(d)                   before the first product after anything else had d;
//   wgmma_m64nNk16(d, a, b) ...      read shared memory and d from now on;
//   wgmma_commit()                   makes a group of those since the last one;
//   wgmma_wait<GROUPS>(d)            until no more than the latest GROUPS groups are under way: then
//                                    d is there, and (behind a barrier) shared memory is free again.
#pragma once
#include "gtco/device.cuh"

#if GTCO_ARCH >= 900

namespace gtco {

constexpr int WARP_GROUP = 128;      // threads
constexpr int SWIZZLED_BYTES = 128;  // of a row along k: 64 elements of 16 bits
constexpr int SWIZZLED_ROWS = 8;     // that are exchanged together
constexpr int SWIZZLED = SWIZZLED_ROWS * SWIZZLED_BYTES;  // what tiles begin at multiples of

// Columns that instructions are written for; EMITTED_COLUMNS of gtco/tensor/cuda/tensor_core.py.
constexpr bool emitted(int n) {
  return n == 32 || n == 64 || n == 96 || n == 128 || n == 192 || n == 256;
}

}  // namespace gtco

#ifdef GTCO_EMULATE
#include "emulated_wgmma.h"
#else

namespace gtco {

// This thread's writes to shared memory so far are seen by products behind the next barrier.
__device__ __forceinline__ void fence_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// The compiler keeps d where it is: it does not know that products write to it.
template <int COLUMNS>
__device__ __forceinline__ void stay(float (&d)[COLUMNS][4]) {
#pragma unroll
  for (int j = 0; j < COLUMNS; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e) asm volatile("" : "+f"(d[j][e])::"memory");
}
template <int COLUMNS>
__device__ __forceinline__ void wgmma_fence(float (&d)[COLUMNS][4]) {
  stay(d);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int GROUPS, int COLUMNS>
__device__ __forceinline__ void wgmma_wait(float (&d)[COLUMNS][4]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(GROUPS) : "memory");
  stay(d);
}

// The sums are operands 0 to N / 2 - 1; what comes behind them is named by its number.
#define GTCO_SUMS_8(j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
#define GTCO_SUMS(j) GTCO_SUMS_8(j), GTCO_SUMS_8(j + 1), GTCO_SUMS_8(j + 2), GTCO_SUMS_8(j + 3)
#define GTCO_NAMES_32                                                    \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define GTCO_NAMES_64 GTCO_NAMES_32 ", "                                           \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define GTCO_NAMES_96 GTCO_NAMES_64 ", "                                           \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define GTCO_NAMES_128 GTCO_NAMES_96 ", "                                          \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define GTCO_NAMES_192 GTCO_NAMES_128 ", "                                           \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define GTCO_NAMES_256 GTCO_NAMES_192 ", "                                               \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, "     \
  "%110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, " \
  "%124, %125, %126, %127"
#define GTCO_OPERANDS_32 GTCO_SUMS(0)
#define GTCO_OPERANDS_64 GTCO_OPERANDS_32, GTCO_SUMS(4)
#define GTCO_OPERANDS_96 GTCO_OPERANDS_64, GTCO_SUMS(8)
#define GTCO_OPERANDS_128 GTCO_OPERANDS_96, GTCO_SUMS(12)
#define GTCO_OPERANDS_192 GTCO_OPERANDS_128, GTCO_SUMS(16), GTCO_SUMS(20)
#define GTCO_OPERANDS_256 GTCO_OPERANDS_192, GTCO_SUMS(24), GTCO_SUMS(28)
// d is added to (p); neither operand is negated; both lie along k.
#define GTCO_WGMMA(n, format, a_and_b)                                                        \
  asm volatile("{ .reg .pred p; setp.eq.u32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n" #n     \
               "k16.f32." format "." format " {" GTCO_NAMES_##n "}, " a_and_b                 \
               ", p, 1, 1, 0, 0; }"                                                           \
               : GTCO_OPERANDS_##n                                                            \
               : "l"(a), "l"(b)                                                               \
               : "memory")
#define GTCO_WGMMA_OF(n, a_and_b)           \
  if constexpr (N == n) {                   \
    if constexpr (is_same<T, half>::value)  \
      GTCO_WGMMA(n, "f16", a_and_b);        \
    else                                    \
      GTCO_WGMMA(n, "bf16", a_and_b);       \
  }

// A and B in shared memory, as wgmma_descriptor says.
template <class T, int N>
__device__ __forceinline__ void wgmma_m64nNk16(float (&d)[N / 8][4], uint64_t a, uint64_t b) {
  static_assert(emitted(N) && (is_same<T, half>::value || is_same<T, bf16>::value), "has a text");
  GTCO_WGMMA_OF(32, "%16, %17")
  GTCO_WGMMA_OF(64, "%32, %33")
  GTCO_WGMMA_OF(96, "%48, %49")
  GTCO_WGMMA_OF(128, "%64, %65")
  GTCO_WGMMA_OF(192, "%96, %97")
  GTCO_WGMMA_OF(256, "%128, %129")
}
#undef GTCO_WGMMA_OF
#undef GTCO_WGMMA
#undef GTCO_SUMS
#undef GTCO_SUMS_8

}  // namespace gtco
#endif

namespace gtco {

// The PTX manual's matrix descriptor of 16 steps of k of an operand that has 64 of them side by side
// in rows of 128 bytes, whose pieces of 16 bytes are exchanged by XOR with the row (as Tile has
// them): `first` is where the first row's first step would lie, were none exchanged. Bits 0-13 are its
// address, 16-29 the leading dimension's offset (of no meaning to swizzled rows along k), 32-45 from
// eight rows to the next eight, all by 16; 62-63 the mode, 1: 128 bytes.
__device__ __forceinline__ uint64_t wgmma_descriptor(const void* first) {
  return uint64_t(1) << 62 | uint64_t(SWIZZLED >> 4) << 32 | uint64_t(1) << 16 |
         (shared_address(first) & 0x3ffff) >> 4;
}
// The first place from `shared` on where such rows may begin: at most SWIZZLED - 128 bytes on.
__device__ __forceinline__ unsigned char* swizzle_aligned(unsigned char* shared) {
  return shared + ((0u - shared_address(shared)) & (SWIZZLED - 1));
}

}  // namespace gtco
#endif
