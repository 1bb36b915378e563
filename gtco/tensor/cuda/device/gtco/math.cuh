// What printed expressions mean where C++ would mean something else, and a few functions that
// CUDA's own mathematics lacks.
#pragma once

#include "gtco/device.cuh"
#ifdef GTCO_EMULATE
#include <cstring>
#endif

namespace gtco {

// The second where either is NaN, as TIR has it: the constant comes first where NaN must stay.
template <class T>
__device__ __forceinline__ T min(T a, T b) {
  return a < b ? a : b;
}
template <class T>
__device__ __forceinline__ T max(T a, T b) {
  return a > b ? a : b;
}
#define GTCO_NARROW(T)                                                 \
  template <>                                                          \
  __device__ __forceinline__ T min<T>(T a, T b) {                      \
    return to_float(a) < to_float(b) ? a : b;                          \
  }                                                                    \
  template <>                                                          \
  __device__ __forceinline__ T max<T>(T a, T b) {                      \
    return to_float(a) > to_float(b) ? a : b;                          \
  }
GTCO_NARROW(half)
GTCO_NARROW(bf16)
#undef GTCO_NARROW

// Division rounded down, and what it leaves: of the divisor's sign.
template <class T>
__device__ __forceinline__ T floor_div(T a, T b) {
  const T whole = a / b;
  return (a % b != 0) && ((a < 0) != (b < 0)) ? whole - 1 : whole;
}
template <class T>
__device__ __forceinline__ T floor_mod(T a, T b) {
  const T rest = a % b;
  return rest != 0 && ((rest < 0) != (b < 0)) ? rest + b : rest;
}

// Horner's scheme, the highest power's coefficient first.
__device__ __forceinline__ float polynomial(float, float value) { return value; }
template <class... Rest>
__device__ __forceinline__ float polynomial(float x, float value, float next, Rest... rest) {
  return polynomial(x, fmaf(value, x, next), rest...);
}

// The bits of one type as another of its size.
template <class To, class From>
__device__ __forceinline__ To reinterpret(From from) {
  static_assert(sizeof(To) == sizeof(From), "bits are read as a type of the same size");
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

__device__ __forceinline__ uint32_t bits(float x) { return reinterpret<uint32_t>(x); }
__device__ __forceinline__ float from_bits(uint32_t x) { return reinterpret<float>(x); }

template <class T>
__device__ __forceinline__ T infinity();
template <>
__device__ __forceinline__ float infinity<float>() {
  return reinterpret<float>(uint32_t(0x7f800000u));
}
template <>
__device__ __forceinline__ double infinity<double>() {
  return reinterpret<double>(uint64_t(0x7ff0000000000000ull));
}
template <class T>
__device__ __forceinline__ T nan();
template <>
__device__ __forceinline__ float nan<float>() {
  return reinterpret<float>(uint32_t(0x7fc00000u));
}
template <>
__device__ __forceinline__ double nan<double>() {
  return reinterpret<double>(uint64_t(0x7ff8000000000000ull));
}

__device__ __forceinline__ double wide(double x) { return x; }
template <class T>
__device__ __forceinline__ float wide(T x) {
  return to_float(x);
}
template <class T>
__device__ __forceinline__ bool is_nan(T x) {
  return wide(x) != wide(x);
}
template <class T>
__device__ __forceinline__ bool is_inf(T x) {
  return wide(x) - wide(x) != 0 && !is_nan(x);
}
template <class T>
__device__ __forceinline__ bool is_finite(T x) {
  return wide(x) - wide(x) == 0;
}

// Towards zero. What does not fit has no meaning in C++ and depends on the machine: here it becomes
// what an x86 CPU makes of it, the least number of 32 or 64 bits and what narrower types keep of it.
template <class To, class From>
__device__ __forceinline__ To to_integer(From x) {
  if (sizeof(To) < 4 || (sizeof(To) == 4 && To(-1) < To(0))) {
    const bool fits = x > From(-2147483904.0) && x < From(2147483648.0);
    return static_cast<To>(fits ? static_cast<int>(x) : int(1u << 31));
  }
  if (sizeof(To) == 8 && To(-1) > To(0) && x >= From(9223372036854775808.0)) {
    return static_cast<To>(static_cast<uint64_t>(x));
  }
  const bool fits = x >= From(-9223372036854775808.0) && x < From(9223372036854775808.0);
  return static_cast<To>(fits ? static_cast<int64_t>(x) : int64_t(1ull << 63));
}

// A float32 that rounds to float16 as the float64 does: truncated, its last bit set where bits are
// lost (rounding to odd), so that the second rounding decides as if it saw them.
__device__ __forceinline__ float to_odd(double x) {
  const float near = static_cast<float>(x);
  const double back = static_cast<double>(near);
  if (back == x || x != x || near == infinity<float>() || near == -infinity<float>()) return near;
  const uint32_t bits = reinterpret<uint32_t>(near);
  const bool beyond = (back > x) == (x > 0);  // rounded away from zero: one step back
  return reinterpret<float>((beyond ? bits - 1 : bits) | 1u);
}

}  // namespace gtco
