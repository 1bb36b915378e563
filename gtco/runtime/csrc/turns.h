/* A CPU that a thread shares with another process: the scheduler takes it away for a turn, of 1 to 10 ms, and whoever
 * waits for the thread's task waits that long. It does so at a tick of its clock. A thread that has seen this takes no
 * task that would still be under way at the next tick, and so holds nobody up while it is off. */
#ifndef GTCO_TURNS_H
#define GTCO_TURNS_H

#include <stdint.h>

/* What one thread knows. Zero at first; only that thread touches it. */
typedef struct {
  long switches;       /* times that the CPU was taken away, when last asked */
  int64_t switched_ns; /* when that number was last seen to have grown */
  int32_t in_a_row;    /* how often it grew soon after the time before */
  int64_t asked_ns;
  int64_t until_ns;    /* the CPU counts as shared until then; 0: it does not */
  uint32_t held_up;    /* gtco_pool's, when last looked at */
} gtco_turns;

/* What somebody who looks at the clock again and again has seen last. Zero at first. */
typedef struct {
  int64_t coarse_ns, at_ns;
} gtco_watch;

/* Finds out when ticks come, which takes a look just before and just behind one. */
void gtco_watch_ticks(gtco_watch* watch, int64_t now);

/* Nanoseconds between two ticks; 0: not known yet, negative: it cannot be known. */
int64_t gtco_tick_ns(void);

/* Was the CPU taken away since the last time? Several times in a row, soon after each other, make it a shared one for a
 * while, once it is known when ticks come. */
void gtco_turns_look(gtco_turns* turns, int64_t now);

/* Of `count` tasks of `task_ns` each, those to be taken now: 0 where the scheduler's next tick comes before the first one
 * would be done. With until_ns set. */
uint32_t gtco_turns_fit(gtco_turns* turns, int64_t now, int64_t task_ns, uint32_t count);

#endif /* GTCO_TURNS_H */
