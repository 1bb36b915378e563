// Fused attention on Tensor Cores (GTCO, Algorithm 3): out = softmax(q k^T + bias) v, scores in
// registers from the first product to the second.
//
//   for block of query rows, of columns of v, of heads:              // a thread block each
//     q -> shared memory -> fragments                                 // once
//     for step of keys:                                               // k and v STAGES - 1 ahead
//       scores[rows, keys] = q k^T                                    // mma, float32 sums
//       if rowmax so far - top would give weights above 2^REACH:      // shuffles among 4 lanes
//         out, sum *= exp(top - rowmax so far); top = rowmax so far
//       for 16 keys:                                                  // while others multiply
//         weights = exp(scores + bias - top), sum
//         out[rows, columns] += weights v                             // mma
//     the SPLIT shares of the keys are added up in shared memory; store(out / sum)
#pragma once
#include "gtco/attention_steps.cuh"
#include "gtco/softmax_rows.cuh"

namespace gtco {

// The SPLIT shares of a head's rows, added up: each warp has COUNT sums a lane in ROWS rows,
// `row_of(i)` and `out(i)`, and for each row its maximum and its sum, the same in all lanes of the
// row. `store(i, values)` gets RUN results from i on, neighbours in a row, of every SPLIT-th such
// run.
template <int RUN, class SHAPE, class BLOCK, int COUNT, int ROWS, class Score, class RowOf,
          class Out, class Store>
__device__ __forceinline__ void merged(unsigned char* shared,
                                       const AttentionPlace<SHAPE, BLOCK>& place,
                                       const Score& score, const float (&top)[ROWS],
                                       const float (&sum)[ROWS], RowOf row_of, Out out,
                                       Store store) {
  if constexpr (BLOCK::SPLIT == 1) {
    if (!place.busy()) return;
    float reciprocal[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) reciprocal[r] = 1.0f / sum[r];
#pragma unroll
    for (int i = 0; i < COUNT; i += RUN) {
      const int r = row_of(i);
      float y[RUN];
#pragma unroll
      for (int j = 0; j < RUN; ++j)
        y[j] = normalized<SHAPE::GUARDED>(out(i + j), sum[r], reciprocal[r]);
      store(i, y);
    }
  } else {
    constexpr int SHARE = (COUNT + 2 * ROWS) * 32;  // floats of a warp
    float* mine = reinterpret_cast<float*>(shared) + warp() * SHARE + lane();
    const float* first = mine - place.split * BLOCK::WARPS * SHARE;
    sync<BLOCK::THREADS>();  // the tiles that lay here are read
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      mine[r * 32] = top[r];
      mine[(ROWS + r) * 32] = sum[r];
    }
#pragma unroll
    for (int i = 0; i < COUNT; ++i) mine[(2 * ROWS + i) * 32] = out(i);
    sync<BLOCK::THREADS>();
    if (!place.busy()) return;
    float factor[ROWS][BLOCK::SPLIT], total[ROWS], reciprocal[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      float highest = no_key();
#pragma unroll
      for (int s = 0; s < BLOCK::SPLIT; ++s) {
        factor[r][s] = first[s * BLOCK::WARPS * SHARE + r * 32];
        highest = fmaxf(highest, factor[r][s]);
      }
      total[r] = 0.0f;
#pragma unroll
      for (int s = 0; s < BLOCK::SPLIT; ++s) {
        factor[r][s] = score.weight(factor[r][s], shift_of(highest));
        total[r] = fmaf(first[s * BLOCK::WARPS * SHARE + (ROWS + r) * 32], factor[r][s], total[r]);
        factor[r][s] = number<SHAPE::GUARDED>(factor[r][s]);
      }
      reciprocal[r] = 1.0f / total[r];
    }
#pragma unroll
    for (int i = 0; i < COUNT; i += RUN) {
      if (i / RUN % BLOCK::SPLIT != place.split) continue;
      const int r = row_of(i);
      float y[RUN];
#pragma unroll
      for (int j = 0; j < RUN; ++j) {
        const float* share = first + (2 * ROWS + i + j) * 32;
        float value = 0.0f;
#pragma unroll
        for (int s = 0; s < BLOCK::SPLIT; ++s)
          value = fmaf(share[s * BLOCK::WARPS * SHARE], factor[r][s], value);
        y[j] = normalized<SHAPE::GUARDED>(value, total[r], reciprocal[r]);
      }
      store(i, y);
    }
  }
}

// d += a b, 16 rows, 8 columns, depth 16; two halves of it on sm_75.
template <class T>
__device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1) {
  if constexpr (GTCO_ARCH >= 800) {
    const uint32_t b[2] = {b0, b1};
    mma_m16n8k16<T>(d, a, b);
  } else {
    const uint32_t low[2] = {a[0], a[1]}, high[2] = {a[2], a[3]}, first[1] = {b0}, second[1] = {b1};
    mma_m16n8k8<T>(d, low, first);
    mma_m16n8k8<T>(d, high, second);
  }
}

