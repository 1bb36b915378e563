// Tiles in shared memory, and one warp's share of a product of two of them: on Tensor Cores, or on
// CUDA cores with the same interface. gtco/tensor/cuda/tensor_core.py has the fragments' layouts.
#pragma once
#include "gtco/tile.cuh"
#include "gtco/wgmma.cuh"

namespace gtco {

__device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__device__ constexpr int larger(int a, int b) { return a > b ? a : b; }

// An operand's tile of LENGTH rows (A's) or columns (B's) and DEPTH steps of k. Along k, a row of
// shared memory is one of A's rows or B's columns; else it is one step of k.
template <class T, bool ALONG_K, int LENGTH, int DEPTH>
struct Operand : Tile<T, ALONG_K ? LENGTH : DEPTH, ALONG_K ? DEPTH : LENGTH> {
  using Base = Tile<T, ALONG_K ? LENGTH : DEPTH, ALONG_K ? DEPTH : LENGTH>;
  static constexpr bool along_k = ALONG_K;
  static constexpr int length = LENGTH, depth = DEPTH;
  static constexpr int CHUNK = Base::PIECE, CHUNKS = Base::PIECES;  // of 16 bytes; of a row
  static constexpr int SIZE = Base::ELEMENTS / CHUNK;               // chunks

  static __device__ __forceinline__ int chunk(int row, int column_chunk) {  // its place in bytes
    return Base::at(row, column_chunk) * int(sizeof(T));
  }
  static __device__ __forceinline__ int element(int row, int column) {
    return chunk(row, column / CHUNK) + column % CHUNK * int(sizeof(T));
  }
};

// ---- fragments of m16n8k16

// A's 16 rows from m on, 16 steps from k on.
template <class A>
__device__ __forceinline__ void fragment_a(uint32_t (&a)[4], const unsigned char* tile, int m,
                                           int k) {
  const int l = lane();
  if constexpr (A::along_k)
    ldmatrix_x4(a, tile + A::chunk(m + (l & 15), k / 8 + (l >> 4)));
  else
    ldmatrix_x4_trans(a, tile + A::chunk(k + (l & 7) + (l >> 4) * 8, m / 8 + (l >> 3 & 1)));
}

// B's 8 columns from n on, 16 steps from k on.
template <class B>
__device__ __forceinline__ void fragment_b(uint32_t (&b)[2], const unsigned char* tile, int n,
                                           int k) {
  const int l = lane() & 15;
  if constexpr (B::along_k)
    ldmatrix_x2(b, tile + B::chunk(n + (l & 7), k / 8 + (l >> 3)));
  else
    ldmatrix_x2_trans(b, tile + B::chunk(k + l, n / 8));
}

// The same of 16 columns, two fragments.
template <class B>
__device__ __forceinline__ void fragments_b(uint32_t (&first)[2], uint32_t (&second)[2],
                                            const unsigned char* tile, int n, int k) {
  const int l = lane();
  uint32_t both[4];
  if constexpr (B::along_k)
    ldmatrix_x4(both, tile + B::chunk(n + (l & 7) + (l >> 4) * 8, k / 8 + (l >> 3 & 1)));
  else
    ldmatrix_x4_trans(both, tile + B::chunk(k + (l & 15), n / 8 + (l >> 4)));
  first[0] = both[0], first[1] = both[1], second[0] = both[2], second[1] = both[3];
}

// d += a b by m16n8k16, or by two m16n8k8 where that is all there is (sm_75).
template <class T>
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#if GTCO_ARCH >= 800
  mma_m16n8k16<T>(d, a, b);
#else
  const uint32_t a_low[2] = {a[0], a[1]}, a_high[2] = {a[2], a[3]};
  const uint32_t b_low[1] = {b[0]}, b_high[1] = {b[1]};
  mma_m16n8k8<T>(d, a_low, b_low);
  mma_m16n8k8<T>(d, a_high, b_high);
#endif
}

// ---- a warp's share: sums[M, N] in registers

// Sums as m16n8's fragments have them, which wgmma's of a warp's 16 rows are too.
template <int ROWS, int COLUMNS>
struct FragmentSums {
  float sums[ROWS][COLUMNS][4] = {};

