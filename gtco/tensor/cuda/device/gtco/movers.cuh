// How a product's operands come to shared memory, slice by slice of k: as they lie in global memory,
// packed at compile time, or computed on their way.
#pragma once
#include "gtco/mma.cuh"
#include "gtco/vectors.cuh"

namespace gtco {

// ---- operands: at(b, i, k) for row or column i

constexpr bool ALONG_K = true, ALONG_ROWS = false;  // in which direction neighbours lie in memory

// Chunks of 16 bytes lie in memory as they are multiplied: at() gives the address of a chunk's first
// element, or nullptr where its elements count as zeros.
template <bool ALONG, class F>
struct InPlace {
  static constexpr bool along_k = ALONG;
  static constexpr bool constant = false;
  F at;
};
template <bool ALONG, class F>
__device__ __forceinline__ InPlace<ALONG, F> in_place(F at) {
  return {at};
}
// at() computes the element as a float.
template <bool ALONG, class F>
struct Computed {
  static constexpr bool along_k = ALONG;
  static constexpr bool constant = false;
  F at;
};
template <bool ALONG, class F>
__device__ __forceinline__ Computed<ALONG, F> computed(F at) {
  return {at};
}
// at(b, i, q, x) computes RUN neighbours along k, the q-th there are, with their loads as one; or
// at(b, q, k, x) along the operand's own axis. Rows have whole runs.
template <bool ALONG, int RUN_, class F>
struct ComputedRuns {
  static constexpr bool along_k = ALONG;
  static constexpr bool constant = false;
  static constexpr int RUN = RUN_;
  F at;
};
template <bool ALONG, int RUN, class F>
__device__ __forceinline__ ComputedRuns<ALONG, RUN, F> computed_runs(F at) {
  return {at};
}
// A constant B, laid out at compile time tile by tile, with zeros at the edges:
// [batch][tile of columns][slice][column][step of k].
// `batch_of` says which of the batches one reads.
template <class T, class F>
struct Packed {
  static constexpr bool along_k = true;
  static constexpr bool constant = true;  // no kernel writes it
  const T* tiles;
  F batch_of;
};
template <class T, class F>
__device__ __forceinline__ Packed<T, F> packed(const T* tiles, F batch_of) {
  return {tiles, batch_of};
}

// Where a block's next slice of k lies: `outer` times Shape::K and `k` steps more.
struct Slice {
  int number, outer, k;
};

// Brings an operand's slices to shared memory, by THREADS threads from the FIRST on. `begin` asks
// for one, `end` puts into the tile what came by way of registers; EXTENT is the operand's rows or
// columns.
template <class T, class Tile, class Shape, int EXTENT, int THREADS, int FIRST,
          class Source>
struct Mover;

#if GTCO_ARCH < 800
// A thread's chunks of a tile, which came by way of registers.
template <class Tile, int THREADS, int FIRST, int COUNT>
__device__ __forceinline__ void put_chunks(unsigned char* tile, const uint4 (&held)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    const int number = int(threadIdx.x) - FIRST + i * THREADS;
    if (Tile::SIZE % THREADS != 0 && number >= Tile::SIZE) break;
    const int at = Tile::chunk(number / Tile::CHUNKS, number % Tile::CHUNKS);
    *reinterpret_cast<uint4*>(tile + at) = held[i];
  }
}
#endif

template <class T, class Tile, class Shape, int EXTENT, int THREADS, int FIRST, bool ALONG, class F>
struct Mover<T, Tile, Shape, EXTENT, THREADS, FIRST, InPlace<ALONG, F>> {
  static constexpr int COUNT = ceil_div(Tile::SIZE, THREADS), CHUNK = Tile::CHUNK;
  static_assert((ALONG ? Shape::K : EXTENT) % CHUNK == 0, "chunks end where the operand ends");
  const InPlace<ALONG, F>& source;
  const int batch, first, tile_number;
#if GTCO_ARCH < 800
  uint4 held[COUNT];
#endif

  __device__ __forceinline__ void begin(unsigned char* tile, const Slice& slice) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const int number = int(threadIdx.x) - FIRST + i * THREADS;
      if (Tile::SIZE % THREADS != 0 && number >= Tile::SIZE) break;
      const int row = number / Tile::CHUNKS, chunk = number % Tile::CHUNKS;
      const int own = first + (ALONG ? row : chunk * CHUNK);
      const int k = slice.k + (ALONG ? chunk * CHUNK : row);
      const T* from = nullptr;
      if (own < EXTENT && k < Shape::K) from = source.at(batch, own, slice.outer * Shape::K + k);
#if GTCO_ARCH >= 800
      copy_16(tile + Tile::chunk(row, chunk), from, from != nullptr);
#else
      held[i] = from ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
#endif
    }
  }
  __device__ __forceinline__ void end(unsigned char* tile) {
#if GTCO_ARCH < 800
    put_chunks<Tile, THREADS, FIRST>(tile, held);
#endif
  }
};

template <class T, class Tile, class Shape, int EXTENT, int THREADS, int FIRST, class F>
struct Mover<T, Tile, Shape, EXTENT, THREADS, FIRST, Packed<T, F>> {
  static constexpr int COUNT = ceil_div(Tile::SIZE, THREADS), CHUNK = Tile::CHUNK;
  static constexpr int SLICES = Shape::OUTER * ceil_div(Shape::K, Tile::depth);
  static constexpr int TILES = ceil_div(EXTENT, Tile::length);
  const Packed<T, F>& source;
  const int batch, first, tile_number;
#if GTCO_ARCH < 800
  uint4 held[COUNT];
#endif

