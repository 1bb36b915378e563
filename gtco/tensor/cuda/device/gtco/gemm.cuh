// C[b, m, n] = sum over k of A[b, m, k] B[b, k, n], and whatever a stage makes of it. A block makes
// one tile of C: it copies tiles of A and B to shared memory, several stages ahead of their use,
// its warps multiply parts of them, and `store` gets every element of C, in runs of neighbours.
//
//   for slice in slices of k:                      // Block::K steps each
//     begin the copies of the slice STAGES - 1 ahead
//     for step in this warp's part of the slice:   // Warps::PARTS warps share a slice
//       ask for the fragments of the next step, behind the last one's barrier in the next slice
//       sums += A B of this step
//   parts are added up; sums -> shared memory -> store(b, m, n / RUN, sums)
//
// Or the copies are one warp group's and the products the others' (roles.cuh).
//
// Where a tile is split, several blocks share it, each with a part of k's slices: their sums meet in
// global memory, and the block that comes last adds them up and stores.
#pragma once
#include "gtco/movers.cuh"
#include "gtco/roles.cuh"

namespace gtco {

// Extents. k is OUTER loops around K steps: a slice never passes from one to the next.
template <int BATCH_, int M_, int N_, int OUTER_, int K_>
struct Shape {
  static constexpr int BATCH = BATCH_, M = M_, N = N_, OUTER = OUTER_, K = K_;
};
// A block's tile, and k's slice.
template <int M_, int N_, int K_>
struct Block {
  static constexpr int M = M_, N = N_, K = K_;
};
// A warp's tile; PARTS warps share it, each with a part of every slice.
template <int M_, int N_, int PARTS_ = 1>
struct Warps {
  static constexpr int M = M_, N = N_, PARTS = PARTS_;
};

// Which part of a tile's k a block has: all of it,
struct Whole {
  static constexpr int COUNT = 1;
};
// or one of COUNT parts. `sums` has room for those of every block, `done` counts for each tile the
// parts that are there: zeros before a run and behind it.
template <int COUNT_>
struct Split {
  static constexpr int COUNT = COUNT_;
  float* sums;
  uint32_t* done;
};

// ---- results, of which lanes have RUN neighbours each: in a row, or in a column where the output
// has those side by side (ROWS_FIRST)

// at(b, i, p, valid, y) for the p-th run of row (column) i: reads what it needs and computes, also
// where it is not valid and stores nothing. No branch is in the way of the next run's reads.
template <int RUN_, class F>
struct InRuns {
  static constexpr int RUN = RUN_;
  F at;
  template <int ROWS, int WIDTH>
  __device__ __forceinline__ void put(int b, int row, int c, const float (&y)[RUN]) const {
    static_assert(WIDTH % RUN == 0, "runs end where rows end");
    const bool valid = row < ROWS && c < WIDTH;
    at(b, row < ROWS ? row : ROWS - 1, c < WIDTH ? c / RUN : WIDTH / RUN - 1, valid, y);
  }
};
template <int RUN, class F>
__device__ __forceinline__ InRuns<RUN, F> in_runs(F at) {
  return {at};
}
// at(b, i, c, y) for one element.
template <class F>
struct OneByOne {
  static constexpr int RUN = 1;
  F at;
  template <int ROWS, int WIDTH>
  __device__ __forceinline__ void put(int b, int row, int c, const float (&y)[1]) const {
    if (row < ROWS && c < WIDTH) at(b, row, c, y[0]);
  }
};
template <class F>
__device__ __forceinline__ OneByOne<F> one_by_one(F at) {
  return {at};
}

// ---- the kernel's numbers, which the host reckons with too (sketch/gemm/cuda.py)

template <class T, class Unit, class Shape, class Block, class Warps, int STAGES, bool ROWS_FIRST,
          class Roles = NoRoles>
struct Plan {
  static constexpr int ACROSS = Block::N / Warps::N, DOWN = Block::M / Warps::M;
  static constexpr int SHARE = ACROSS * DOWN;  // warps that have a tile of their own
  static constexpr int WORKERS = SHARE * Warps::PARTS * 32;  // threads that multiply
  static constexpr int THREADS = WORKERS + Roles::PRODUCERS;
  static constexpr int COPIERS = Roles::PRODUCERS ? Roles::PRODUCERS : WORKERS;
  static constexpr int TILES_M = ceil_div(Shape::M, Block::M);
  static constexpr int TILES_N = ceil_div(Shape::N, Block::N);
  static constexpr int BLOCKS = Shape::BATCH * TILES_M * TILES_N;
  static constexpr int SLICES = Shape::OUTER * ceil_div(Shape::K, Block::K);
  static constexpr int STAGE = (Block::M + Block::N) * Block::K * int(sizeof(T));
  // Sums pass through shared memory by slabs of rows of a warp's tile, so that lanes which follow
  // each other store neighbours: of a row, or of a column where the output has those side by side.
  static constexpr int SLAB = ROWS_FIRST && Warps::M % 32 == 0 ? 32 : 16;
  // Rows of a slab begin 8 (or 24) banks apart, columns 4 (or 20): what lanes write meets no other.
  static constexpr int PITCH = ROWS_FIRST ? SLAB + 4 : Warps::N % 16 == 8 ? Warps::N : Warps::N + 8;
  static constexpr int SLAB_BYTES = (ROWS_FIRST ? Warps::N : SLAB) * PITCH * 4;
  static constexpr int PARTS_BYTES = Warps::PARTS > 1 ? Block::M * Block::N * 4 : 0;
  // Dynamic shared memory begins at a multiple of 128 bytes, and swizzled tiles at one of 1024.
  static constexpr int ALIGNED = Unit::ASYNCHRONOUS ? 1024 - 128 : 0;
  static constexpr int ROOM = larger(STAGES * STAGE, larger(SHARE * SLAB_BYTES, PARTS_BYTES));
  // Behind it lie the barriers by which slots change hands, two of each.
  static constexpr int SHARED = ALIGNED + ROOM + (Roles::PRODUCERS ? 2 * STAGES * 8 : 0);
};

// What a warp's sums are given to, one or two neighbours of a row at a time.
template <int STEP>  // another warp's, each to its own place
struct Handed {
  float* to;
  template <class... Sums>
  __device__ __forceinline__ void operator()(int, int, Sums&... sum) {
    ((*to = sum, to += STEP), ...);
  }
};
template <int STEP>  // instead of what it has
struct Taken {
  const float* from;
  template <class... Sums>
  __device__ __forceinline__ void operator()(int, int, Sums&... sum) {
    ((sum = *from, from += STEP), ...);
  }
};
template <int STEP>  // and from there
struct Added {
  const float* from;
  template <class... Sums>
  __device__ __forceinline__ void operator()(int, int, Sums&... sum) {
    ((sum += *from, from += STEP), ...);
  }
};
template <int PITCH, bool ROWS_FIRST>
struct Slab {
  float* first;
  __device__ __forceinline__ float* place(int row, int column) {
    return first + (ROWS_FIRST ? column * PITCH + row : row * PITCH + column);
  }
  __device__ __forceinline__ void operator()(int row, int column, float sum) {
    *place(row, column) = sum;
  }
  __device__ __forceinline__ void operator()(int row, int column, float sum, float beside) {
    if constexpr (ROWS_FIRST) {
      *place(row, column) = sum;
      *place(row, column + 1) = beside;
    } else {
      *reinterpret_cast<float2*>(place(row, column)) = make_float2(sum, beside);
    }
  }
};

// The main loop where every warp copies and multiplies: begin(slot) and end(slot) bring the next slice
// there, AHEAD of the one that is multiplied. B's tile lies BYTES_A behind A's.
template <class Unit, int THREADS, int STAGES, int AHEAD, int STEPS, int BYTES_A, class Share,
          class Stage, class Begin, class End>
__device__ __forceinline__ void every_warp(int slices, Share& share, int m, int n, int k,
                                           const Stage& stage, const Begin& begin,
                                           const End& end) {
  int reading = 0, writing = AHEAD % STAGES;
  // The slices' copies end: the next is there, and nobody reads the slot any more that comes next.
  const auto arrived = [&]() {
    copy_wait<AHEAD - 1>();
    if constexpr (Unit::ASYNCHRONOUS) Unit::visible();
    sync<THREADS>();
  };
  if constexpr (Unit::FETCHES) {
    arrived();
    share.fetch(stage(0), stage(0) + BYTES_A, m, n, k);
  }
#pragma unroll 1
  for (int s = 0; s < slices; ++s) {
    if constexpr (!Unit::FETCHES) arrived();
    if constexpr (Unit::ASYNCHRONOUS)
      share.template begin<STEPS>(stage(reading), stage(reading) + BYTES_A, m);
    const bool more = s + AHEAD < slices;
    if (more) begin(writing);
    copy_commit();
    if constexpr (Unit::FETCHES) {
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        share.turn();
        if (step + 1 < STEPS) {
          share.fetch(stage(reading), stage(reading) + BYTES_A, m, n,
                      k + (step + 1) * Unit::STEP);
        } else if (s + 1 < slices) {
          if (AHEAD == 1) end(writing);
          arrived();
          reading = reading + 1 == STAGES ? 0 : reading + 1;
          share.fetch(stage(reading), stage(reading) + BYTES_A, m, n, k);
        }
        share.multiply();
      }
      if (AHEAD > 1 && more) end(writing);
    } else if constexpr (Unit::ASYNCHRONOUS) {
      if (more) end(writing);
      share.template wait<1>();  // all others: behind the next barrier nobody reads their slots
      reading = reading + 1 == STAGES ? 0 : reading + 1;
    } else {
      share.template add<STEPS>(stage(reading), stage(reading) + BYTES_A, m, n, k);
      if (more) end(writing);
      reading = reading + 1 == STAGES ? 0 : reading + 1;
    }
    writing = writing + 1 == STAGES ? 0 : writing + 1;
  }
  if constexpr (Unit::ASYNCHRONOUS) share.template wait<0>();
}

