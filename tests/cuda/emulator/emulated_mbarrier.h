// The primitives of mbarrier.cuh on the CPU: calls into the machine (mbarriers.cpp).
#pragma once

namespace gtco_emulator {

void mbarrier_init(const void* barrier, uint32_t arrivals);
void mbarrier_arrive(const void* barrier);
void mbarrier_wait(const void* barrier, uint32_t parity);
void set_registers(bool more, int registers);

}  // namespace gtco_emulator

namespace gtco {

__forceinline__ void mbarrier_init(Mbarrier* barrier, uint32_t arrivals) {
  gtco_emulator::mbarrier_init(barrier, arrivals);
}
__forceinline__ void mbarrier_arrive(Mbarrier* barrier, bool where = true) {
  if (where) gtco_emulator::mbarrier_arrive(barrier);
}
__forceinline__ void mbarrier_wait(Mbarrier* barrier, uint32_t parity) {
  gtco_emulator::mbarrier_wait(barrier, parity);
}
template <int THREADS>
__forceinline__ void sync_first() {
  gtco_emulator::barrier_of_first(THREADS);
}
template <int REGISTERS>
__forceinline__ void give_registers() {
  static_assert(REGISTERS % 8 == 0 && REGISTERS >= 24 && REGISTERS <= 256, "as they are given out");
  gtco_emulator::set_registers(false, REGISTERS);
}
template <int REGISTERS>
__forceinline__ void take_registers() {
  static_assert(REGISTERS % 8 == 0 && REGISTERS >= 24 && REGISTERS <= 256, "as they are given out");
  gtco_emulator::set_registers(true, REGISTERS);
}

}  // namespace gtco
