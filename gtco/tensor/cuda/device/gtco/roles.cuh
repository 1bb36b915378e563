// Warp roles of a product (warp specialisation): one warp group brings all slices of k, the producer,
// and those ahead of it multiply them, the consumers. No barrier of the block stands between: a slot
// of shared memory goes from one role to the other by two mbarriers.
//
//   producer:                                      consumers:
//     for slice:                                     for slice:
//       wait until its slot is empty                   wait until its slot is full
//       begin its copies                               begin its products
//       wait for those of the slice BEHIND it          wait for those of the slice before
//       fence; that one's slot is full                 that one's slot is empty
//
// The producer waits for its copies itself. cp.async.mbarrier.arrive would have them arrive when they
// land, but products read through another proxy, and the fence between must stand behind the copies
// and before the arrival.
#pragma once
#include "gtco/mbarrier.cuh"

namespace gtco {

// Every warp copies and multiplies,
struct NoRoles {
  static constexpr int PRODUCERS = 0;  // threads that only copy
};

#if GTCO_ARCH >= 900

// Which slot is next, and the parity of how often all have been gone through.
template <int STAGES>
struct Turn {
  int slot = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void on() {
    ++slot;
    parity ^= slot == STAGES ? 1 : 0;
    slot = slot == STAGES ? 0 : slot;
  }
};

// or there is a producer: a whole warp group, since only those hand registers over. A thread of either
// role then has so many of them; with zeros, those that it began with.
template <int PRODUCER = 0, int CONSUMER = 0>
struct ProducerGroup {
  static constexpr int PRODUCERS = WARP_GROUP;

  // The slots' barriers, one of each kind a slot. Every producing thread says that its copies are
  // there, one lane of every consuming warp that its products are done.
  template <int STAGES>
  struct Slots {
    Mbarrier* full;
    Mbarrier* empty;
  };
  // By all of the block.
  template <int STAGES, int CONSUMERS>
  static __device__ __forceinline__ Slots<STAGES> slots(unsigned char* shared) {
    Mbarrier* const first = reinterpret_cast<Mbarrier*>(shared);
    if (whole_warp(warp() == 0)) {
      if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 0; i < STAGES; ++i) {
          mbarrier_init(first + i, PRODUCERS);
          mbarrier_init(first + STAGES + i, CONSUMERS / 32);
        }
      }
    }
    sync<PRODUCERS + CONSUMERS>();
    return {first, first + STAGES};
  }

  // bring(slot) begins the copies of the next slice. No more than BEHIND slices are under way beside
  // the latest: a slot becomes empty only when the slice behind its own is full.
  template <int STAGES, class Bring>
  static __device__ __forceinline__ void produce(const Slots<STAGES>& slots, int slices,
                                                 const Bring& bring) {
    constexpr int BEHIND = STAGES - 2;
    static_assert(BEHIND >= 0, "a slice that is read has a slot of its own");
    if constexpr (PRODUCER > 0) give_registers<PRODUCER>();
    Turn<STAGES> begun, there;
#pragma unroll 1
    for (int s = 0; s < slices + BEHIND; ++s) {
      if (s < slices) {
        mbarrier_wait(slots.empty + begun.slot, begun.parity ^ 1);
        bring(begun.slot);
        begun.on();
      }
      copy_commit();
      if (s >= BEHIND) {
        copy_wait<BEHIND>();
        fence_proxy();
        mbarrier_arrive(slots.full + there.slot);
        there.on();
      }
    }
  }

  // begin(slot) begins the products of the slice there, and share.wait<N>() waits for all but the
  // latest N slices'.
  template <int STAGES, class Share, class Begin>
  static __device__ __forceinline__ void consume(const Slots<STAGES>& slots, int slices,
                                                 Share& share, const Begin& begin) {
    if constexpr (CONSUMER > 0) take_registers<CONSUMER>();
    Turn<STAGES> reading;
    int before = 0;
#pragma unroll 1
    for (int s = 0; s < slices; ++s) {
      mbarrier_wait(slots.full + reading.slot, reading.parity);
      begin(reading.slot);
      share.template wait<1>();
      mbarrier_arrive(slots.empty + before, s > 0 && lane() == 0);
      before = reading.slot;
      reading.on();
    }
    share.template wait<0>();
  }
  // Consumers alone: the producer has left.
  template <int CONSUMERS>
  static __device__ __forceinline__ void meet() {
    sync_first<CONSUMERS>();
  }
};

#endif

}  // namespace gtco
