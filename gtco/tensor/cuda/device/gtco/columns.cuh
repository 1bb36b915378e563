// Reductions whose results lie side by side: positions [0, LENGTH) of each of WIDTH columns become
// one, OUTER times. Neighbouring threads take neighbouring columns, so a warp's loads lie side by
// side; SPLIT threads share a column's positions and meet in shared memory.
//
//   value(outer, r, c, x)  float (&x)[VECTOR] of the c-th vector of columns at position r, through
//                          its prologue
//   store(outer, r, c, y)  the epilogue and the stores; a reduction's is store(outer, c, y)
#pragma once
#include "gtco/reduce.cuh"

namespace gtco {

template <int OUTER_, int LENGTH_, int WIDTH_, int COLUMNS_, int SPLIT_, int VECTOR_>
struct Columns {
  static constexpr int OUTER = OUTER_;
  static constexpr int LENGTH = LENGTH_;    // positions that become one
  static constexpr int WIDTH = WIDTH_;      // columns
  static constexpr int COLUMNS = COLUMNS_;  // threads side by side, of VECTOR columns each
  static constexpr int SPLIT = SPLIT_;      // threads that share a column
  static constexpr int VECTOR = VECTOR_;
  static constexpr int CHUNK = COLUMNS * VECTOR;  // columns of a block
  static constexpr int CHUNKS = (WIDTH + CHUNK - 1) / CHUNK;
  static_assert(WIDTH % VECTOR == 0, "vectors end where rows of columns do");
};

// A thread's columns and its share of their positions.
template <class C>
struct Share {
  int outer, column, split;  // which vector of columns
  bool mine;  // false beyond the last column: the thread only takes part in folds

  __device__ __forceinline__ explicit Share(int block) {
    const int thread = static_cast<int>(threadIdx.x);
    outer = block / C::CHUNKS;
    split = thread / C::COLUMNS;
    const int own = block % C::CHUNKS * C::COLUMNS + thread % C::COLUMNS;
    mine = own < C::WIDTH / C::VECTOR;
    column = mine ? own : 0;
  }

  // f(r) for each position that is the thread's.
  template <class F>
  __device__ __forceinline__ void each(F f) const {
#pragma unroll 4
    for (int r = split; r < C::LENGTH; r += C::SPLIT) f(r);
  }

  // All threads of a column get what Op makes of theirs. SLOT: which of the block's folds this is.
  template <class Op, int SLOT, class T>
  __device__ __forceinline__ void fold(T (&total)[C::VECTOR]) const {
    if constexpr (C::SPLIT > 1) {
      GTCO_SHARED(shared);
      constexpr int THREADS = C::SPLIT * C::COLUMNS;
      T* slot = reinterpret_cast<T*>(shared) + SLOT * C::SPLIT * C::CHUNK;
      const int thread = static_cast<int>(threadIdx.x), lane = thread % C::COLUMNS;
#pragma unroll
      for (int v = 0; v < C::VECTOR; ++v) slot[v * THREADS + thread] = total[v];
      sync<THREADS>();
#pragma unroll
      for (int v = 0; v < C::VECTOR; ++v) {
        const T* own = slot + v * THREADS + lane;
        total[v] = own[0];
        for (int s = 1; s < C::SPLIT; ++s) total[v] = Op::of(total[v], own[s * C::COLUMNS]);
      }
    }
  }

