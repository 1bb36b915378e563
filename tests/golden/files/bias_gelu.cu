#include "gtco/math.cuh"
#include "gtco/elementwise.cuh"

// add+gelu+cast -> float16[197x3072]: 4 neighbours a thread
extern "C" __global__ void __launch_bounds__(256) gtco_bias_gelu(
    const float* __restrict__ in0,
    const float* __restrict__ in1,
    half* __restrict__ out) {
  const int block = blockIdx.x;
  gtco::after_previous();
  const int thread = block * 256 + threadIdx.x;
  const int row = thread / 768, group = thread % 768;
  const auto x0 = gtco::read_group<4, 4>(in0 + row * 3072 + group * 4);
  const auto x1 = gtco::read_group<4, 4>(in1 + group * 4);
  gtco::Group<half, 4> y;
#pragma unroll
  for (int v = 0; v < 4; ++v) {
    const float x = x0[v] + x1[v];
    const float v2 = gtco::min(25.0f, x * x) * 0.08f + -1.0f;
    const float gelu = x * gtco::min(1.0f, gtco::max(0.0f, x * gtco::polynomial(v2, 0.000608728f,
        -0.0016132655f, 0.0017227976f, -0.0026855743f, 0.006410512f, -0.01116434f, 0.016402174f,
        -0.023268653f, 0.031442173f, -0.04044261f, 0.051520523f, -0.07029628f,
        0.14136378f) + 0.5f));
    y[v] = gtco::from_float<half>(gelu);
  }
  gtco::write_group<4>(out + row * 3072 + group * 4, y);
}
