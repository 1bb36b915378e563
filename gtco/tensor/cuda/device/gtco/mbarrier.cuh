// Barriers in shared memory (mbarriers, sm_90a): threads arrive without waiting, others wait without
// arriving, so that warps of different roles go on at their own pace. A barrier passes from one phase
// to the next when as many arrivals have come as it was made for.
//
//   mbarrier_init(b, arrivals);    by one thread; the block's barrier before anyone else has it
//   mbarrier_arrive(b, where);     what the thread did before is known to who waits for this phase
//   mbarrier_wait(b, parity);      until a phase of this parity, 0 for the first, is the one before
//                                  the one that is open: 1 lets pass who comes ahead of all phases
//
// And what such warps need beside them: a barrier of some of the block's threads, and registers that
// warp groups hand over.
#pragma once
#include "gtco/wgmma.cuh"

#if GTCO_ARCH >= 900

namespace gtco {

typedef uint64_t Mbarrier;

}  // namespace gtco

#ifdef GTCO_EMULATE
#include "emulated_mbarrier.h"
#else

namespace gtco {

__device__ __forceinline__ void mbarrier_init(Mbarrier* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals)
               : "memory");
}
// Of the threads where it says so, without a branch: behind one the compiler takes a warp for parted.
__device__ __forceinline__ void mbarrier_arrive(Mbarrier* barrier, bool where = true) {
  asm volatile(
      "{ .reg .pred p; .reg .b64 phase; setp.ne.u32 p, %1, 0;\n"
      "@p mbarrier.arrive.release.cta.shared::cta.b64 phase, [%0]; }" ::"r"(
          shared_address(barrier)),
      "r"(where ? 1 : 0)
      : "memory");
}
__device__ __forceinline__ void mbarrier_wait(Mbarrier* barrier, uint32_t parity) {
  asm volatile(
      "{ .reg .pred p;\n"
      "AGAIN: mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%0], %1;\n"
      "@!p bra AGAIN; }" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// The block's first THREADS threads meet, whole warps, whatever the others do.
template <int THREADS>
__device__ __forceinline__ void sync_first() {
  static_assert(THREADS % 32 == 0, "whole warps");
  asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
}

// A warp group has so many registers a thread from now on: it gives those beyond them back to the
// block, or waits until the block has as many more. The kernel's launch bounds must say how many it
// began with.
template <int REGISTERS>
__device__ __forceinline__ void give_registers() {
  static_assert(REGISTERS % 8 == 0 && REGISTERS >= 24 && REGISTERS <= 256, "as they are given out");
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void take_registers() {
  static_assert(REGISTERS % 8 == 0 && REGISTERS >= 24 && REGISTERS <= 256, "as they are given out");
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

}  // namespace gtco
#endif
#endif