  // put(row, column, sum, sum of the next column) for all of this lane's in the rows [first, first +
  // count), both multiples of 16; `first` is a constant where loops are unrolled.
  template <class Put>
  __device__ __forceinline__ void each(int first, int count, Put put) {
    const int row = lane() / 4, column = lane() % 4 * 2;
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
      if (i * 16 >= first && i * 16 < first + count)
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j)
#pragma unroll
          for (int e = 0; e < 4; e += 2)
            put(i * 16 - first + row + e * 4, j * 8 + column, sums[i][j][e], sums[i][j][e + 1]);
  }
};

// Tensor Cores. Fragments are held twice: while one step multiplies, those of the next are under way
// (GTCO, Fig. 10), also where it is in another slice of k.
struct TensorCores {
  static constexpr int STEP = 16;
  static constexpr bool FETCHES = true, ASYNCHRONOUS = false;

  template <class T, class A, class B, int M, int N>
  struct Warp : FragmentSums<M / 16, N / 8> {
    static constexpr int ROWS = M / 16, COLUMNS = N / 8;
    static_assert(M % 16 == 0 && N % 8 == 0, "whole instructions");
    using FragmentSums<ROWS, COLUMNS>::sums;

    uint32_t a[ROWS][4], b[COLUMNS][2], next_a[ROWS][4], next_b[COLUMNS][2];

    // Asks for the fragments of A[m.., k..] and B[k.., n..], one step.
    __device__ __forceinline__ void fetch(const unsigned char* a_tile, const unsigned char* b_tile,
                                          int m, int n, int k) {
#pragma unroll
      for (int i = 0; i < ROWS; ++i) fragment_a<A>(next_a[i], a_tile, m + i * 16, k);
#pragma unroll
      for (int j = 0; j + 1 < COLUMNS; j += 2)
        fragments_b<B>(next_b[j], next_b[j + 1], b_tile, n + j * 8, k);
      if constexpr (COLUMNS % 2 == 1)
        fragment_b<B>(next_b[COLUMNS - 1], b_tile, n + (COLUMNS - 1) * 8, k);
    }
    // What was asked for is what multiplies next.
    __device__ __forceinline__ void turn() {
#pragma unroll
      for (int i = 0; i < ROWS; ++i)
#pragma unroll
        for (int r = 0; r < 4; ++r) a[i][r] = next_a[i][r];
#pragma unroll
      for (int j = 0; j < COLUMNS; ++j) b[j][0] = next_b[j][0], b[j][1] = next_b[j][1];
    }
    __device__ __forceinline__ void multiply() {
#pragma unroll
      for (int i = 0; i < ROWS; ++i)
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) mma<T>(sums[i][j], a[i], b[j]);
    }
  };
};

#if GTCO_ARCH >= 900
// Tensor Cores by warp groups: a warp's tile is 16 rows of as many columns as the block's, and four
// warps below one another multiply together, out of shared memory, while they bring the next slices.
struct WarpGroups {
  static constexpr int STEP = 16;
  static constexpr bool FETCHES = false, ASYNCHRONOUS = true;

  static __device__ __forceinline__ unsigned char* aligned(unsigned char* shared) {
    return swizzle_aligned(shared);
  }
  static __device__ __forceinline__ void visible() { fence_proxy(); }

  template <class T, class A, class B, int M, int N>
  struct Warp : FragmentSums<1, N / 8> {
    static_assert(M == 16 && A::length % 64 == 0 && B::length == N, "four warps have 64 rows");
    static_assert(A::along_k && B::along_k && A::depth * sizeof(T) == SWIZZLED_BYTES &&
                  B::depth == A::depth, "both operands lie as the descriptor says");
    using FragmentSums<1, N / 8>::sums;

    // Begins sums += A[m.., ] B, a slice.
    template <int STEPS>
    __device__ __forceinline__ void begin(const unsigned char* a_tile, const unsigned char* b_tile,
                                          int m) {
      const uint64_t a = wgmma_descriptor(a_tile + m / 64 * 64 * SWIZZLED_BYTES);
      const uint64_t b = wgmma_descriptor(b_tile);
      wgmma_fence(sums[0]);
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        const int on = step * STEP * int(sizeof(T)) >> 4;  // as descriptors count
        wgmma_m64nNk16<T, N>(sums[0], a + on, b + on);
      }
      wgmma_commit();
    }
    // Until no more than the latest SLICES slices are under way.
    template <int SLICES>
    __device__ __forceinline__ void wait() {
      wgmma_wait<SLICES>(sums[0]);
    }
  };
};
#endif

