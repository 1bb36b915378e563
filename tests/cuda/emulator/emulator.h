// The language of CUDA kernels on the CPU, as far as gtco's kernels use it: keywords, positions,
// vector types and mathematics. device.cuh includes it in place of the things that NVRTC has built
// in.
#pragma once

#define _GLIBCXX_INCLUDE_NEXT_C_HEADERS  // C's, which take a tenth of a second less to read
#include <math.h>
#undef _GLIBCXX_INCLUDE_NEXT_C_HEADERS
#include <stdint.h>
#include <cstring>

#ifndef GTCO_ARCH
#error "GTCO_ARCH says which architecture is emulated: 750, 800, 890, 900"
#endif

#define __global__ __attribute__((visibility("default")))
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __grid_constant__
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)

struct uint3 {
  unsigned x, y, z;
};
typedef uint3 dim3;

// One access each, as on a GPU: the compiler would copy member by member otherwise.
#define GTCO_VECTOR(name, type, whole, bytes, ...)                              \
  struct alignas(bytes) name {                                                  \
    type __VA_ARGS__;                                                           \
    name() = default;                                                           \
    name(const name& o) { *reinterpret_cast<whole*>(this) = o.all(); }          \
    name& operator=(const name& o) {                                            \
      *reinterpret_cast<whole*>(this) = o.all();                                \
      return *this;                                                             \
    }                                                                           \
    whole all() const { return *reinterpret_cast<const whole*>(this); }         \
  };
typedef long long gtco_16_bytes __attribute__((vector_size(16), may_alias));
typedef long long gtco_8_bytes __attribute__((may_alias));
#define GTCO_VECTORS(type, stem)                                                        \
  GTCO_VECTOR(stem##2, type, gtco_8_bytes, 8, x, y)                                     \
  GTCO_VECTOR(stem##4, type, gtco_16_bytes, 16, x, y, z, w)                             \
  inline stem##2 make_##stem##2(type x, type y) {                                       \
    stem##2 v;                                                                          \
    v.x = x, v.y = y;                                                                   \
    return v;                                                                           \
  }                                                                                     \
  inline stem##4 make_##stem##4(type x, type y, type z, type w) {                       \
    stem##4 v;                                                                          \
    v.x = x, v.y = y, v.z = z, v.w = w;                                                 \
    return v;                                                                           \
  }
GTCO_VECTORS(float, float)
GTCO_VECTORS(unsigned, uint)
GTCO_VECTORS(int, int)
#undef GTCO_VECTORS
#undef GTCO_VECTOR

namespace gtco_emulator {
struct Position {
  uint3 thread, block, grid, threads;
};
extern Position position;  // of the thread that runs
}  // namespace gtco_emulator

#define threadIdx (gtco_emulator::position.thread)
#define blockIdx (gtco_emulator::position.block)
#define gridDim (gtco_emulator::position.grid)
#define blockDim (gtco_emulator::position.threads)

inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
#define GTCO_OF_FLOAT(name) \
  inline float name(float x) { return name##f(x); }
GTCO_OF_FLOAT(sqrt)
GTCO_OF_FLOAT(exp)
GTCO_OF_FLOAT(exp2)
GTCO_OF_FLOAT(log)
GTCO_OF_FLOAT(log2)
GTCO_OF_FLOAT(erf)
GTCO_OF_FLOAT(tanh)
GTCO_OF_FLOAT(fabs)
GTCO_OF_FLOAT(floor)
GTCO_OF_FLOAT(ceil)
#undef GTCO_OF_FLOAT
extern "C" int abs(int);
inline float abs(float x) { return fabsf(x); }
inline double abs(double x) { return fabs(x); }
inline unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
inline int __float_as_int(float x) { return __builtin_bit_cast(int, x); }
inline float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
inline float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
#define GTCO_LEAST_AND_MOST(type)                            \
  inline type min(type a, type b) { return b < a ? b : a; }  \
  inline type max(type a, type b) { return a < b ? b : a; }
GTCO_LEAST_AND_MOST(int)
GTCO_LEAST_AND_MOST(unsigned)
GTCO_LEAST_AND_MOST(long)
GTCO_LEAST_AND_MOST(unsigned long)
#undef GTCO_LEAST_AND_MOST
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
