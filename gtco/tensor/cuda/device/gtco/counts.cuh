// Reductions of whole numbers: the TEAM threads of a row take its positions in turn, one each, and
// fold what they have. Exact in any order: overflow goes around, as in serial.
//
//   value(row, j)   the number at position j of a row, through its prologue
//   store(row, y)   the epilogue of a row's result, and its store
#pragma once
#include "gtco/reduce.cuh"

namespace gtco {

template <class T>
struct WholeSum {
  static __device__ __forceinline__ T start() { return 0; }
  static __device__ __forceinline__ T of(T a, T b) {
    return static_cast<T>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
  }
};
template <class T>
struct WholeProduct {
  static __device__ __forceinline__ T start() { return 1; }
  static __device__ __forceinline__ T of(T a, T b) {
    return static_cast<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
  }
};
template <class T>
struct WholeLargest {
  static_assert(T(-1) < T(0), "the start is that of a signed number");
  static __device__ __forceinline__ T start() { return static_cast<T>(1ull << (8 * sizeof(T) - 1)); }
  static __device__ __forceinline__ T of(T a, T b) { return a > b ? a : b; }
};
template <class T>
struct WholeSmallest {
  static_assert(T(-1) < T(0), "the start is that of a signed number");
  static __device__ __forceinline__ T start() {
    return static_cast<T>((1ull << (8 * sizeof(T) - 1)) - 1);
  }
  static __device__ __forceinline__ T of(T a, T b) { return a < b ? a : b; }
};

// ROWS rows of LENGTH, TEAMS of them a block.
template <class Op, int ROWS, int LENGTH, int TEAM, int TEAMS, class Value, class Store>
__device__ __forceinline__ void reduce_whole(int block, const Value& value, const Store& store) {
  const int first = block * TEAMS + Team<TEAM>::index();
  const bool mine = first < ROWS;  // beyond the last row a thread only takes part in folds
  const int row = mine ? first : ROWS - 1;
  auto total = Op::start();
#pragma unroll 4
  for (int j = Team<TEAM>::rank(); j < LENGTH; j += TEAM) total = Op::of(total, value(row, j));
  GTCO_SHARED(shared);
  total = Team<TEAM>::template fold<Op, TEAM * TEAMS>(total,
                                                      reinterpret_cast<decltype(total)*>(shared));
  if (mine && Team<TEAM>::rank() == 0) store(row, total);
}

}  // namespace gtco
