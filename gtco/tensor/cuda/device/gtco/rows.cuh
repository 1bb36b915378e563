// Reductions along rows: a row's elements are its positions [0, LENGTH), dealt to the TEAM threads
// that share it VECTOR neighbours at a time:
//
//   thread 0: positions 0 .. VECTOR-1, then those TEAM * VECTOR further on, and so on
//   thread 1: the VECTOR positions beside the first ones, ...
//
// so a team's loads lie side by side. Rows of at most HELD vectors a thread are read once and kept
// in registers; others are read anew in every pass. A stage gives what it reads and stores:
//
//   value(row, q, x)  float (&x)[VECTOR], the row's vector q (positions q * VECTOR and on), through
//                     its prologue
//   store(row, q, y)  the epilogue of results that lie there, and their stores; a reduction's is
//                     store(row, y)
#pragma once
#include "gtco/reduce.cuh"

namespace gtco {

template <int COUNT_, int LENGTH_, int TEAM_, int TEAMS_, int VECTOR_, bool HELD_>
struct Rows {
  static constexpr int COUNT = COUNT_;    // rows
  static constexpr int LENGTH = LENGTH_;  // positions of one
  static constexpr int TEAM = TEAM_;      // threads that share one
  static constexpr int TEAMS = TEAMS_;    // rows of a block
  static constexpr int VECTOR = VECTOR_;  // neighbours that a thread reads at once
  static constexpr bool HELD = HELD_;
  static constexpr int VECTORS = LENGTH / VECTOR;
  static constexpr int PIECES = (VECTORS + TEAM - 1) / TEAM;  // vectors of a thread
  static constexpr int THREADS = TEAM * TEAMS;                // of a block
  static constexpr int WARPS = THREADS / 32;
  static_assert(LENGTH % VECTOR == 0, "vectors end where rows do");
  static_assert(THREADS % 32 == 0, "blocks are whole warps");
};

// The part of a row that one thread has.
template <class R, class Value>
struct Part {
  const Value& value;
  int row;
  bool mine;  // false beyond the last row: the thread only takes part in folds
  float held[R::HELD ? R::PIECES : 1][R::VECTOR];

  __device__ __forceinline__ Part(int block, const Value& value) : value(value) {
    const int first = block * R::TEAMS + Team<R::TEAM>::index();
    mine = first < R::COUNT;
    row = mine ? first : R::COUNT - 1;
    if constexpr (R::HELD) {
#pragma unroll
      for (int k = 0; k < R::PIECES; ++k) {
        const int q = at(k);
        if ((k + 1) * R::TEAM > R::VECTORS) {  // written whatever comes: walk of persistent.cuh
#pragma unroll
          for (int v = 0; v < R::VECTOR; ++v) held[k][v] = 0.0f;
        }
        if (inside(k, q)) value(row, q, held[k]);
      }
    }
  }

  static __device__ __forceinline__ int at(int k) {
    return k * R::TEAM + Team<R::TEAM>::rank();
  }
  static __device__ __forceinline__ bool inside(int k, int q) {
    return (k + 1) * R::TEAM <= R::VECTORS || q < R::VECTORS;
  }

  // f(q, x) for each vector x of the thread; what f writes to x stays where the row is held.
  template <class F>
  __device__ __forceinline__ void each(F f) {
    if constexpr (R::HELD) {
#pragma unroll
      for (int k = 0; k < R::PIECES; ++k) {
        const int q = at(k);
        if (inside(k, q)) f(q, held[k]);
      }
    } else {
#pragma unroll 4
      for (int k = 0; k < R::PIECES; ++k) {
        const int q = at(k);
        if (inside(k, q)) {
          float x[R::VECTOR];
          value(row, q, x);
          f(q, x);
        }
      }
    }
  }

