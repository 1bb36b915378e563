// Tiles of a matrix in shared memory: how they lie there, and how threads fill them.
#pragma once
#include "gtco/device.cuh"

namespace gtco {

template <class T>
struct IsPointer {
  static constexpr bool value = false;
};
template <class T>
struct IsPointer<T*> {
  static constexpr bool value = true;
};

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
};

// Fills a tile by THREADS threads, with zeros outside of the rows that are `inside(row)` and of the
// first `width` columns. `read(row, column)` is the address of PIECE neighbours, aligned to 16 bytes:
// they are copied asynchronously, and there when copy_wait says so (`width` is whole pieces then); or
// it is one element's value:
// those are stored at once. Either way a sync() stands between this and who reads the tile.
template <class TILE, int THREADS, class T, class Inside, class Read>
__device__ __forceinline__ void fill(T* tile, int width, Inside inside, Read read) {
  constexpr int PIECE = TILE::PIECE, COUNT = TILE::ELEMENTS / PIECE;
#pragma unroll 4
  for (int first = 0; first < COUNT; first += THREADS) {
    int i = first + int(threadIdx.x);
    if (COUNT % THREADS != 0 && i >= COUNT) break;
    int row = i / TILE::PIECES, piece = i % TILE::PIECES, column = piece * PIECE;
    T* where = tile + TILE::at(row, piece);
    if constexpr (IsPointer<decltype(read(0, 0))>::value) {
      copy_16(where, read(row, column), inside(row) && column < width);
    } else {
      float values[PIECE];
      const bool valid = inside(row);
#pragma unroll
      for (int j = 0; j < PIECE; ++j)
        values[j] = valid && column + j < width ? to_float(read(row, column + j)) : 0.0f;
      if constexpr (sizeof(T) == 2) {
        *reinterpret_cast<uint4*>(where) =
            make_uint4(pack<T>(values[0], values[1]), pack<T>(values[2], values[3]),
                       pack<T>(values[4], values[5]), pack<T>(values[6], values[7]));
      } else {
        *reinterpret_cast<float4*>(where) = make_float4(values[0], values[1], values[2], values[3]);
      }
    }
  }
}

}  // namespace gtco
