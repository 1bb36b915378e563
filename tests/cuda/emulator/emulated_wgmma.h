// The primitives of wgmma.cuh on the CPU: calls into the machine (warp_groups.cpp).
#pragma once

namespace gtco_emulator {

uint32_t shared_address(const void* pointer);
void fence_proxy();
void wgmma_fence();
void wgmma(Collective kind, int columns, float* d, uint64_t a, uint64_t b);
void wgmma_commit();
void wgmma_wait(int groups);

}  // namespace gtco_emulator

namespace gtco {

__forceinline__ uint32_t shared_address(const void* pointer) {
  return gtco_emulator::shared_address(pointer);
}
__forceinline__ void fence_proxy() { gtco_emulator::fence_proxy(); }
template <int COLUMNS>
__forceinline__ void wgmma_fence(float (&)[COLUMNS][4]) {
  gtco_emulator::wgmma_fence();
}
__forceinline__ void wgmma_commit() { gtco_emulator::wgmma_commit(); }
template <int GROUPS, int COLUMNS>
__forceinline__ void wgmma_wait(float (&)[COLUMNS][4]) {
  gtco_emulator::wgmma_wait(GROUPS);
}
template <class T, int N>
__forceinline__ void wgmma_m64nNk16(float (&d)[N / 8][4], uint64_t a, uint64_t b) {
  constexpr bool is_half = is_same<T, half>::value;
  static_assert(emitted(N) && (is_half || is_same<T, bf16>::value), "has a text");
  gtco_emulator::wgmma(is_half ? gtco_emulator::WGMMA_HALF : gtco_emulator::WGMMA_BF16, N,
                       &d[0][0], a, b);
}

}  // namespace gtco