  // What Op makes of f(j, x) over the row's elements x at positions j, known to all of its threads.
  // SLOT: which of the block's folds this is.
  template <class Op, int SLOT, class F>
  __device__ __forceinline__ auto fold(F f) {
    auto total = Op::start();
    each([&](int q, float(&x)[R::VECTOR]) {
#pragma unroll
      for (int v = 0; v < R::VECTOR; ++v) total = Op::of(total, f(q * R::VECTOR + v, x[v]));
    });
    using T = decltype(total);
    GTCO_SHARED(shared);
    T* own = reinterpret_cast<T*>(shared) + SLOT * R::WARPS;
    return Team<R::TEAM>::template fold<Op, R::THREADS>(total, own);
  }
};

// y = exp(x - top) / sum of them. A row of -inf alone, with a NaN or an infinity is NaN.
template <class R, class Value, class Store>
__device__ __forceinline__ void softmax(int block, const Value& value, const Store& store) {
  Part<R, Value> part(block, value);
  const float top =
      part.template fold<LargestNumber, 0>([](int, float x) { return x; });
  const float total = part.template fold<Sum, 1>([&](int, float& x) {
    const float e = expf(x - top);
    if constexpr (R::HELD) x = e;
    return e;
  });
  const float scale = 1.0f / total;
  if (!part.mine) return;
  part.each([&](int q, float(&x)[R::VECTOR]) {
    float y[R::VECTOR];
#pragma unroll
    for (int v = 0; v < R::VECTOR; ++v) y[v] = (R::HELD ? x[v] : expf(x[v] - top)) * scale;
    store(part.row, q, y);
  });
}

template <class R, class Value, class Store>
__device__ __forceinline__ void log_softmax(int block, const Value& value, const Store& store) {
  Part<R, Value> part(block, value);
  const float top =
      part.template fold<LargestNumber, 0>([](int, float x) { return x; });
  const float total = part.template fold<Sum, 1>([&](int, float x) { return expf(x - top); });
  const float shift = logf(total);
  if (!part.mine) return;
  part.each([&](int q, float(&x)[R::VECTOR]) {
    float y[R::VECTOR];
#pragma unroll
    for (int v = 0; v < R::VECTOR; ++v) y[v] = (x[v] - top) - shift;
    store(part.row, q, y);
  });
}

// y = (x - mean) / sqrt(variance + epsilon) * gain + shift, the mean first and then the variance;
// gain(q, g) and shift(q, s) read the row's parameters.
template <class R, class Value, class Gain, class Shift, class Store>
__device__ __forceinline__ void layer_norm(int block, const Value& value, const Gain& gain,
                                           const Shift& shift, float epsilon,
                                           const Store& store) {
  Part<R, Value> part(block, value);
  constexpr float share = static_cast<float>(1.0 / R::LENGTH);
  const float mean = part.template fold<Sum, 0>([](int, float x) { return x; }) * share;
  const float squares = part.template fold<Sum, 1>([&](int, float x) {
    const float d = x - mean;
    return d * d;
  });
  const float scale = rsqrtf(squares * share + epsilon);  // within 2 units of the last place
  if (!part.mine) return;
  part.each([&](int q, float(&x)[R::VECTOR]) {
    float g[R::VECTOR], s[R::VECTOR], y[R::VECTOR];
    gain(q, g);
    shift(q, s);
#pragma unroll
    for (int v = 0; v < R::VECTOR; ++v) y[v] = (x[v] - mean) * scale * g[v] + s[v];
    store(part.row, q, y);
  });
}

// y = x / sqrt(mean of x^2 + epsilon) * gain
template <class R, class Value, class Gain, class Store>
__device__ __forceinline__ void rms_norm(int block, const Value& value, const Gain& gain, float epsilon,
                                         const Store& store) {
  Part<R, Value> part(block, value);
  constexpr float share = static_cast<float>(1.0 / R::LENGTH);
  const float squares = part.template fold<Sum, 0>([](int, float x) { return x * x; });
  const float scale = rsqrtf(squares * share + epsilon);  // within 2 units of the last place
  if (!part.mine) return;
  part.each([&](int q, float(&x)[R::VECTOR]) {
    float g[R::VECTOR], y[R::VECTOR];
    gain(q, g);
#pragma unroll
    for (int v = 0; v < R::VECTOR; ++v) y[v] = x[v] * scale * g[v];
    store(part.row, q, y);
  });
}

// store(row, what Op makes of the row, times `scale`)
template <class R, class Op, class Value, class Store>
__device__ __forceinline__ void reduce(int block, const Value& value, float scale, const Store& store) {
  Part<R, Value> part(block, value);
  const float total = part.template fold<Op, 0>([](int, float x) { return x; });
  if (part.mine && Team<R::TEAM>::rank() == 0) store(part.row, total * scale);
}

// store(row, position of the first extreme): a NaN is one.
template <class R, bool LARGEST, class Value, class Store>
__device__ __forceinline__ void place(int block, const Value& value, const Store& store) {
  Part<R, Value> part(block, value);
  const Place found =
      part.template fold<First<LARGEST>, 0>([](int j, float x) { return Place{x, j}; });
  if (part.mine && Team<R::TEAM>::rank() == 0) store(part.row, found.at);
}

// The moments of parts of one size, merged over the parts and over the channels of a group: a row
// is a group, its positions part by part. value(row, q, x) reads parts' means, spread(row, q, x)
// their variances; store(row, channel of the group, mean, 1 / sqrt(variance + epsilon)).
template <class R, int CHANNELS, class Value, class Spread, class Store>
__device__ __forceinline__ void merged_moments(int block, const Value& value, const Spread& spread,
                                               float epsilon, const Store& store) {
  Part<R, Value> part(block, value);
  constexpr float share = static_cast<float>(1.0 / R::LENGTH);
  const float mean = part.template fold<Sum, 0>([](int, float x) { return x; }) * share;
  float inside = 0.0f;
  part.each([&](int q, float(&)[R::VECTOR]) {
    float own[R::VECTOR];
    spread(part.row, q, own);
#pragma unroll
    for (int v = 0; v < R::VECTOR; ++v) inside += own[v];
  });
  const float apart = part.template fold<Sum, 1>([&](int, float x) {
    const float d = x - mean;
    return d * d;
  });
  GTCO_SHARED(shared);
  inside = Team<R::TEAM>::template fold<Sum, R::THREADS>(inside,
                                             reinterpret_cast<float*>(shared) + 2 * R::WARPS);
  const float scale = rsqrtf((inside + apart) * share + epsilon);
  if (!part.mine) return;
  for (int c = Team<R::TEAM>::rank(); c < CHANNELS; c += R::TEAM) store(part.row, c, mean, scale);
}

}  // namespace gtco
