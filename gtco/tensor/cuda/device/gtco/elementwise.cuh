// Element-wise and movement stages: neighbours that a thread loads and stores as one, and tiles of
// shared memory in which what runs along another axis is turned.
#pragma once

#include "gtco/vectors.cuh"

namespace gtco {

// N neighbours of an array, in a thread's registers.
template <class T, int N>
struct Group {
  T element[N];
  __device__ __forceinline__ T& operator[](int i) { return element[i]; }
  __device__ __forceinline__ const T& operator[](int i) const { return element[i]; }
};

// N elements from `from` on, whose position is a multiple of ALIGN elements. `count` of them are
// there; the others come as zeros.
template <int N, int ALIGN, class T>
__device__ __forceinline__ Group<T, N> read_group(const T* from, int count = N) {
  Group<T, N> found = {};
  if (count >= N) {
    load<N, ALIGN>(from, found.element);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (i < count) found[i] = from[i];
    }
  }
  return found;
}

// The first `count` elements to `to` and on, whose position is a multiple of ALIGN elements.
template <int ALIGN, class T, int N>
__device__ __forceinline__ void write_group(T* to, const Group<T, N>& values, int count = N) {
  if (count >= N) {
    store<N, ALIGN>(to, values.element);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (i < count) to[i] = values[i];
    }
  }
}

// A square of SIDE x SIDE elements in shared memory: rows along t as they are read, columns along j
// as they are written. A row is one element longer, so that neither meets a bank twice.
template <class T, int SIDE>
struct Square {
  static constexpr int PITCH = SIDE + 1;
  T* element;
  __device__ __forceinline__ T& at(int t, int j) const { return element[j * PITCH + t]; }
};

// read(t, j) from (t0, j0) on into the square, neighbouring threads along t.
template <int THREADS, class T, int SIDE, class Read>
__device__ __forceinline__ void fill_square(Square<T, SIDE> square, int t0, int ts, int j0, int js,
                                            Read read) {
  const int t = int(threadIdx.x) % SIDE;
#pragma unroll 4
  for (int j = int(threadIdx.x) / SIDE; j < SIDE; j += THREADS / SIDE) {
    if (t0 + t < ts && j0 + j < js) square.at(t, j) = read(t0 + t, j0 + j);
  }
}

// write(t, j, position inside the square) for the whole of it, neighbouring threads along j.
template <int THREADS, int SIDE, class Write>
__device__ __forceinline__ void drain_square(int t0, int ts, int j0, int js, Write write) {
  const int j = int(threadIdx.x) % SIDE;
#pragma unroll 4
  for (int t = int(threadIdx.x) / SIDE; t < SIDE; t += THREADS / SIDE) {
    if (t0 + t < ts && j0 + j < js) write(t0 + t, j0 + j, t, j);
  }
}

}  // namespace gtco
