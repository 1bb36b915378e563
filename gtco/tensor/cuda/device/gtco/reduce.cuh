// Folding values over the threads that share a row: by shuffles inside a warp, through shared
// memory between warps. What is folded is associative up to rounding; the order is always the same.
#pragma once
#include "gtco/math.cuh"

namespace gtco {

// How two values become one: `start()` changes nothing. NaN goes through extremes, as in numpy.
struct Sum {
  static __device__ __forceinline__ float start() { return 0.0f; }
  static __device__ __forceinline__ float of(float a, float b) { return a + b; }
};
struct Product {
  static __device__ __forceinline__ float start() { return 1.0f; }
  static __device__ __forceinline__ float of(float a, float b) { return a * b; }
};
struct Largest {
  static __device__ __forceinline__ float start() { return -infinity<float>(); }
  static __device__ __forceinline__ float of(float a, float b) {
    return !(b <= a) & (a == a) ? b : a;
  }
};
struct Smallest {
  static __device__ __forceinline__ float start() { return infinity<float>(); }
  static __device__ __forceinline__ float of(float a, float b) {
    return !(b >= a) & (a == a) ? b : a;
  }
};
// The largest of the numbers, whatever is NaN beside them: a softmax's shift.
struct LargestNumber {
  static __device__ __forceinline__ float start() { return -infinity<float>(); }
  static __device__ __forceinline__ float of(float a, float b) { return fmaxf(a, b); }
};

// An element and its position. The first extreme wins; NaN is more than any number.
struct Place {
  float value;
  int at;
};
template <bool LARGEST>
struct First {
  static __device__ __forceinline__ Place start() {
    return {LARGEST ? -infinity<float>() : infinity<float>(), 0x7fffffff};
  }
  static __device__ __forceinline__ Place of(Place a, Place b) {
    const bool nan_a = is_nan(a.value), nan_b = is_nan(b.value);
    bool ahead = a.at < b.at;
    if (nan_a != nan_b) {
      ahead = nan_a;
    } else if (!nan_a && a.value != b.value) {
      ahead = LARGEST ? a.value > b.value : a.value < b.value;
    }
    return ahead ? a : b;
  }
};

// Mean of `count` values and the sum of their squared distances from it.
struct Moments {
  float count, mean, squares;
};
struct Merge {
  static __device__ __forceinline__ Moments start() { return {0.0f, 0.0f, 0.0f}; }
  // Chan, Golub and LeVeque (1983).
  static __device__ __forceinline__ Moments of(Moments a, Moments b) {
    const float count = a.count + b.count;
    if (count == 0.0f) return a;
    const float distance = b.mean - a.mean, share = b.count / count;
    return {count, a.mean + distance * share,
            a.squares + b.squares + distance * distance * (a.count * share)};
  }
};

__device__ __forceinline__ float exchanged(float x, int mask) { return shuffle_xor(x, mask); }
__device__ __forceinline__ int exchanged(int x, int mask) { return shuffle_xor(x, mask); }
__device__ __forceinline__ int64_t exchanged(int64_t x, int mask) { return shuffle_xor(x, mask); }
__device__ __forceinline__ Place exchanged(Place x, int mask) {
  return {shuffle_xor(x.value, mask), shuffle_xor(x.at, mask)};
}

// THREADS neighbouring threads of a block that share a row, a power of two: lanes of one warp, or
// whole warps.
template <int THREADS>
struct Team {
  static constexpr int WARPS = THREADS / 32;  // 0 where several teams share a warp

  static __device__ __forceinline__ int rank() { return static_cast<int>(threadIdx.x) % THREADS; }
  static __device__ __forceinline__ int index() { return static_cast<int>(threadIdx.x) / THREADS; }

  // All of the team get what its threads' values make. `shared` has room for one value a warp of
  // the block, and is no other fold's: nothing waits for those who still read it. All ALL threads
  // of the block take part.
  template <class Op, int ALL, class T>
  static __device__ __forceinline__ T fold(T x, T* shared) {
#pragma unroll
    for (int mask = (THREADS < 32 ? THREADS : 32) / 2; mask > 0; mask /= 2)
      x = Op::of(x, exchanged(x, mask));
    if constexpr (WARPS > 1) {
      if (lane() == 0) shared[warp()] = x;
      sync<ALL>();
      const T* own = shared + index() * WARPS;
      x = own[0];
#pragma unroll
      for (int w = 1; w < WARPS; ++w) x = Op::of(x, own[w]);
    }
    return x;
  }
};

}  // namespace gtco
