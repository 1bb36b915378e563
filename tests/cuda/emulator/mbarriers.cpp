// Mbarriers (mbarrier.cuh): a thread that arrives tells what it knows, and a thread that waits
// learns this from all threads that arrived in the phase. Also registers that warp groups hand
// over; only the right to do so is checked.
#include "machine.h"

namespace gtco_emulator {

#define HERE place(__builtin_return_address(0))

constexpr uint32_t MOST_ARRIVALS = (1 << 20) - 1;

void mbarrier_init(const void* barrier, uint32_t arrivals) {
  const uint64_t pc = HERE;
  const uint32_t at = shared_offset(barrier, 8, pc, "mbarrier");
  if (at % 8) fault(pc, 0, "an mbarrier at %u, not a multiple of 8", at);
  if (!arrivals || arrivals > MOST_ARRIVALS) fault(pc, 0, "an mbarrier of %u arrivals", arrivals);
  begin_clocks();
  make_barrier(at, 8, static_cast<uint32_t>(pc));
  machine->mbarriers[at] = {arrivals, arrivals, 0, {}, {}};
}

static Mbarrier& known_to_all(const void* barrier, uint64_t pc) {
  const uint32_t at = shared_offset(barrier, 8, pc, "mbarrier");
  const auto found = machine->mbarriers.find(at);
  if (found == machine->mbarriers.end()) fault(pc, 0, "no mbarrier begins at %u", at);
  check_writer(*machine->running, at, static_cast<uint32_t>(pc), "uses");
  return found->second;
}

void mbarrier_arrive(const void* barrier) {
  Mbarrier& b = known_to_all(barrier, HERE);
  tell(*machine->running, b.told);
  if (--b.pending) return;
  b.pending = b.arrivals, ++b.phases;
  b.released.swap(b.told), b.told.clear();
  for (uint32_t t = 0; t < machine->job->threads; ++t) {
    Fibre& f = machine->fibre[t];
    if (f.waits == MBARRIER_WAIT && f.operands == &b) make_ready(f);
  }
}

void mbarrier_wait(const void* barrier, uint32_t parity) {
  const uint64_t pc = HERE;
  Mbarrier& b = known_to_all(barrier, pc);
  Fibre& self = *machine->running;
  while ((b.phases & 1) == parity) {
    self.pc = pc, self.waits = MBARRIER_WAIT, self.operands = &b;
    suspend();
  }
  learn(self.known, b.released);
}

void set_registers(bool more, int registers) {
  int mine = more ? registers : -registers;
  const uint64_t pc = HERE;
  if (!meet_group(SETMAXNREG, pc, &mine)) return;
  const Fibre& self = *machine->running;
  Fibre* const of = &machine->fibre[self.warp / GROUP_WARPS * GROUP_WARPS * WARP];
  for (int i = 0; i < GROUP_WARPS * WARP; ++i) {
    if (of[i].waits != SETMAXNREG || *static_cast<int*>(of[i].operands) != mine) {
      fault(pc, of[i].pc, "divergent: other registers than thread %d of its warp group", i);
    }
  }
  for (int i = 0; i < GROUP_WARPS * WARP; ++i) make_ready(of[i]);
  suspend();
}

}  // namespace gtco_emulator
