// Windows that slide over images: pooling, and convolution whose channels do not mix or in narrow
// groups alone. A thread makes STRIP outputs below one another, of VECTOR neighbouring channels:
//
//   for each column of taps, for each input row that the strip's windows cover:
//     x = value(...)                               // read once for all outputs that it is a tap of
//     for each of them: total = total + x * weight // or the larger one
//   store(...)
//
// Neighbouring threads take neighbouring channels (LAST), or neighbouring columns of a channel.
// A stage gives what it reads and stores:
//
//   value(n, row, column, c, i, x)  the input that the c-th vector of output channels sees as the
//                                   i-th of their group, float (&x)[VECTOR]
//   weight(kh, kw, c, i, w)         their factors
//   store(n, row, column, c, total) the epilogue and the stores
#pragma once
#include "gtco/reduce.cuh"

namespace gtco {

template <int HIGH, int WIDE>
struct Size {
  static constexpr int H = HIGH, W = WIDE;
};

// Kernel, strides, dilation, padding before and behind, sizes of the images and of what is made.
template <class Kernel_, class Strides_, class Dilation_, class Before_, class Behind_,
          class Image_, class Output_>
struct Sliding {
  using Kernel = Kernel_;
  using Strides = Strides_;
  using Dilation = Dilation_;
  using Before = Before_;
  using Behind = Behind_;
  using Image = Image_;
  using Output = Output_;
};

template <class S, int IMAGES_, int CHANNELS_, int STRIP_, int VECTOR_, bool LAST_>
struct Window : S {
  static constexpr int IMAGES = IMAGES_;
  static constexpr int CHANNELS = CHANNELS_;  // of the output
  static constexpr int STRIP = STRIP_;
  static constexpr int VECTOR = VECTOR_;
  static constexpr bool LAST = LAST_;
  static constexpr int STRIPS = (S::Output::H + STRIP - 1) / STRIP;
  static constexpr int VECTORS = CHANNELS / VECTOR;
  static constexpr int THREADS = IMAGES * STRIPS * S::Output::W * VECTORS;  // of all blocks
  // Input rows of a strip, from its first window's first tap on.
  static constexpr int ROWS =
      (STRIP - 1) * S::Strides::H + (S::Kernel::H - 1) * S::Dilation::H + 1;
  static constexpr int UNROLLED = ROWS <= 32 ? ROWS : 1;
  static_assert(CHANNELS % VECTOR == 0, "vectors end where channels do");
};

// What a thread makes: outputs (n, y + [0, STRIP), x), of the c-th vector of channels.
template <class G>
struct Strip {
  int n, y, x, c;
  bool mine;

  __device__ __forceinline__ explicit Strip(int thread) {
    int rest = thread;
    mine = rest < G::THREADS;
    if (G::LAST) {
      c = rest % G::VECTORS;
      rest /= G::VECTORS;
    }
    x = rest % G::Output::W;
    rest /= G::Output::W;
    y = rest % G::STRIPS * G::STRIP;
    rest /= G::STRIPS;
    if (!G::LAST) {
      c = rest % G::VECTORS;
      rest /= G::VECTORS;
    }
    n = rest;
  }

  // f(t, kh, row, x) for every tap of a column of taps: x read at an input row that exists, for the
  // strip's output t.
  template <class Value, class F>
  __device__ __forceinline__ void taps(const Value& value, int column, int i, F f) const {
    const int top = y * G::Strides::H - G::Before::H;
#pragma unroll G::UNROLLED
    for (int p = 0; p < G::ROWS; ++p) {
      bool read = false;
#pragma unroll
      for (int t = 0; t < G::STRIP; ++t) read = read || tap(p, t) >= 0;
      const int row = top + p;
      if (!read || row < 0 || row >= G::Image::H) continue;
      float in[G::VECTOR];
      value(n, row, column, c, i, in);
#pragma unroll
      for (int t = 0; t < G::STRIP; ++t) {
        const int kh = tap(p, t);
        if (kh >= 0) f(t, kh, in);
      }
    }
  }

  // The kh that the strip's p-th input row is of output t, -1 where it is none.
  static __device__ __forceinline__ int tap(int p, int t) {
    const int distance = p - t * G::Strides::H;
    const bool is = distance >= 0 && distance % G::Dilation::H == 0 &&
                    distance / G::Dilation::H < G::Kernel::H;
    return is ? distance / G::Dilation::H : -1;
  }