  __device__ __forceinline__ void begin(unsigned char* tile, const Slice& slice) {
    const int place = (source.batch_of(batch) * TILES + tile_number) * SLICES + slice.number;
    const T* from = source.tiles + place * (Tile::SIZE * CHUNK);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const int number = int(threadIdx.x) - FIRST + i * THREADS;
      if (Tile::SIZE % THREADS != 0 && number >= Tile::SIZE) break;
#if GTCO_ARCH >= 800
      const int at = Tile::chunk(number / Tile::CHUNKS, number % Tile::CHUNKS);
      copy_16(tile + at, from + number * CHUNK, true);
#else
      held[i] = *reinterpret_cast<const uint4*>(from + number * CHUNK);
#endif
    }
  }
  __device__ __forceinline__ void end(unsigned char* tile) {
#if GTCO_ARCH < 800
    put_chunks<Tile, THREADS, FIRST>(tile, held);
#endif
  }
};

// By pairs of neighbours: lanes that follow each other read what lies side by side.
template <class T, class Tile, class Shape, int EXTENT, int THREADS, int FIRST, bool ALONG, class F>
struct Mover<T, Tile, Shape, EXTENT, THREADS, FIRST, Computed<ALONG, F>> {
  static constexpr int PAIRS = Tile::CHUNKS * Tile::CHUNK / 2;  // of a row
  static constexpr int SIZE = (ALONG ? Tile::length : Tile::depth) * PAIRS;
  static constexpr int COUNT = ceil_div(SIZE, THREADS);
  const Computed<ALONG, F>& source;
  const int batch, first, tile_number;
  float held[COUNT][2];

  __device__ __forceinline__ void begin(unsigned char*, const Slice& slice) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const int number = int(threadIdx.x) - FIRST + i * THREADS;
      if (SIZE % THREADS != 0 && number >= SIZE) break;
      const int row = number / PAIRS, column = number % PAIRS * 2;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int own = first + (ALONG ? row : column + e);
        const int k = slice.k + (ALONG ? column + e : row);
        held[i][e] = 0.0f;
        if (own < EXTENT && k < Shape::K)
          held[i][e] = source.at(batch, own, slice.outer * Shape::K + k);
      }
    }
  }
  __device__ __forceinline__ void end(unsigned char* tile) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const int number = int(threadIdx.x) - FIRST + i * THREADS;
      if (SIZE % THREADS != 0 && number >= SIZE) break;
      unsigned char* const at = tile + Tile::element(number / PAIRS, number % PAIRS * 2);
      if constexpr (sizeof(T) == 4)
        *reinterpret_cast<float2*>(at) = make_float2(held[i][0], held[i][1]);
      else
        *reinterpret_cast<uint32_t*>(at) = pack<T>(held[i][0], held[i][1]);
    }
  }
};

// By runs: what lies outside of the operand is read inside of it and counts as zeros, so that no
// branch keeps loads from being under way at once.
template <class T, class Tile, class Shape, int EXTENT, int THREADS, int FIRST, bool ALONG, int RUN,
          class F>
struct Mover<T, Tile, Shape, EXTENT, THREADS, FIRST, ComputedRuns<ALONG, RUN, F>> {
  static constexpr int RUNS = Tile::CHUNKS * Tile::CHUNK / RUN;  // of a row
  static constexpr int SIZE = (ALONG ? Tile::length : Tile::depth) * RUNS;
  static constexpr int COUNT = ceil_div(SIZE, THREADS);
  static_assert((ALONG ? Shape::K : EXTENT) % RUN == 0, "runs end where the operand ends");
  const ComputedRuns<ALONG, RUN, F>& source;
  const int batch, first, tile_number;
  float held[COUNT][RUN];

  __device__ __forceinline__ void begin(unsigned char*, const Slice& slice) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const int number = int(threadIdx.x) - FIRST + i * THREADS;
      if (SIZE % THREADS != 0 && number >= SIZE) break;
      const int row = number / RUNS, column = number % RUNS * RUN;
      int own = first + (ALONG ? row : column), k = slice.k + (ALONG ? column : row);
      const bool valid = own < EXTENT && k < Shape::K;
      own = own < EXTENT ? own : EXTENT - 1;
      k = slice.outer * Shape::K + (k < Shape::K ? k : Shape::K - 1);
      source.at(batch, ALONG ? own : own / RUN, ALONG ? k / RUN : k, held[i]);
#pragma unroll
      for (int e = 0; e < RUN; ++e) held[i][e] = valid ? held[i][e] : 0.0f;
    }
  }
  __device__ __forceinline__ void end(unsigned char* tile) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const int number = int(threadIdx.x) - FIRST + i * THREADS;
      if (SIZE % THREADS != 0 && number >= SIZE) break;
      unsigned char* const at = tile + Tile::element(number / RUNS, number % RUNS * RUN);
      static_assert(RUN == 4, "one store");
      const auto& x = held[i];
      if constexpr (sizeof(T) == 4)
        put_values<T>(reinterpret_cast<T*>(at), x);
      else
        *reinterpret_cast<uint2*>(at) = make_uint2(pack<T>(x[0], x[1]), pack<T>(x[2], x[3]));
    }
  }
};

}  // namespace gtco