// A whole stage, one block a part of a tile of C, the `block`-th of Plan::BLOCKS times PARTS. GROUP
// rows of tiles are walked together, columns outermost, so that blocks which run at once share tiles
// of A and B in L2.
template <class T, class Unit, class Shape, class Block, class Warps, int STAGES, int GROUP,
          bool ROWS_FIRST = false, class Roles = NoRoles, class A, class B, class Store,
          class Part = Whole>
__device__ __forceinline__ void gemm(int block, const A& a, const B& b, const Store& store,
                                     const Part& of_tile = {}) {
  using Numbers = Plan<T, Unit, Shape, Block, Warps, STAGES, ROWS_FIRST, Roles>;
  using TileA = Operand<T, A::along_k, Block::M, Block::K>;
  using TileB = Operand<T, B::along_k, Block::N, Block::K>;
  // A slice that may still be read while the next one is multiplied has a slot of its own.
  constexpr int SLICES = Numbers::SLICES, AHEAD = STAGES - (Unit::ASYNCHRONOUS ? 2 : 1);
  constexpr int STEPS = Block::K / Warps::PARTS / Unit::STEP;
  static_assert(AHEAD >= 1, "one stage is multiplied while others are under way");
  static_assert(Block::M % Warps::M == 0 && Block::N % Warps::N == 0, "whole warps");
  static_assert(STEPS * Warps::PARTS * Unit::STEP == Block::K, "whole steps");
  GTCO_SHARED(room);
  unsigned char* shared = room;
  if constexpr (Unit::ASYNCHRONOUS) shared = Unit::aligned(room);

  constexpr int BLOCKS = Part::COUNT, EACH = SLICES / BLOCKS, MORE = SLICES % BLOCKS;
  static_assert(EACH > 0, "a slice for each block");
  const int of_k = block % BLOCKS;  // which part of k; the first ones have a slice more
  block /= BLOCKS;
  const int slices = EACH + (of_k < MORE ? 1 : 0);

  const int batch = block / (Numbers::TILES_M * Numbers::TILES_N);
  const int tile = block % (Numbers::TILES_M * Numbers::TILES_N);
  const int group = tile / (GROUP * Numbers::TILES_N), inside = tile % (GROUP * Numbers::TILES_N);
  const int left = Numbers::TILES_M - group * GROUP, high = left < GROUP ? left : GROUP;
  const int tile_m = group * GROUP + inside % high, tile_n = inside / high;
  const int m0 = tile_m * Block::M, n0 = tile_n * Block::N;

  constexpr int COPIERS = Numbers::COPIERS, FIRST = Numbers::THREADS - COPIERS;
  Mover<T, TileA, Shape, Shape::M, COPIERS, FIRST, A> mover_a{a, batch, m0, tile_m};
  Mover<T, TileB, Shape, Shape::N, COPIERS, FIRST, B> mover_b{b, batch, n0, tile_n};
  Slice next{0, 0, 0};
  if constexpr (BLOCKS > 1) {
    constexpr int INSIDE = SLICES / Shape::OUTER;
    next.number = of_k * EACH + (of_k < MORE ? of_k : MORE);
    next.outer = next.number / INSIDE;
    next.k = next.number % INSIDE * Block::K;
  }
  const auto stage = [&](int slot) { return shared + slot * Numbers::STAGE; };
  const auto begin = [&](int slot) {
    mover_a.begin(stage(slot), next);
    mover_b.begin(stage(slot) + TileA::BYTES, next);
  };
  const auto advance = [](Slice& slice) {
    ++slice.number;
    slice.k += Block::K;
    if (Shape::OUTER > 1 && slice.k >= Shape::K) ++slice.outer, slice.k = 0;
  };
  const auto end = [&](int slot) {
    mover_a.end(stage(slot));
    mover_b.end(stage(slot) + TileA::BYTES);
    advance(next);
  };
  if constexpr (Roles::PRODUCERS == 0 && B::constant) {
    // The weights are no other kernel's, so their first slices come while the one before ends.
    Slice first = next;
#pragma unroll
    for (int s = 0; s < AHEAD; ++s) {
      if (s < slices) {
        mover_b.begin(stage(s) + TileA::BYTES, first);
        mover_b.end(stage(s) + TileA::BYTES);
        advance(first);
      }
    }
  }
  after_previous();
  if constexpr (Roles::PRODUCERS == 0) {
#pragma unroll
    for (int s = 0; s < AHEAD; ++s) {
      if (s < slices) {
        mover_a.begin(stage(s), next);
        if constexpr (!B::constant) mover_b.begin(stage(s) + TileA::BYTES, next);
        mover_a.end(stage(s));
        if constexpr (!B::constant) mover_b.end(stage(s) + TileA::BYTES);
        advance(next);
      }
      copy_commit();
    }
  }
  const int part = warp() / Numbers::SHARE, own = warp() % Numbers::SHARE;
  const int m = own / Numbers::ACROSS * Warps::M, n = own % Numbers::ACROSS * Warps::N;
  typename Unit::template Warp<T, TileA, TileB, Warps::M, Warps::N> share;
  const int k = part * STEPS * Unit::STEP;
  if constexpr (Roles::PRODUCERS > 0) {
    const auto slots = Roles::template slots<STAGES, Numbers::WORKERS>(shared + Numbers::ROOM);
    if (whole_warp(warp() >= Numbers::WORKERS / 32)) {
      return Roles::produce(slots, slices, [&](int slot) {
        begin(slot);
        end(slot);
      });
    }
    Roles::consume(slots, slices, share, [&](int slot) {
      share.template begin<STEPS>(stage(slot), stage(slot) + TileA::BYTES, m);
    });
  } else {
    every_warp<Unit, Numbers::THREADS, STAGES, AHEAD, STEPS, TileA::BYTES>(slices, share, m, n, k,
                                                                           stage, begin, end);
  }
  const auto meet = [] {  // of all that multiply
    if constexpr (Roles::PRODUCERS > 0)
      Roles::template meet<Numbers::WORKERS>();
    else
      sync<Numbers::THREADS>();
  };

  float* const sums = reinterpret_cast<float*>(shared);
  if constexpr (Warps::PARTS > 1) {
    // one after the other, so that the sum is the same each time
#pragma unroll 1
    for (int p = 1; p < Warps::PARTS; ++p) {
      meet();
      float* const mine = sums + own * 32 + lane();
      if (whole_warp(part == p)) share.each(0, Warps::M, Handed<Numbers::SHARE * 32>{mine});
      meet();
      if (whole_warp(part == 0)) share.each(0, Warps::M, Added<Numbers::SHARE * 32>{mine});
    }
  }
  if constexpr (BLOCKS > 1) {
    constexpr int STEP = Numbers::SHARE * 32;
    float* const first = of_tile.sums + block * BLOCKS * (Block::M * Block::N) + own * 32 + lane();
    if (whole_warp(part == 0))
      share.each(0, Warps::M, Handed<STEP>{first + of_k * (Block::M * Block::N)});
    meet();  // all of the block's are there, and nobody needs the slices any more
    uint32_t* const before = reinterpret_cast<uint32_t*>(shared);
    if (threadIdx.x == 0) *before = take_ticket(of_tile.done + block, BLOCKS);
    meet();
    if (whole_warp(*before != BLOCKS - 1)) return;
    // in their order, whichever block came last, so that the sum is the same each time
    if (whole_warp(part == 0)) {
      share.each(0, Warps::M, Taken<STEP>{first});
#pragma unroll 1
      for (int p = 1; p < BLOCKS; ++p)
        share.each(0, Warps::M, Added<STEP>{first + p * (Block::M * Block::N)});
    }
  }
  meet();
  if (whole_warp(part > 0)) return;
  constexpr int SLAB = Numbers::SLAB, PITCH = Numbers::PITCH, RUN = Store::RUN;
  constexpr int LONG = ROWS_FIRST ? SLAB : Warps::N;  // neighbours of a row (column) of a slab
  constexpr int COUNT = SLAB * Warps::N / RUN;        // runs of it
  // Where these are half of what all banks give at once, two rows (columns) in different banks go
  // together.
  constexpr int APART = LONG == 16 ? (ROWS_FIRST ? 4 : 2) : 1;
  float* const slab = sums + own * (Numbers::SLAB_BYTES / 4);
#pragma unroll
  for (int first = 0; first < Warps::M; first += SLAB) {
    share.each(first, SLAB, Slab<PITCH, ROWS_FIRST>{slab});
    sync_warp();
#pragma unroll(RUN == 1 ? 4 : 2)  // reads under way at once; more cost registers
    for (int i = lane(); i < COUNT; i += 32) {
      const int near = i % (LONG / RUN) * RUN, turn = i / (LONG / RUN);
      const int far = APART == 1 ? turn
                                 : turn / 2 / APART * 2 * APART + turn / 2 % APART +
                                       turn % 2 * APART;
      const int row = m0 + m + first + (ROWS_FIRST ? near : far);
      const int column = n0 + n + (ROWS_FIRST ? far : near);
      float y[RUN];
      load<RUN>(slab + far * PITCH + near, y);
      if constexpr (ROWS_FIRST)
        store.template put<Shape::N, Shape::M>(batch, column, row, y);
      else
        store.template put<Shape::M, Shape::N>(batch, row, column, y);
    }
    sync_warp();
  }
}

}  // namespace gtco
