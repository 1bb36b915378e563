// Which part of a fused attention a block has, and how its keys and values come to shared memory
// step by step: what attention on Tensor Cores and on CUDA cores share.
#pragma once
#include "gtco/tile.cuh"

namespace gtco {

template <int BATCHES_, int QUERIES_, int KEYS_, int DEPTH_, int WIDTH_, bool GUARDED_ = false>
struct AttentionShape {
  static constexpr int BATCHES = BATCHES_, QUERIES = QUERIES_, KEYS = KEYS_;
  static constexpr int DEPTH = DEPTH_, WIDTH = WIDTH_;  // of q and k, of v
  static constexpr bool GUARDED = GUARDED_;
};

// A block's share: HEADS x WARPS x SPLIT warps, each with TILES times 16 query rows of a head and
// every SPLIT-th group of KEYS keys; COLUMNS columns of v. HELD: are q's fragments kept in
// registers, or read from shared memory again for each step?
template <int TILES_, int WARPS_, int SPLIT_, int HEADS_, int KEYS_, int COLUMNS_, int STAGES_,
          bool HELD_>
struct AttentionBlock {
  static constexpr int TILES = TILES_, WARPS = WARPS_, SPLIT = SPLIT_, HEADS = HEADS_;
  static constexpr int KEYS = KEYS_, COLUMNS = COLUMNS_, STAGES = STAGES_;
  static constexpr bool HELD = HELD_;
  static constexpr int THREADS = 32 * WARPS * SPLIT * HEADS;
  static constexpr int ROWS = 16 * TILES * WARPS;  // of a head
  static constexpr int STEP = KEYS * SPLIT;        // keys of a head
};

// Which part of the problem a block has, and a warp of it. Blocks of one head are neighbours.
template <class SHAPE, class BLOCK>
struct AttentionPlace {
  static constexpr int ROW_BLOCKS = (SHAPE::QUERIES + BLOCK::ROWS - 1) / BLOCK::ROWS;
  static constexpr int COLUMN_BLOCKS = (SHAPE::WIDTH + BLOCK::COLUMNS - 1) / BLOCK::COLUMNS;
  static constexpr int STEPS = (SHAPE::KEYS + BLOCK::STEP - 1) / BLOCK::STEP;
  int row, column, batch;  // the block's first
  int part, split, head;   // the warp's
  __device__ __forceinline__ explicit AttentionPlace(int block) {
    const int w = warp();
    row = block % ROW_BLOCKS * BLOCK::ROWS;
    block /= ROW_BLOCKS;
    column = block % COLUMN_BLOCKS * BLOCK::COLUMNS;
    batch = block / COLUMN_BLOCKS * BLOCK::HEADS;
    part = w % BLOCK::WARPS;
    split = w / BLOCK::WARPS % BLOCK::SPLIT;
    head = w / (BLOCK::WARPS * BLOCK::SPLIT);
  }
  __device__ __forceinline__ int my_batch() const { return batch + head; }
  __device__ __forceinline__ int my_row() const { return row + part * 16 * BLOCK::TILES; }
  __device__ __forceinline__ int my_key(int step) const {
    return step * BLOCK::STEP + split * BLOCK::KEYS;
  }
  // Has the warp any row?
  __device__ __forceinline__ bool busy() const {
    return my_batch() < SHAPE::BATCHES && my_row() < SHAPE::QUERIES;
  }
};

// The tiles of q, k and v that a block has in shared memory, and how they are filled.
template <class T, class SHAPE, class BLOCK, int DEPTH, int COLUMNS>
struct AttentionTiles {
  using Query = Tile<T, BLOCK::HEADS * BLOCK::ROWS, DEPTH>;
  using Key = Tile<T, BLOCK::HEADS * BLOCK::STEP, DEPTH>;
  using Value = Tile<T, BLOCK::HEADS * BLOCK::STEP, COLUMNS>;
  static constexpr int STAGE = Key::ELEMENTS + Value::ELEMENTS;
  AttentionPlace<SHAPE, BLOCK> place;
  T *query, *stages;
  __device__ __forceinline__ AttentionTiles(int block, unsigned char* shared)
      : place(block), query(reinterpret_cast<T*>(shared)), stages(query + Query::ELEMENTS) {}
  __device__ __forceinline__ T* keys(int stage) { return stages + stage * STAGE; }
  __device__ __forceinline__ T* values(int stage) { return keys(stage) + Key::ELEMENTS; }

