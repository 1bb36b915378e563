// The primitives of device.cuh on the CPU. Operations of a single thread are done here. Collectives
// and copies are calls into the machine (collectives.cpp), which sees which threads take part.
#pragma once

namespace gtco_emulator {

enum Collective : int {
  BARRIER,
  WARP_BARRIER,
  SHUFFLE,
  SHUFFLE_XOR,
  SHUFFLE_DOWN,
  LDMATRIX,
  LDMATRIX_TRANS,
  MMA_HALF_16,
  MMA_BF16_16,
  MMA_HALF_8,
  GRID_BARRIER,
  WGMMA_HALF,
  WGMMA_BF16,
  WGMMA_FENCE,
  WGMMA_COMMIT,
  WGMMA_WAIT,
  MBARRIER_WAIT,
  SETMAXNREG,
};

unsigned char* shared_memory();
void barrier(int which, int threads);
void barrier_of_first(int threads);
void warp_barrier();
uint64_t shuffle(Collective kind, uint64_t bits, int operand);
void ldmatrix(Collective kind, uint32_t* into, int matrices, const void* row);
void mma(Collective kind, float* d, const uint32_t* a, const uint32_t* b);
void copy(void* shared, const void* global, int bytes, bool valid);
void copy_commit();
void copy_wait(int groups);
void atomic_add(float* where, float value);
uint32_t grid_arrive(const void* word);
void grid_wait(const void* word, uint32_t ticket);
uint32_t take_ticket(uint32_t* word, uint32_t count);
void prefetch(const void* global);

}  // namespace gtco_emulator

#define GTCO_SHARED(name) unsigned char* const name = gtco_emulator::shared_memory() + GTCO_RESERVED

namespace gtco {

__forceinline__ void after_previous() {}  // kernels run one after the other here

__forceinline__ float to_float(float x) { return x; }
__forceinline__ float to_float(half x) {
  return static_cast<float>(__builtin_bit_cast(_Float16, x.bits));
}
__forceinline__ float to_float(bf16 x) {
  return __uint_as_float(static_cast<uint32_t>(x.bits) << 16);
}

template <class T>
T from_float(float x);
template <>
__forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__forceinline__ half from_float<half>(float x) {
  if (x != x) return half{0x7fff};
  return half{__builtin_bit_cast(uint16_t, static_cast<_Float16>(x))};
}
template <>
__forceinline__ bf16 from_float<bf16>(float x) {
  if (x != x) return bf16{0x7fff};
  const uint32_t u = __float_as_uint(x);
  return bf16{static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
}
template <class T>
__forceinline__ uint32_t pack(float low, float high) {
  return from_float<T>(low).bits | static_cast<uint32_t>(from_float<T>(high).bits) << 16;
}

template <int THREADS>
__forceinline__ void sync() {
  gtco_emulator::barrier(1, THREADS);
}
__forceinline__ void sync_warp() { gtco_emulator::warp_barrier(); }
__forceinline__ int lane() { return static_cast<int>(threadIdx.x & 31u); }
__forceinline__ int warp() { return static_cast<int>(threadIdx.x >> 5); }

template <class T>
__forceinline__ T shuffled(gtco_emulator::Collective kind, T value, int operand) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "32 or 64 bits, as __shfl_sync takes");
  uint64_t bits = 0;
  __builtin_memcpy(&bits, &value, sizeof(T));
  bits = gtco_emulator::shuffle(kind, bits, operand);
  __builtin_memcpy(&value, &bits, sizeof(T));
  return value;
}
template <class T>
__forceinline__ T shuffle(T value, int lane) {
  return shuffled(gtco_emulator::SHUFFLE, value, lane);
}
template <class T>
__forceinline__ T shuffle_xor(T value, int mask) {
  return shuffled(gtco_emulator::SHUFFLE_XOR, value, mask);
}
template <class T>
__forceinline__ T shuffle_down(T value, int by) {
  return shuffled(gtco_emulator::SHUFFLE_DOWN, value, by);
}
__forceinline__ bool whole_warp(bool condition) { return shuffle(int(condition), 0) != 0; }
__forceinline__ bool in_all_lanes(bool condition) {
  int all = int(condition);
  for (int mask = 1; mask < 32; mask *= 2) all &= shuffle_xor(all, mask);
  return all != 0;
}

__forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
  gtco_emulator::ldmatrix(gtco_emulator::LDMATRIX, r, 4, row);
}
__forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) {
  gtco_emulator::ldmatrix(gtco_emulator::LDMATRIX_TRANS, r, 4, row);
}
__forceinline__ void ldmatrix_x2(uint32_t (&r)[2], const void* row) {
  gtco_emulator::ldmatrix(gtco_emulator::LDMATRIX, r, 2, row);
}
__forceinline__ void ldmatrix_x2_trans(uint32_t (&r)[2], const void* row) {
  gtco_emulator::ldmatrix(gtco_emulator::LDMATRIX_TRANS, r, 2, row);
}

template <class T>
__forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  static_assert(GTCO_ARCH >= 800 && sizeof(T) == 2, "m16n8k16 begins with sm_80");
  constexpr bool is_half = is_same<T, half>::value;
  static_assert(is_half || is_same<T, bf16>::value, "half or bf16");
  gtco_emulator::mma(is_half ? gtco_emulator::MMA_HALF_16 : gtco_emulator::MMA_BF16_16, d, a, b);
}
template <class T>
__forceinline__ void mma_m16n8k8(float (&d)[4], const uint32_t (&a)[2], const uint32_t (&b)[1]) {
  static_assert(is_same<T, half>::value, "m16n8k8 is for half");
  gtco_emulator::mma(gtco_emulator::MMA_HALF_8, d, a, b);
}

// Before sm_80 a plain load and store, there at once.
template <class Word>
__forceinline__ void copy_word(void* shared, const void* global, bool valid) {
#if GTCO_ARCH >= 800
  gtco_emulator::copy(shared, global, sizeof(Word), valid);
#else
  *static_cast<Word*>(shared) = valid ? *static_cast<const Word*>(global) : Word{};
#endif
}
__forceinline__ void copy_16(void* shared, const void* global, bool valid) {
  copy_word<gtco_16_bytes>(shared, global, valid);
}
__forceinline__ void copy_4(void* shared, const void* global, bool valid) {
  copy_word<uint32_t>(shared, global, valid);
}
__forceinline__ void copy_commit() { gtco_emulator::copy_commit(); }
template <int N>
__forceinline__ void copy_wait() {
  gtco_emulator::copy_wait(N);
}

__forceinline__ void store_16(void* global, uint4 x, bool valid) {
  if (valid) *static_cast<uint4*>(global) = x;
}
__forceinline__ void store_8(void* global, uint2 x, bool valid) {
  if (valid) *static_cast<uint2*>(global) = x;
}
__forceinline__ void store_4(void* global, uint32_t x, bool valid) {
  if (valid) *static_cast<uint32_t*>(global) = x;
}

__forceinline__ void sync_all() { gtco_emulator::barrier(0, static_cast<int>(blockDim.x)); }
template <int THREADS>
__forceinline__ void rejoin() {
  gtco_emulator::barrier(1, THREADS);
}
__forceinline__ uint32_t grid_arrive(uint32_t* word) { return gtco_emulator::grid_arrive(word); }
__forceinline__ void grid_wait(uint32_t* word, uint32_t ticket) {
  if (lane() == 0) gtco_emulator::grid_wait(word, ticket);
}
__forceinline__ uint32_t take_ticket(uint32_t* word, uint32_t count) {
  return gtco_emulator::take_ticket(word, count);
}
__forceinline__ void prefetch(const void* global) { gtco_emulator::prefetch(global); }
template <class T>
__forceinline__ T* in_global(T* pointer) {
  return pointer;
}

__forceinline__ void atomic_add(float* where, float value) {
  gtco_emulator::atomic_add(where, value);
}

}  // namespace gtco
