/* Handles a CPU that a thread shares with another process. At a tick of its clock, the scheduler takes the CPU away for
 * a turn of 1 to 10 ms, and the threads that wait for this thread's task wait that long. A thread that has seen this
 * takes no task that would still be under way at the next tick, so nobody waits for it during the other process's turn. */
#ifndef GTCO_TURNS_H
#define GTCO_TURNS_H

#include <stdint.h>

/* What one thread knows. Zero at first; only that thread touches it. */
typedef struct {
  long switches;       /* how often the CPU was taken away, when last asked */
  int64_t switched_ns; /* when that number was last seen to have grown */
  int32_t in_a_row;    /* how often it grew soon after the time before */
  int64_t asked_ns;
  int64_t until_ns;    /* the CPU counts as shared until then; 0: it does not */
  uint32_t held_up;    /* gtco_pool's, when last looked at */
} gtco_turns;

/* The last readings of a thread that looks at the clock again and again. Zero at first. */
typedef struct {
  int64_t coarse_ns, at_ns;
} gtco_watch;

/* Finds out when ticks come. This takes a look at the clock just before and just after one. */
void gtco_watch_ticks(gtco_watch* watch, int64_t now);

/* Nanoseconds between two ticks; 0: not known yet, negative: it cannot be found. */
int64_t gtco_tick_ns(void);

/* Checks whether the CPU was taken away since the last time. If that happens several times in a row within a short
 * time, the CPU counts as shared for a while, once the time of the ticks is known. */
void gtco_turns_look(gtco_turns* turns, int64_t now);

/* How many of `count` tasks of `task_ns` each to take now; 0 if the scheduler's next tick comes before the first one
 * would be done. until_ns must be set. */
uint32_t gtco_turns_fit(gtco_turns* turns, int64_t now, int64_t task_ns, uint32_t count);

#endif /* GTCO_TURNS_H */
