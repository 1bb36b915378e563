// Outputs of images that are found one position at a time: resizing and sampling. A thread takes a
// position and REPEAT of its vectors of channels, so that what depends on the position alone is
// computed once; neighbouring threads take neighbouring channels (LAST), or columns of a channel.
//
//   element(n, row, column, c)  finds, computes and stores the c-th vector of channels there
#pragma once
#include "gtco/math.cuh"

namespace gtco {

template <int IMAGES, int HIGH, int WIDE, int VECTORS, int REPEAT, bool LAST, class Element>
__device__ __forceinline__ void each_point(int thread, const Element& element) {
  static_assert(VECTORS % REPEAT == 0, "each thread has as many vectors");
  constexpr int ACROSS = VECTORS / REPEAT;
  int rest = thread, c = 0;
  if (rest >= IMAGES * HIGH * WIDE * ACROSS) return;
  if (LAST) {
    c = rest % ACROSS;
    rest /= ACROSS;
  }
  const int column = rest % WIDE;
  rest /= WIDE;
  const int row = rest % HIGH;
  rest /= HIGH;
  if (!LAST) {
    c = rest % ACROSS;
    rest /= ACROSS;
  }
#pragma unroll
  for (int k = 0; k < REPEAT; ++k) element(rest, row, column, c + k * ACROSS);
}

}  // namespace gtco