// CUDA cores: float32, and what Tensor Cores do not multiply. A warp is 4 x 8 lanes; where rows (or
// columns) are along k in shared memory a lane's are 4 (8) apart, else it has neighbours.
struct CudaCores {
  static constexpr int STEP = 8;
  static constexpr bool FETCHES = false, ASYNCHRONOUS = false;

  template <class T, class A, class B, int M, int N>
  struct Warp {
    static constexpr int CHUNK = 16 / int(sizeof(T));
    static constexpr int ROWS = M / 4, COLUMNS = N / 8;
    static_assert(M % 16 == 0 && N % 8 == 0, "whole instructions");
    static_assert(A::along_k || ROWS % CHUNK == 0, "whole chunks of rows");
    static_assert(B::along_k || COLUMNS % CHUNK == 0, "whole chunks of columns");
    float sums[ROWS][COLUMNS] = {};

    static __device__ __forceinline__ float taken(const uint4& chunk, int i) {
      const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
      if constexpr (sizeof(T) == 4) {
        return __uint_as_float(words[i]);
      } else {
        T value;
        value.bits = static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16));
        return to_float(value);
      }
    }
    static __device__ __forceinline__ int place(bool along_k, int i, int lanes, int own) {
      return along_k ? i * lanes + own : (i / CHUNK * lanes + own) * CHUNK + i % CHUNK;
    }
    static __device__ __forceinline__ int row(int i) { return place(A::along_k, i, 4, lane() / 8); }
    static __device__ __forceinline__ int column(int j) {
      return place(B::along_k, j, 8, lane() % 8);
    }
    // CHUNK steps of k from `k` on: values[step][own row or column]
    template <class Tile, int COUNT>
    static __device__ __forceinline__ void load(float (&values)[CHUNK][COUNT],
                                                const unsigned char* tile, int first, int k,
                                                int lanes, int own) {
      if constexpr (Tile::along_k) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
          const int at = Tile::chunk(first + i * lanes + own, k / CHUNK);
          const uint4 chunk = *reinterpret_cast<const uint4*>(tile + at);
#pragma unroll
          for (int s = 0; s < CHUNK; ++s) values[s][i] = taken(chunk, s);
        }
      } else {
#pragma unroll
        for (int s = 0; s < CHUNK; ++s)
#pragma unroll
          for (int i = 0; i < COUNT; i += CHUNK) {
            const int at = Tile::chunk(k + s, first / CHUNK + i / CHUNK * lanes + own);
            const uint4 chunk = *reinterpret_cast<const uint4*>(tile + at);
#pragma unroll
            for (int e = 0; e < CHUNK; ++e) values[s][i + e] = taken(chunk, e);
          }
      }
    }

    // sums += A[m.., from..] B[from.., n..], so many steps
    template <int STEPS>
    __device__ __forceinline__ void add(const unsigned char* a_tile, const unsigned char* b_tile,
                                        int m, int n, int from) {
#pragma unroll
      for (int k = 0; k < STEPS * STEP; k += CHUNK) {
        float a[CHUNK][ROWS], b[CHUNK][COLUMNS];
        load<A>(a, a_tile, m, from + k, 4, lane() / 8);
        load<B>(b, b_tile, n, from + k, 8, lane() % 8);
#pragma unroll
        for (int s = 0; s < CHUNK; ++s)
#pragma unroll
          for (int i = 0; i < ROWS; ++i)
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j) sums[i][j] = fmaf(a[s][i], b[s][j], sums[i][j]);
      }
    }

    // put(row, column, sum)
    template <class Put>
    __device__ __forceinline__ void each(int first, int count, Put put) {
#pragma unroll
      for (int i = 0; i < ROWS; ++i) {
        const int at = row(i) - first;
        if (at >= 0 && at < count)
#pragma unroll
          for (int j = 0; j < COLUMNS; ++j) put(at, column(j), sums[i][j]);
      }
    }
  };
};

}  // namespace gtco
