// Neighbours in memory as one access: up to 16 bytes of it, and several where there are more.
#pragma once
#include "gtco/math.cuh"

namespace gtco {

template <class T, int COUNT>
struct alignas(sizeof(T) * COUNT) Neighbours {
  T element[COUNT];
};

// How many elements an access has: all, or as many as the address is a multiple of, 16 bytes at
// most.
template <class T, int COUNT, int ALIGN>
__device__ constexpr int at_once() {
  constexpr int most = 16 / int(sizeof(T)), elements = ALIGN < COUNT ? ALIGN : COUNT;
  return elements < most ? elements : most;
}

// COUNT elements at `from`, which is aligned to ALIGN of them or to 16 bytes; a format's bits are
// taken as they are.
template <int COUNT, int ALIGN = COUNT, class From, class To>
__device__ __forceinline__ void load(const From* from, To* to) {
  constexpr int AT_ONCE = at_once<From, COUNT, ALIGN>();
  static_assert(COUNT % AT_ONCE == 0, "whole accesses");
#pragma unroll
  for (int first = 0; first < COUNT; first += AT_ONCE) {
    const auto read = *reinterpret_cast<const Neighbours<From, AT_ONCE>*>(from + first);
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) to[first + i] = reinterpret<To>(read.element[i]);
  }
}

// AT_ONCE of them, one access of a format's bits.
template <class To, int AT_ONCE, class From>
__device__ __forceinline__ Neighbours<To, AT_ONCE> gathered(const From* from) {
  Neighbours<To, AT_ONCE> found;
#pragma unroll
  for (int i = 0; i < AT_ONCE; ++i) found.element[i] = reinterpret<To>(from[i]);
  return found;
}

template <int COUNT, int ALIGN = COUNT, class From, class To>
__device__ __forceinline__ void store(To* to, const From* from) {
  constexpr int AT_ONCE = at_once<To, COUNT, ALIGN>();
  static_assert(COUNT % AT_ONCE == 0, "whole accesses");
#pragma unroll
  for (int first = 0; first < COUNT; first += AT_ONCE) {
    const auto written = gathered<To, AT_ONCE>(from + first);  // whole before it is stored
    *reinterpret_cast<Neighbours<To, AT_ONCE>*>(to + first) = written;
  }
}

// The same where it is `valid`, and nothing otherwise; all that it depends on is done in any case.
template <int COUNT, class From, class To>
__device__ __forceinline__ void store_where(bool valid, To* to, const From* from) {
  constexpr int AT_ONCE = at_once<To, COUNT, COUNT>(), BYTES = AT_ONCE * int(sizeof(To));
#pragma unroll
  for (int first = 0; first < COUNT; first += AT_ONCE) {
    const auto written = gathered<To, AT_ONCE>(from + first);
    if constexpr (BYTES == 16)
      store_16(to + first, reinterpret<uint4>(written), valid);
    else if constexpr (BYTES == 8)
      store_8(to + first, reinterpret<uint2>(written), valid);
    else if constexpr (BYTES == 4)
      store_4(to + first, reinterpret<uint32_t>(written), valid);
    else if (valid)
      store<AT_ONCE>(to + first, written.element);
  }
}

}  // namespace gtco
