// The softmax of rows that come block by block of keys (online softmax): what attention on Tensor
// Cores and on CUDA cores share. A row's keys are spread over LANES neighbouring lanes.
#pragma once
#include "gtco/device.cuh"

namespace gtco {

// 2^x as the special function unit has it: within 2 units in the last place, 0 below 2^-126.
__device__ __forceinline__ float power_of_two(float x) {
#ifdef GTCO_EMULATE
  return exp2f(x);
#else
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}

// -inf: less than any score.
__device__ __forceinline__ float no_key() {
#ifdef GTCO_EMULATE
  return -__builtin_huge_valf();
#else
  return __uint_as_float(0xff800000u);
#endif
}

constexpr float LOG2E = 1.4426950408889634f;
// A weight is at most 2^REACH where sums stay relative to an older maximum: float16 holds it.
constexpr float REACH = 8.0f;

// Scores that are `scale` (positive) times the product and nothing else. They stay products until
// they are exponents, so that scale and shift cost one multiply-add a score.
struct Scaled {
  float scale;
  __device__ __forceinline__ float operator()(int, int, int, float product) const {
    return product;
  }
  // exp(scale * (score - top))
  __device__ __forceinline__ float weight(float score, float top) const {
    float factor = scale * LOG2E;
    return power_of_two(fmaf(score, factor, -(top * factor)));
  }
  // How much greater than `top` a score of weight 2^REACH is.
  __device__ __forceinline__ float reach() const { return REACH / (scale * LOG2E); }
};

// Scores that `score(batch, query, key, product)` makes, a mask or bias in them: the difference is
// taken first, since log2(e) times a finite mask may be infinite.
template <class F>
struct Scored {
  F score;
  __device__ __forceinline__ float operator()(int b, int m, int n, float product) const {
    return score(b, m, n, product);
  }
  __device__ __forceinline__ float weight(float score, float top) const {
    return power_of_two((score - top) * LOG2E);
  }
  __device__ __forceinline__ float reach() const { return REACH / LOG2E; }
};
template <class F>
__device__ __forceinline__ Scored<F> scored(F score) {
  return Scored<F>{score};
}

// What weights are relative to: the row's maximum so far, and 0 while no key is seen, so that the
// weight of -inf is 0 and not NaN.
__device__ __forceinline__ float shift_of(float top) { return top == no_key() ? 0.0f : top; }

// A weight or factor, which is never negative, and where it is GUARDED 0 in the place of NaN.
template <bool GUARDED>
__device__ __forceinline__ float number(float weight) {
  return GUARDED ? fmaxf(weight, 0.0f) : weight;  // the greater of a NaN and a number is the number
}

template <int LANES>
__device__ __forceinline__ float lanes_max(float x) {
#pragma unroll
  for (int mask = 1; mask < LANES; mask *= 2) x = fmaxf(x, shuffle_xor(x, mask));
  return x;
}
template <int LANES>
__device__ __forceinline__ float lanes_sum(float x) {
#pragma unroll
  for (int mask = 1; mask < LANES; mask *= 2) x += shuffle_xor(x, mask);
  return x;
}

// The greatest of COUNT scores `at(i)` of each lane of a row and of `top`. It may lose a NaN.
template <int LANES, int COUNT, class At>
__device__ __forceinline__ float row_highest(At at, float top) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) top = fmaxf(top, at(i));
  return lanes_max<LANES>(top);
}

// COUNT scores `at(i)` of a row become weights relative to the row's maximum so far, `top`; `sum`
// is this lane's share of their sum. Gives the factor that what was summed before must take. A
// maximum may lose a NaN: its weight is NaN all the same, and so is the sum. Where they are GUARDED
// the sum alone keeps the NaN, so that what the weights multiply is lost only to a NaN of its own.
template <int LANES, int COUNT, bool GUARDED, class Score, class At>
__device__ __forceinline__ float weigh(const Score& score, At at, float& top, float& sum) {
  const float highest = row_highest<LANES, COUNT>(at, top);
  float shift = shift_of(highest);
  float factor = score.weight(top, shift);
  float here = 0.0f;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    const float weight = score.weight(at(i), shift);
    here += weight;
    at(i) = number<GUARDED>(weight);
  }
  top = highest;
  sum = fmaf(sum, factor, here);
  return number<GUARDED>(factor);
}

// A row's sum of weights times values, by the reciprocal of its sum of weights: a division a row and
// not one a value. A row without a key has sum 0, one with a NaN NaN: their results are NaN, or where
// they are GUARDED what weights of 0 make of the values: 0, or NaN of a NaN or infinity among them.
template <bool GUARDED>
__device__ __forceinline__ float normalized(float value, float sum, float reciprocal) {
  return value * (GUARDED && !(sum > 0.0f) ? 0.0f : reciprocal);
}

}  // namespace gtco
