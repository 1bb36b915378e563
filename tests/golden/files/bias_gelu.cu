#include "gtco/math.cuh"
#include "gtco/elementwise.cuh"

// add+gelu+cast -> float16[197x3072]: 4 neighbours a thread
extern "C" __global__ void __launch_bounds__(256) gtco_bias_gelu(
    const float* GTCO_RESTRICT in0,
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
    const float v2 = gtco::min(16.0f, x * x) * 0.125f + -1.0f;
    const float gelu = x * gtco::min(1.0f, gtco::max(0.0f, x * gtco::polynomial(v2, -0.0033151472f,
        0.008699793f, -0.012560302f, 0.02108503f, -0.036711443f, 0.056189403f, -0.08434347f,
        0.17594291f) + 0.5f));
    y[v] = gtco::from_float<half>(gelu);
  }
  gtco::write_group<4>(out + row * 3072 + group * 4, y);
}