  template <class Read>
  __device__ __forceinline__ void load_query(const Read& read) {
    int batch = place.batch, first = place.row;
    constexpr int ROWS = BLOCK::ROWS;
    fill<Query, BLOCK::THREADS>(query, [=](int r, int c, T* where) {
      int b = batch + r / ROWS, m = first + r % ROWS;
      read.put(where, b < SHAPE::BATCHES && m < SHAPE::QUERIES, b, m, c, SHAPE::DEPTH);
    });
  }
};

// Brings a step's keys or values to their tile: `width` columns from `column` on.
template <class T, class TILE, class SHAPE, class BLOCK, class Read>
struct StepLoader {
  const Read& read;
  const int batch, column, width;
  __device__ __forceinline__ StepLoader(const Read& read, int batch, int column, int width)
      : read(read), batch(batch), column(column), width(width) {}
  __device__ __forceinline__ void operator()(int step, T* tile) const {
    constexpr int STEP = BLOCK::STEP;
    const int first = step * STEP, b0 = batch, c0 = column, columns = width;
    const Read& from = read;
    fill<TILE, BLOCK::THREADS>(tile, [=](int r, int c, T* where) {
      const int b = b0 + r / STEP, n = first + r % STEP;
      from.put(where, c < columns && b < SHAPE::BATCHES && n < SHAPE::KEYS, b, n, c0 + c,
               c0 + columns);
    });
  }
};

// Of rows that lie evenly, a thread copies the same piece of every ROWS-th: it knows their places
// from those of its first.
template <class T, class TILE, class SHAPE, class BLOCK, int ROW, class F>
struct StepLoader<T, TILE, SHAPE, BLOCK, EvenlyAddressed<ROW, F>> {
  using Read = EvenlyAddressed<ROW, F>;
  static constexpr int STEP = BLOCK::STEP, ROWS = BLOCK::THREADS / TILE::PIECES;
  static constexpr bool EVEN = BLOCK::HEADS == 1 && BLOCK::THREADS % TILE::PIECES == 0 &&
                               ROWS % 8 == 0 && ROWS <= STEP && STEP % ROWS == 0;
  static constexpr int COPIES = GTCO_ARCH >= 800 ? 16 : 4;  // under way at once: elsewhere registers
  const StepLoader<T, TILE, SHAPE, BLOCK, Addressed<F>> any;
  const T* first = nullptr;
  int row = 0, place = 0;
  bool valid = false;

  __device__ __forceinline__ StepLoader(const Read& read, int batch, int column, int width)
      : any(read, batch, column, width) {
    if constexpr (EVEN) {
      const int piece = int(threadIdx.x) % TILE::PIECES, c = piece * TILE::PIECE;
      row = int(threadIdx.x) / TILE::PIECES;
      place = kept(TILE::at(row, piece));
      valid = c < width;
      first = read.at(batch, 0, column + (valid ? c : 0)) + int64_t(row) * ROW;
    }
  }
  __device__ __forceinline__ void operator()(int step, T* tile) const {
    if constexpr (!EVEN) {
      any(step, tile);
    } else {
      const T* from = first + int64_t(step) * (int64_t(STEP) * ROW);
      T* where = tile + place;
      const int keys = SHAPE::KEYS - step * STEP;
      if (keys >= STEP) {
#pragma unroll COPIES
        for (int r = 0; r < STEP; r += ROWS)
          copy_16(where + TILE::below(r), from + int64_t(r) * ROW, valid);
      } else {
#pragma unroll COPIES
        for (int r = 0; r < STEP; r += ROWS)
          copy_16(where + TILE::below(r), from + int64_t(r) * ROW, valid && row + r < keys);
      }
    }
  }
};

// Waits for each step's keys and values, and has the next ones under way meanwhile. All threads call
// mine(step), the same in a whole warp: has the warp work in this step? Then scores(step, keys, true)
// and sums(step, values) are called, without a branch between them if nothing is awaited there. If
// something is, scores(step, keys, false) is called too: what sums reads is written on every way.
template <class SHAPE, class BLOCK, class Tiles, class LoadKeys, class LoadValues, class Mine,
          class Scores, class Sums>
__device__ __forceinline__ void pipelined(Tiles& tiles, LoadKeys load_keys, LoadValues load_values,
                                          Mine mine, Scores scores, Sums sums) {
  constexpr int STEPS = AttentionPlace<SHAPE, BLOCK>::STEPS, STAGES = BLOCK::STAGES;
  if constexpr (STAGES == 1) {  // keys are loaded during the sums, values during the scores
    load_keys(0, tiles.keys(0));
    copy_commit();
    load_values(0, tiles.values(0));
    copy_commit();
    for (int step = 0; step < STEPS; ++step) {
      const bool own = mine(step);
      copy_wait<1>();
      sync<BLOCK::THREADS>();
      scores(step, tiles.keys(0), own);
      copy_wait<0>();
      sync<BLOCK::THREADS>();
      if (step + 1 < STEPS) load_keys(step + 1, tiles.keys(0));
      copy_commit();
      if (own) sums(step, tiles.values(0));
      if (step + 1 < STEPS) {
        sync<BLOCK::THREADS>();
        load_values(step + 1, tiles.values(0));
      }
      copy_commit();
    }
  } else {
#pragma unroll
    for (int step = 0; step < STAGES - 1; ++step) {
      if (step < STEPS) {
        load_keys(step, tiles.keys(step));
        load_values(step, tiles.values(step));
      }
      copy_commit();
    }
    int stage = 0, free = STAGES - 1;
    for (int step = 0; step < STEPS; ++step) {
      copy_wait<STAGES - 2>();
      sync<BLOCK::THREADS>();  // this step's tiles are there, and all are done with the one before
      if (step + STAGES - 1 < STEPS) {
        load_keys(step + STAGES - 1, tiles.keys(free));
        load_values(step + STAGES - 1, tiles.values(free));
      }
      copy_commit();
      if (mine(step)) {
        scores(step, tiles.keys(stage), true);
        sums(step, tiles.values(stage));
      }
      stage = stage + 1 == STAGES ? 0 : stage + 1;
      free = free + 1 == STAGES ? 0 : free + 1;
    }
  }
}

}  // namespace gtco
