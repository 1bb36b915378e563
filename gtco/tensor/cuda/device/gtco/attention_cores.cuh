// Fused attention on CUDA cores: what attention.cuh does, with the same decisions, for operands
// that Tensor Cores do not take in full (float32; bfloat16 on sm_75). All tiles are float32.
//
// A warp's 16 x TILES rows are dealt to 4 groups of 8 lanes: a lane sums up the rows group + 4 i,
// of the scores the keys lane + 8 j, and of the result pieces of 4 columns, 32 apart.
#pragma once
#include "gtco/attention.cuh"

namespace gtco {

__device__ __forceinline__ float4 piece(const float* where) {
  return *reinterpret_cast<const float4*>(where);
}

// T: the operands' format; weights are rounded to it as they are multiplied with v. KEYS of BLOCK
// is a multiple of 8, COLUMNS of 4; operands are read in pieces of 4, results stored in runs of 4.
template <class T, class SHAPE, class BLOCK, class Q, class K, class V, class Score, class Store>
__device__ __forceinline__ void attention_cores(int block, Q q, K k, V v, Score score,
                                                Store store) {
  constexpr int ROWS = 4 * BLOCK::TILES, KEYS = BLOCK::KEYS / 8;  // of a lane
  constexpr int PIECES = (BLOCK::COLUMNS + 31) / 32;
  constexpr int DEPTH = (SHAPE::DEPTH + 3) / 4 * 4, COLUMNS = 32 * PIECES;
  constexpr int STRIDE = BLOCK::KEYS % 16 ? BLOCK::KEYS : BLOCK::KEYS + 8;  // 4 rows of 8 weights: 32 banks
  constexpr bool TAIL = SHAPE::KEYS % BLOCK::STEP != 0;
  using Tiles = AttentionTiles<float, SHAPE, BLOCK, DEPTH, COLUMNS>;

  GTCO_SHARED(shared);
  Tiles tiles(block, shared);
  const AttentionPlace<SHAPE, BLOCK> place = tiles.place;
  const int column = place.column, group = lane() / 8, id = lane() % 8;
  const int row = place.my_row() + group;
  const int query_row = (place.head * BLOCK::WARPS + place.part) * 16 * BLOCK::TILES + group;
  const int key_row = (place.head * BLOCK::SPLIT + place.split) * BLOCK::KEYS;
  const bool busy = place.busy();
  float* weights = tiles.stages + BLOCK::STAGES * Tiles::STAGE + warp() * 16 * BLOCK::TILES * STRIDE;

  float scores[ROWS][KEYS], out[ROWS][4 * PIECES], top[ROWS], sum[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    top[r] = no_key();
    sum[r] = 0.0f;
#pragma unroll
    for (int i = 0; i < 4 * PIECES; ++i) out[r][i] = 0.0f;
  }

  const int left = SHAPE::WIDTH - column;
  tiles.load_query(q);
  pipelined<SHAPE, BLOCK>(
      tiles,
      StepLoader<float, typename Tiles::Key, SHAPE, BLOCK, K>(k, place.batch, 0, SHAPE::DEPTH),
      StepLoader<float, typename Tiles::Value, SHAPE, BLOCK, V>(
          v, place.batch, column, left < BLOCK::COLUMNS ? left : BLOCK::COLUMNS),
      [&](int step) { return whole_warp(busy && place.my_key(step) < SHAPE::KEYS); },
      [&](int step, const float* keys, bool own) {
        const int first = place.my_key(step);
        if (!own) return;
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
          for (int j = 0; j < KEYS; ++j) scores[r][j] = 0.0f;
#pragma unroll 1
        for (int c = 0; c < DEPTH / 4; ++c) {
          float4 b[KEYS];
#pragma unroll
          for (int j = 0; j < KEYS; ++j)
            b[j] = piece(keys + Tiles::Key::at(key_row + 8 * j + id, c));
#pragma unroll
          for (int r = 0; r < ROWS; ++r) {
            const float4 a = piece(tiles.query + Tiles::Query::at(query_row + 4 * r, c));
#pragma unroll
            for (int j = 0; j < KEYS; ++j) {
              scores[r][j] = fmaf(a.x, b[j].x, scores[r][j]);
              scores[r][j] = fmaf(a.y, b[j].y, scores[r][j]);
              scores[r][j] = fmaf(a.z, b[j].z, scores[r][j]);
              scores[r][j] = fmaf(a.w, b[j].w, scores[r][j]);
            }
          }
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
          int m = row + 4 * r;
          m = m < SHAPE::QUERIES ? m : SHAPE::QUERIES - 1;
#pragma unroll
          for (int j = 0; j < KEYS; ++j) {
            const int n = first + 8 * j + id;
            const bool real = !TAIL || n < SHAPE::KEYS;
            const float x =
                score(place.my_batch(), m, real ? n : SHAPE::KEYS - 1, scores[r][j]);
            scores[r][j] = real ? x : no_key();
          }
          const float factor = weigh<8, KEYS, SHAPE::GUARDED>(
              score, [&](int j) -> float& { return scores[r][j]; }, top[r], sum[r]);
#pragma unroll
          for (int i = 0; i < 4 * PIECES; ++i) out[r][i] *= factor;
#pragma unroll
          for (int j = 0; j < KEYS; ++j)
            weights[(group + 4 * r) * STRIDE + 8 * j + id] =
                to_float(from_float<T>(scores[r][j]));
        }
        sync_warp();
      },
      [&](int, const float* values) {
#pragma unroll 1
        for (int n = 0; n < BLOCK::KEYS; n += 4) {
          float a[ROWS][4];
#pragma unroll
          for (int r = 0; r < ROWS; ++r) {
            const float4 x = piece(weights + (group + 4 * r) * STRIDE + n);
            a[r][0] = x.x, a[r][1] = x.y, a[r][2] = x.z, a[r][3] = x.w;
          }
#pragma unroll
          for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int p = 0; p < PIECES; ++p) {
              const float4 b = piece(values + Tiles::Value::at(key_row + n + i, 8 * p + id));
#pragma unroll
              for (int r = 0; r < ROWS; ++r) {
                out[r][4 * p] = fmaf(a[r][i], b.x, out[r][4 * p]);
                out[r][4 * p + 1] = fmaf(a[r][i], b.y, out[r][4 * p + 1]);
                out[r][4 * p + 2] = fmaf(a[r][i], b.z, out[r][4 * p + 2]);
                out[r][4 * p + 3] = fmaf(a[r][i], b.w, out[r][4 * p + 3]);
              }
            }
        }
        sync_warp();  // the weights are read before those of the next step are written
      });
#pragma unroll
  for (int r = 0; r < ROWS; ++r) sum[r] = lanes_sum<8>(sum[r]);
  merged<4, SHAPE, BLOCK, ROWS * 4 * PIECES, ROWS>(
      shared, place, score, top, sum, [](int i) { return i / (4 * PIECES); },
      [&](int i) { return out[i / (4 * PIECES)][i % (4 * PIECES)]; },
      [&](int i, const float(&y)[4]) {
        const int m = row + i / (4 * PIECES) * 4, c = i / 4 % PIECES * 32 + id * 4;
        if (m < SHAPE::QUERIES && c < BLOCK::COLUMNS)
          store.put(place.my_batch(), m, column + c, SHAPE::WIDTH, y);
      });
}

}  // namespace gtco