  // What Op makes of each column's f(r, v, x).
  template <class Op, int SLOT, class T, class Value, class F>
  __device__ __forceinline__ void folded(T (&total)[C::VECTOR], const Value& value, F f) const {
#pragma unroll
    for (int v = 0; v < C::VECTOR; ++v) total[v] = Op::start();
    each([&](int r) {
      float x[C::VECTOR];
      value(outer, r, column, x);
#pragma unroll
      for (int v = 0; v < C::VECTOR; ++v) total[v] = Op::of(total[v], f(r, v, x[v]));
    });
    fold<Op, SLOT>(total);
  }
};

// store(outer, c, what Op makes of each column, times `scale`)
template <class C, class Op, class Value, class Store>
__device__ __forceinline__ void reduce_columns(int block, const Value& value, float scale,
                                               const Store& store) {
  const Share<C> share(block);
  float total[C::VECTOR];
  share.template folded<Op, 0>(total, value, [](int, int, float x) { return x; });
  if (!share.mine || share.split != 0) return;
#pragma unroll
  for (int v = 0; v < C::VECTOR; ++v) total[v] *= scale;
  store(share.outer, share.column, total);
}

// store(outer, c, position of each column's first extreme): a NaN is one.
template <class C, bool LARGEST, class Value, class Store>
__device__ __forceinline__ void place_columns(int block, const Value& value, const Store& store) {
  const Share<C> share(block);
  Place found[C::VECTOR];
  share.template folded<First<LARGEST>, 0>(found, value,
                                           [](int r, int, float x) { return Place{x, r}; });
  if (!share.mine || share.split != 0) return;
  int at[C::VECTOR];
#pragma unroll
  for (int v = 0; v < C::VECTOR; ++v) at[v] = found[v].at;
  store(share.outer, share.column, at);
}

// Softmax, or its logarithm, down each column; see softmax in rows.cuh.
template <class C, bool LOGARITHM, class Value, class Store>
__device__ __forceinline__ void softmax_columns(int block, const Value& value, const Store& store) {
  const Share<C> share(block);
  float top[C::VECTOR], total[C::VECTOR], scale[C::VECTOR];
  share.template folded<LargestNumber, 0>(top, value, [](int, int, float x) { return x; });
  share.template folded<Sum, 1>(total, value,
                                [&](int, int v, float x) { return expf(x - top[v]); });
#pragma unroll
  for (int v = 0; v < C::VECTOR; ++v) scale[v] = LOGARITHM ? logf(total[v]) : 1.0f / total[v];
  if (!share.mine) return;
  share.each([&](int r) {
    float x[C::VECTOR];
    value(share.outer, r, share.column, x);
#pragma unroll
    for (int v = 0; v < C::VECTOR; ++v)
      x[v] = LOGARITHM ? (x[v] - top[v]) - scale[v] : expf(x[v] - top[v]) * scale[v];
    store(share.outer, r, share.column, x);
  });
}

// Mean and variance of each column: store(outer, c, means, variances). A thread sums distances
// from the first of every BLOCK positions, which loses at most a factor of BLOCK in accuracy, and
// only where that one is far from all others; blocks are merged as they come.
template <class C, int BLOCK, class Value, class Store>
__device__ __forceinline__ void moments_columns(int block, const Value& value, const Store& store) {
  const Share<C> share(block);
  Moments all[C::VECTOR];
#pragma unroll
  for (int v = 0; v < C::VECTOR; ++v) all[v] = Merge::start();
  for (int first = share.split; first < C::LENGTH; first += BLOCK * C::SPLIT) {
    float origin[C::VECTOR], total[C::VECTOR], squares[C::VECTOR];
    value(share.outer, first, share.column, origin);
#pragma unroll
    for (int v = 0; v < C::VECTOR; ++v) total[v] = squares[v] = 0.0f;
    const int end = first + BLOCK * C::SPLIT < C::LENGTH ? first + BLOCK * C::SPLIT : C::LENGTH;
    int count = 1;
#pragma unroll 4
    for (int r = first + C::SPLIT; r < end; r += C::SPLIT) {
      float x[C::VECTOR];
      value(share.outer, r, share.column, x);
#pragma unroll
      for (int v = 0; v < C::VECTOR; ++v) {
        const float d = x[v] - origin[v];
        total[v] += d;
        squares[v] += d * d;
      }
      ++count;
    }
    const float number = static_cast<float>(count);
#pragma unroll
    for (int v = 0; v < C::VECTOR; ++v) {
      const float mean = total[v] / number;  // from the first
      all[v] = Merge::of(all[v], {number, origin[v] + mean, squares[v] - total[v] * mean});
    }
  }
  share.template fold<Merge, 0>(all);
  if (!share.mine || share.split != 0) return;
  float mean[C::VECTOR], variance[C::VECTOR];
#pragma unroll
  for (int v = 0; v < C::VECTOR; ++v) {
    mean[v] = all[v].mean;
    variance[v] = all[v].squares * static_cast<float>(1.0 / C::LENGTH);
  }
  store(share.outer, share.column, mean, variance);
}

}  // namespace gtco
