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

template <int COUNT, int ALIGN = COUNT, class From, class To>
__device__ __forceinline__ void store(To* to, const From* from) {
  constexpr int AT_ONCE = at_once<To, COUNT, ALIGN>();
  static_assert(COUNT % AT_ONCE == 0, "whole accesses");
#pragma unroll
  for (int first = 0; first < COUNT; first += AT_ONCE) {
    Neighbours<To, AT_ONCE> written;
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) written.element[i] = reinterpret<To>(from[first + i]);
    *reinterpret_cast<Neighbours<To, AT_ONCE>*>(to + first) = written;
  }
}

}  // namespace gtco
