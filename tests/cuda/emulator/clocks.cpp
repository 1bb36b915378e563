// The order of accesses in a block. All threads meet at barriers, and accesses before a barrier
// come before all accesses after it: epochs count the barriers. Mbarriers order less: the accesses
// of a thread before it arrives come before those of threads that have waited for it. So in a block
// with mbarriers each thread has a clock, which ticks when the thread releases its accesses. It
// also knows the tick of every other thread up to which that one's accesses come before its own
// (vector clocks).
#include "machine.h"

namespace gtco_emulator {

static int threads() { return static_cast<int>(machine->job->threads); }

void begin_clocks() {
  if (machine->clocked) return;
  machine->clocked = true;
  for (int t = 0; t < threads(); ++t) machine->fibre[t].known.assign(threads(), 0);
  machine->readings.resize(machine->job->shared);
  for (auto& of : machine->readings) of.clear();
}

bool before(const Fibre& by, uint32_t thread, const Time& then) {
  if (static_cast<int>(thread) == by.thread || then.epoch < machine->full_epoch) return true;
  const uint32_t of_first = machine->first_threads;
  if (then.epoch != machine->epoch && thread < of_first &&
      static_cast<uint32_t>(by.thread) < of_first) {
    return true;
  }
  return machine->clocked && by.known[thread] >= then.tick;
}

Time now() { return {machine->epoch, machine->running->tick}; }

void learn(std::vector<uint32_t>& known, const std::vector<uint32_t>& other) {
  known.resize(threads());
  for (size_t t = 0; t < other.size(); ++t) {
    if (other[t] > known[t]) known[t] = other[t];
  }
}

void tell(Fibre& fibre, std::vector<uint32_t>& into) {
  learn(into, fibre.known);
  into[fibre.thread] = fibre.tick++;
}

void meet_clocks(int first, int end) {
  if (!machine->clocked) return;
  std::vector<uint32_t> all;
  for (int t = first; t < end; ++t) tell(machine->fibre[t], all);
  for (int t = first; t < end; ++t) machine->fibre[t].known = all;
}

void note_reading(uint32_t at, uint32_t pc) {
  const Fibre& self = *machine->running;
  const Reading mine{static_cast<uint16_t>(self.thread), pc, machine->warp[self.warp].epoch, now()};
  for (Reading& other : machine->readings[at]) {
    if (other.thread == mine.thread) {
      other = mine;
      return;
    }
  }
  machine->readings[at].push_back(mine);
}

void check_readings(uint32_t at, uint32_t pc) {
  const Fibre& self = *machine->running;
  for (const Reading& r : machine->readings[at]) {
    if (before(self, r.thread, r.then)) continue;
    if (r.thread / WARP == self.warp && r.warp_epoch != machine->warp[self.warp].epoch) continue;
    fault(pc, r.pc, "race: writes byte %u of shared memory that thread %u read, no barrier between",
          at, r.thread);
  }
  machine->readings[at].clear();
}

}  // namespace gtco_emulator