// q of (b, m, c), k and v of (b, n, c): read in one of the ways of tile.cuh, in pieces of 8; score:
// Scaled or scored(...); store of (b, m, c): in runs of 2, or one by one.
template <class T, class SHAPE, class BLOCK, class Q, class K, class V, class Score, class Store>
__device__ __forceinline__ void attention(int block, Q q, K k, V v, Score score, Store store) {
  constexpr int TILES = BLOCK::TILES, KEYS = BLOCK::KEYS, COLUMNS = BLOCK::COLUMNS;
  constexpr int DEPTHS = (SHAPE::DEPTH + 15) / 16;                  // steps of the first product
  constexpr int KEY_TILES = KEYS / 8, VALUE_TILES = COLUMNS / 8;    // columns of both, by eights
  constexpr bool TAIL = SHAPE::KEYS % BLOCK::STEP != 0;
  constexpr int UNROLLED = BLOCK::HELD ? DEPTHS : 4;  // addresses of many steps are registers too
  static_assert(KEYS % 16 == 0 && COLUMNS % 8 == 0, "what ldmatrix and mma take");
  using Tiles = AttentionTiles<T, SHAPE, BLOCK, 16 * DEPTHS, COLUMNS>;

  GTCO_SHARED(shared);
  Tiles tiles(block, shared);
  const AttentionPlace<SHAPE, BLOCK> place = tiles.place;
  const int id = lane(), column = place.column;
  const int row = place.my_row() + id / 4;  // this lane's first; the others 8 apart
  const int query_row = (place.head * BLOCK::WARPS + place.part) * 16 * TILES;
  const int key_row = (place.head * BLOCK::SPLIT + place.split) * KEYS;
  const bool busy = place.busy();

  // What a condition decides about is written ahead of it, here and below: walk of persistent.cuh.
  uint32_t held[BLOCK::HELD ? TILES : 1][BLOCK::HELD ? DEPTHS : 1][4] = {};
  float scores[TILES][KEY_TILES][4], out[TILES][VALUE_TILES][4];
  float top[2 * TILES], sum[2 * TILES];
#pragma unroll
  for (int t = 0; t < TILES; ++t) {
    top[2 * t] = top[2 * t + 1] = no_key();
    sum[2 * t] = sum[2 * t + 1] = 0.0f;
#pragma unroll
    for (int j = 0; j < VALUE_TILES; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) out[t][j][i] = 0.0f;
  }
  // Where a lane's rows of fragments lie. They are the same in each step, which must not compute them.
  const PairsOfPieces<typename Tiles::Query> query_at(id % 16, id / 16, query_row);
  const PairsOfPieces<typename Tiles::Key> key_at(id % 8 + id / 16 * 8, id / 8 % 2, key_row);
  const PairsOfPieces<typename Tiles::Value> value_at(id % 16, id / 16, key_row);
  auto query = [&](uint32_t(&a)[4], int t, int kk) {
    ldmatrix_x4(a, tiles.query + query_at(kk) + Tiles::Query::below(16 * t));
  };

  tiles.load_query(q);
  pipelined<SHAPE, BLOCK>(
      tiles,
      StepLoader<T, typename Tiles::Key, SHAPE, BLOCK, K>(k, place.batch, 0, SHAPE::DEPTH),
      StepLoader<T, typename Tiles::Value, SHAPE, BLOCK, V>(v, place.batch, column,
                                                            SHAPE::WIDTH - column),
      [&](int step) { return whole_warp(busy && place.my_key(step) < SHAPE::KEYS); },
      [&](int step, const T* keys, bool own) {
        const int first = place.my_key(step);
        if (BLOCK::HELD && step == 0) {
#pragma unroll
          for (int t = 0; t < TILES; ++t)
#pragma unroll
            for (int kk = 0; kk < DEPTHS; ++kk)
              if constexpr (BLOCK::HELD) query(held[t][kk], t, kk);
        }
#pragma unroll
        for (int t = 0; t < TILES; ++t)
#pragma unroll
          for (int j = 0; j < KEY_TILES; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) scores[t][j][i] = 0.0f;
        if (!own) return;
#pragma unroll UNROLLED
        for (int kk = 0; kk < DEPTHS; ++kk) {
          uint32_t a[TILES][4];
#pragma unroll
          for (int t = 0; t < TILES; ++t) {
            if constexpr (BLOCK::HELD) {
#pragma unroll
              for (int i = 0; i < 4; ++i) a[t][i] = held[t][kk][i];
            } else {
              query(a[t], t, kk);
            }
          }
          const T* at = keys + key_at(kk);
#pragma unroll
          for (int j = 0; j < KEY_TILES; j += 2) {
            uint32_t b[4];
            ldmatrix_x4(b, at + Tiles::Key::below(8 * j));
#pragma unroll
            for (int t = 0; t < TILES; ++t) {
              multiply<T>(scores[t][j], a[t], b[0], b[1]);
              multiply<T>(scores[t][j + 1], a[t], b[2], b[3]);
            }
          }
        }
#pragma unroll
        for (int t = 0; t < TILES; ++t)
#pragma unroll
          for (int j = 0; j < KEY_TILES; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              int m = row + 16 * t + 8 * (i / 2), n = first + 8 * j + id % 4 * 2 + i % 2;
              m = m < SHAPE::QUERIES ? m : SHAPE::QUERIES - 1;
              if (TAIL) n = n < SHAPE::KEYS ? n : SHAPE::KEYS - 1;
              scores[t][j][i] = score(place.my_batch(), m, n, scores[t][j][i]);
            }
        if (TAIL && whole_warp(first + KEYS > SHAPE::KEYS)) {
#pragma unroll
          for (int j = 0; j < KEY_TILES; ++j)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              const bool real = first + 8 * j + id % 4 * 2 + i < SHAPE::KEYS;
#pragma unroll
              for (int t = 0; t < TILES; ++t) {
                scores[t][j][i] = real ? scores[t][j][i] : no_key();
                scores[t][j][i + 2] = real ? scores[t][j][i + 2] : no_key();
              }
            }
        }
        float highest[2 * TILES];
        bool near = true;
#pragma unroll
        for (int r = 0; r < 2 * TILES; ++r) {
          highest[r] = row_highest<4, 2 * KEY_TILES>(
              [&](int i) { return scores[r / 2][i / 2][r % 2 * 2 + i % 2]; }, top[r]);
          near = near && highest[r] <= top[r] + score.reach();
        }
        if (in_all_lanes(near)) return;
#pragma unroll
        for (int r = 0; r < 2 * TILES; ++r) {
          float factor = score.weight(top[r], shift_of(highest[r]));
          top[r] = highest[r];
          sum[r] *= factor;
          factor = number<SHAPE::GUARDED>(factor);
#pragma unroll
          for (int j = 0; j < VALUE_TILES; ++j) {
            out[r / 2][j][r % 2 * 2] *= factor;
            out[r / 2][j][r % 2 * 2 + 1] *= factor;
          }
        }
      },
      [&](int, const T* values) {
        float shift[2 * TILES];
#pragma unroll
        for (int r = 0; r < 2 * TILES; ++r) shift[r] = shift_of(top[r]);
#pragma unroll
        for (int kk = 0; kk < KEYS / 16; ++kk) {  // the scores' fragments are those of an operand
          uint32_t a[TILES][4];
#pragma unroll
          for (int t = 0; t < TILES; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const float(&c)[4] = scores[t][2 * kk + i / 2];
              const int r = 2 * t + i % 2;
              const float low = score.weight(c[i % 2 * 2], shift[r]);
              const float high = score.weight(c[i % 2 * 2 + 1], shift[r]);
              sum[r] += low + high;
              a[t][i] = pack<T>(number<SHAPE::GUARDED>(low), number<SHAPE::GUARDED>(high));
            }
#pragma unroll
          for (int j = 0; j + 1 < VALUE_TILES; j += 2) {
            uint32_t b[4];
            ldmatrix_x4_trans(b, values + value_at(j / 2) + Tiles::Value::below(16 * kk));
#pragma unroll
            for (int t = 0; t < TILES; ++t) {
              multiply<T>(out[t][j], a[t], b[0], b[1]);
              multiply<T>(out[t][j + 1], a[t], b[2], b[3]);
            }
          }
          if constexpr (VALUE_TILES % 2 != 0) {
            uint32_t b[2];
            ldmatrix_x2_trans(b, values + Tiles::Value::at(key_row + id % 16, VALUE_TILES - 1) +
                                     Tiles::Value::below(16 * kk));
#pragma unroll
            for (int t = 0; t < TILES; ++t)
              multiply<T>(out[t][VALUE_TILES - 1], a[t], b[0], b[1]);
          }
        }
      });
#pragma unroll
  for (int r = 0; r < 2 * TILES; ++r) sum[r] = lanes_sum<4>(sum[r]);
  merged<2, SHAPE, BLOCK, TILES * VALUE_TILES * 4, 2 * TILES>(
      shared, place, score, top, sum, [](int i) { return i / (VALUE_TILES * 4) * 2 + i / 2 % 2; },
      [&](int i) { return out[i / (VALUE_TILES * 4)][i / 4 % VALUE_TILES][i % 4]; },
      [&](int i, const float(&y)[2]) {
        int m = row + i / (VALUE_TILES * 4) * 16 + i / 2 % 2 * 8;
        int c = column + i / 4 % VALUE_TILES * 8 + id % 4 * 2;
        if (m < SHAPE::QUERIES) store.put(place.my_batch(), m, c, SHAPE::WIDTH, y);
      });
}

}  // namespace gtco