  template <class F>
  __device__ __forceinline__ void columns(F f) const {
#pragma unroll(G::Kernel::W <= 7 ? G::Kernel::W : 1)
    for (int kw = 0; kw < G::Kernel::W; ++kw) {
      const int column = x * G::Strides::W - G::Before::W + kw * G::Dilation::W;
      if (column >= 0 && column < G::Image::W) f(kw, column);
    }
  }

  template <class Store>
  __device__ __forceinline__ void finish(const Store& store,
                                         float (&total)[G::STRIP][G::VECTOR]) const {
#pragma unroll
    for (int t = 0; t < G::STRIP; ++t) {
      if (y + t < G::Output::H) store(n, y + t, x, c, total[t]);
    }
  }
};

template <class G, class Op>
__device__ __forceinline__ void start(float (&total)[G::STRIP][G::VECTOR]) {
#pragma unroll
  for (int t = 0; t < G::STRIP; ++t)
#pragma unroll
    for (int v = 0; v < G::VECTOR; ++v) total[t][v] = Op::start();
}

// Sums of products over the windows; INPUTS channels of a group.
template <class G, int INPUTS, class Value, class Weight, class Store>
__device__ __forceinline__ void convolve(int thread, const Value& value, const Weight& weight,
                                         const Store& store) {
  const Strip<G> strip(thread);
  if (!strip.mine) return;
  float total[G::STRIP][G::VECTOR];
  start<G, Sum>(total);
#pragma unroll 1
  for (int i = 0; i < INPUTS; ++i) {
    strip.columns([&](int kw, int column) {
      float w[G::Kernel::H][G::VECTOR];
#pragma unroll
      for (int kh = 0; kh < G::Kernel::H; ++kh) weight(kh, kw, strip.c, i, w[kh]);
      strip.taps(value, column, i, [&](int t, int kh, const float(&x)[G::VECTOR]) {
#pragma unroll
        for (int v = 0; v < G::VECTOR; ++v) total[t][v] += x[v] * w[kh][v];
      });
    });
  }
  strip.finish(store, total);
}

// The largest element; padding never wins, NaN does.
template <class G, class Value, class Store>
__device__ __forceinline__ void max_pool(int thread, const Value& value, const Store& store) {
  const Strip<G> strip(thread);
  if (!strip.mine) return;
  float total[G::STRIP][G::VECTOR];
  start<G, Largest>(total);
  strip.columns([&](int, int column) {
    strip.taps(value, column, 0, [&](int t, int, const float(&x)[G::VECTOR]) {
#pragma unroll
      for (int v = 0; v < G::VECTOR; ++v) total[t][v] = Largest::of(total[t][v], x[v]);
    });
  });
  strip.finish(store, total);
}

// How many positions of a window count in a mean: those of the image and, if PADDING, of its
// padding, but never what ceil mode adds beyond it.
template <bool PADDING>
__device__ __forceinline__ int counted(int first, int kernel, int size, int before, int behind) {
  const int low = PADDING ? -before : 0, high = size + (PADDING ? behind : 0);
  const int begin = first > low ? first : low;
  const int end = first + kernel < high ? first + kernel : high;
  return end - begin;
}

template <class G, bool PADDING, class Value, class Store>
__device__ __forceinline__ void mean_pool(int thread, const Value& value, const Store& store) {
  const Strip<G> strip(thread);
  if (!strip.mine) return;
  float total[G::STRIP][G::VECTOR];
  start<G, Sum>(total);
  strip.columns([&](int, int column) {
    strip.taps(value, column, 0, [&](int t, int, const float(&x)[G::VECTOR]) {
#pragma unroll
      for (int v = 0; v < G::VECTOR; ++v) total[t][v] += x[v];
    });
  });
  const int wide = counted<PADDING>(strip.x * G::Strides::W - G::Before::W, G::Kernel::W,
                                    G::Image::W, G::Before::W, G::Behind::W);
#pragma unroll
  for (int t = 0; t < G::STRIP; ++t) {
    const int high = counted<PADDING>((strip.y + t) * G::Strides::H - G::Before::H, G::Kernel::H,
                                      G::Image::H, G::Before::H, G::Behind::H);
    const float share = 1.0f / static_cast<float>(high * wide);
#pragma unroll
    for (int v = 0; v < G::VECTOR; ++v) total[t][v] *= share;
  }
  strip.finish(store, total);
}

}  // namespace gtco
