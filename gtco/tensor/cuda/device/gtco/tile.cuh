// Tiles of a matrix in shared memory: how they lie there, and how threads fill them.
#pragma once
#include "gtco/device.cuh"

namespace gtco {

// ROWS rows of COLUMNS elements, in pieces of 16 bytes. Eight neighbouring rows, read at the same
// column as ldmatrix does, must lie in eight different quarters of the 32 banks. Rows of an odd
// number of pieces do by themselves; others have their pieces exchanged by XOR with the row.
template <class T, int ROWS, int COLUMNS>
struct Tile {
  static constexpr int PIECE = 16 / sizeof(T);  // elements
  static constexpr int PIECES = COLUMNS / PIECE;
  static constexpr int ELEMENTS = ROWS * COLUMNS;
  static constexpr int BYTES = ELEMENTS * int(sizeof(T));
  static constexpr int SWAPS = PIECES % 8 == 0 ? 8 : PIECES % 4 == 0 ? 4 : PIECES % 2 == 0 ? 2 : 1;
  static_assert(COLUMNS % PIECE == 0, "a row of a tile is whole pieces of 16 bytes");

  // Where a piece of a row lies, in elements from the tile's first.
  static __device__ __forceinline__ int at(int row, int piece) {
    return (row * PIECES + (piece ^ (row / (8 / SWAPS) % SWAPS))) * PIECE;
  }
  // How much further it lies `rows` rows below, a multiple of 8: pieces are exchanged there alike.
  static __device__ __forceinline__ int below(int rows) { return rows * COLUMNS; }
};

// Where the pieces own, 2 + own, 4 + own... of a row lie, `own` 0 or 1: the row is `row` below
// `first`, a multiple of 8. XOR changes the last three bits of a piece's number, so that eight pieces
// on it is as much further in every row. What a thread keeps is kept, and not computed again.
template <class TILE>
struct PairsOfPieces {
  static constexpr int COUNT = TILE::PIECES >= 8 ? 4 : (TILE::PIECES + 1) / 2;
  int places[COUNT];
  __device__ __forceinline__ PairsOfPieces(int row, int own, int first) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
      places[i] = kept(TILE::at(row, 2 * i + own) + TILE::below(first));
  }
  __device__ __forceinline__ int operator()(int pair) const {
    return places[pair % 4] + pair / 4 * 8 * TILE::PIECE;
  }
};

// Fills a tile by THREADS threads: `put(row, column, where)` for each of its pieces. A sync() stands
// between this and who reads the tile.
template <class TILE, int THREADS, class T, class Put>
__device__ __forceinline__ void fill(T* tile, Put put) {
  constexpr int COUNT = TILE::ELEMENTS / TILE::PIECE;
#pragma unroll 4
  for (int first = 0; first < COUNT; first += THREADS) {
    int i = first + int(threadIdx.x);
    if (COUNT % THREADS != 0 && i >= COUNT) break;
    int row = i / TILE::PIECES, piece = i % TILE::PIECES;
    put(row, piece * TILE::PIECE, tile + TILE::at(row, piece));
  }
}

// A piece of computed values, rounded to the tile's format.
template <class T>
__device__ __forceinline__ void put_values(T* where, const float (&x)[16 / sizeof(T)]) {
  if constexpr (sizeof(T) == 2) {
    *reinterpret_cast<uint4*>(where) = make_uint4(pack<T>(x[0], x[1]), pack<T>(x[2], x[3]),
                                                  pack<T>(x[4], x[5]), pack<T>(x[6], x[7]));
  } else {
    *reinterpret_cast<float4*>(where) = make_float4(x[0], x[1], x[2], x[3]);
  }
}

// The three ways to read an operand in pieces; put() stores the one at a row and column of a batch,
// zeros where it is not valid or from column `width` on.

// at(b, row, column) is the address of a whole piece, aligned: an asynchronous copy, there when
// copy_wait says so. `width` is whole pieces.
template <class F>
struct Addressed {
  F at;
  template <class T>
  __device__ __forceinline__ void put(T* where, bool valid, int b, int row, int c, int width) const {
    copy_16(where, at(b, row, c), valid && c < width);
  }
};
// The same of rows that lie ROW elements apart, all of a batch.
template <int ROW_, class F>
struct EvenlyAddressed : Addressed<F> {
  static constexpr int ROW = ROW_;
  __device__ __forceinline__ explicit EvenlyAddressed(F at) : Addressed<F>{at} {}
};
// at(b, row, p, x) computes the p-th piece of a row. `width` is whole pieces.
template <class F>
struct Pieced {
  F at;
  template <class T>
  __device__ __forceinline__ void put(T* where, bool valid, int b, int row, int c, int width) const {
    constexpr int PIECE = 16 / sizeof(T);
    float x[PIECE];
#pragma unroll
    for (int j = 0; j < PIECE; ++j) x[j] = 0.0f;
    if (valid && c < width) at(b, row, c / PIECE, x);
    put_values<T>(where, x);
  }
};
// at(b, row, column) is one element's value.
template <class F>
struct Valued {
  F at;
  template <class T>
  __device__ __forceinline__ void put(T* where, bool valid, int b, int row, int c, int width) const {
    constexpr int PIECE = 16 / sizeof(T);
    float x[PIECE];
#pragma unroll
    for (int j = 0; j < PIECE; ++j) x[j] = valid && c + j < width ? at(b, row, c + j) : 0.0f;
    put_values<T>(where, x);
  }
};
template <class F>
__device__ __forceinline__ Addressed<F> addressed(F at) {
  return {at};
}
template <int ROW, class F>
__device__ __forceinline__ EvenlyAddressed<ROW, F> evenly_addressed(F at) {
  return EvenlyAddressed<ROW, F>(at);
}
template <class F>
__device__ __forceinline__ Pieced<F> pieced(F at) {
  return {at};
}
template <class F>
__device__ __forceinline__ Valued<F> valued(F at) {
  return {at};
}

// How results are stored: RUN neighbours in a row at once, at(b, row, column / RUN, y), of rows of
// whole runs; or one by one, at(b, row, column, y).
template <int RUN, class F>
struct StoredRuns {
  F at;
  __device__ __forceinline__ void put(int b, int row, int c, int width, const float (&y)[RUN]) const {
    if (c < width) at(b, row, c / RUN, y);
  }
};
template <class F>
struct StoredOnes {
  F at;
  template <int RUN>
  __device__ __forceinline__ void put(int b, int row, int c, int width, const float (&y)[RUN]) const {
#pragma unroll
    for (int j = 0; j < RUN; ++j)
      if (c + j < width) at(b, row, c + j, y[j]);
  }
};
template <int RUN, class F>
__device__ __forceinline__ StoredRuns<RUN, F> stored_runs(F at) {
  return {at};
}
template <class F>
__device__ __forceinline__ StoredOnes<F> stored_ones(F at) {
  return {at};
}

}  // namespace gtco
