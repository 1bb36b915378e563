#define _GNU_SOURCE
#include "turns.h"

#include <stdatomic.h>
#include <sys/resource.h>
#include <time.h>

#define SOON_TICKS 3        /* from one time to the next, if two processes share a CPU in turns of a tick */
#define SOON_NS 10000000    /* but at least that long: turns may have several short ticks */
#define IN_A_ROW 3          /* other processes take a CPU now and then, but not again and again */
#define SHARED_NS 100000000 /* how long a CPU counts as shared after it was taken away */
#define SHORTEST_TICK_NS 500000
#define SETTLING_NS 50000   /* after a tick, until the scheduler has decided which process continues */

static _Atomic int64_t tick_ns;  /* between two ticks; 0: not known yet, -1: cannot be found */
static _Atomic int64_t phase_ns; /* a tick's time, modulo tick_ns */

static int64_t read_ns(clockid_t clock) {
  struct timespec t;
  clock_gettime(clock, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

int64_t gtco_tick_ns(void) { return atomic_load_explicit(&tick_ns, memory_order_relaxed); }

/* The coarse clock moves at ticks alone. */
void gtco_watch_ticks(gtco_watch* watch, int64_t now) {
  struct timespec resolution;
  if (gtco_tick_ns()) return;
  if (clock_getres(CLOCK_MONOTONIC_COARSE, &resolution) != 0 || resolution.tv_sec || resolution.tv_nsec < SHORTEST_TICK_NS) {
    atomic_store(&tick_ns, -1);
    return;
  }
  const int64_t coarse = read_ns(CLOCK_MONOTONIC_COARSE);
  if (watch->at_ns && coarse != watch->coarse_ns && now - watch->at_ns < SETTLING_NS / 2) {
    atomic_store(&phase_ns, now % resolution.tv_nsec);
    atomic_store(&tick_ns, resolution.tv_nsec);
  }
  watch->coarse_ns = coarse;
  watch->at_ns = now;
}

void gtco_turns_look(gtco_turns* turns, int64_t now) {
  struct rusage use;
  turns->asked_ns = now;
  if (getrusage(RUSAGE_THREAD, &use) != 0 || use.ru_nivcsw == turns->switches) return;
  const int64_t tick = gtco_tick_ns(), soon = SOON_TICKS * tick > SOON_NS ? SOON_TICKS * tick : SOON_NS;
  turns->in_a_row = now - turns->switched_ns < soon ? turns->in_a_row + 1 : 0;
  turns->switches = use.ru_nivcsw;
  turns->switched_ns = now;
  if (turns->in_a_row >= IN_A_ROW && tick > 0) turns->until_ns = now + SHARED_NS;
}

uint32_t gtco_turns_fit(gtco_turns* turns, int64_t now, int64_t task_ns, uint32_t count) {
  const int64_t tick = gtco_tick_ns();
  if (now - turns->asked_ns > tick) gtco_turns_look(turns, now);
  if (now > turns->until_ns) {
    turns->until_ns = 0;
    return count;
  }
  const int64_t since = (now - atomic_load_explicit(&phase_ns, memory_order_relaxed) + tick) % tick;
  if (task_ns > tick / 4) return 1; /* waiting for a tick would take more than it saves */
  if (since < SETTLING_NS || tick - since < task_ns) return 0;
  const int64_t most = task_ns ? (tick - since) / task_ns : 1;
  return most < count ? (uint32_t)most : count;
}
