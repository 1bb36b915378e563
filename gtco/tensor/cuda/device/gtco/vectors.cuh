// Neighbours in memory as one access: up to 16 bytes of it, and several where there are more.
#pragma once
#include "gtco/math.cuh"

namespace gtco {

template <class T, int COUNT>
struct alignas(sizeof(T) * COUNT) Neighbours {
  T element[COUNT];
};

// COUNT elements at `from`, which is aligned to all of them or to 16 bytes; a format's bits are
// taken as they are.
template <int COUNT, class From, class To>
__device__ __forceinline__ void load(const From* from, To* to) {
  constexpr int AT_ONCE = COUNT * sizeof(From) > 16 ? 16 / sizeof(From) : COUNT;
  static_assert(COUNT % AT_ONCE == 0, "whole accesses");
#pragma unroll
  for (int first = 0; first < COUNT; first += AT_ONCE) {
    const auto read = *reinterpret_cast<const Neighbours<From, AT_ONCE>*>(from + first);
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) to[first + i] = reinterpret<To>(read.element[i]);
  }
}

template <int COUNT, class From, class To>
__device__ __forceinline__ void store(To* to, const From* from) {
  constexpr int AT_ONCE = COUNT * sizeof(To) > 16 ? 16 / sizeof(To) : COUNT;
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
