/* What stands between two stages, timed by the pool itself: profiled once a machine (gtco/search/calibration/barrier.py), since the
 * search reckons with it. No artifact has this file. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <time.h>

#include "thread_pool.h"

#define SPIN_NS 1000000 /* workers stay awake from round to round */
#define STEPS 64

static int64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Tasks that take as long by the clock, whatever else the core does. */
static void wait_kernel(void* const* b, void* w, int64_t begin, int64_t end) {
  (void)w;
  const int64_t each = *(const int64_t*)b[0];
  for (int64_t i = begin; i < end; ++i) {
    const int64_t until = now_ns() + each;
    while (now_ns() < until) {
    }
  }
}

/* As compilers of stages make it: the buffers one by one, scratch, tasks. */
typedef void (*generated)(void* x, void* y, void* scratch, int64_t begin, int64_t end);

/* b: input, output and what reads and writes them. */
static void copy_kernel(void* const* b, void* w, int64_t begin, int64_t end) {
  ((generated)b[2])(b[0], b[1], w, begin, end);
}

static int ascending(const void* a, const void* b) {
  const double x = *(const double*)a, y = *(const double*)b;
  return (x > y) - (x < y);
}

/* Seconds of a step among `count`, which take turns. Of `rounds` means over all steps it is the lower quartile: the
 * least is that of threads which happen to arrive at once, the median that of a machine with other work on it.
 * Negative: -errno. */
static double seconds_of_step(const gtco_step* steps, int count, void** args, int threads, int rounds) {
  gtco_pool pool = {.steps = steps,
                    .num_steps = count,
                    .threads = threads,
                    .has_parallel_step = threads > 1,
                    .spin_ns = SPIN_NS,
                    .args = args};
  const int error = gtco_pool_start(&pool);
  if (error) return -error;
  double* each = malloc((size_t)rounds * sizeof *each);
  int failed = each ? gtco_pool_run(&pool, NULL) : ENOMEM; /* wakes the workers */
  for (int i = 0; i < rounds && !failed; ++i) {
    const int64_t began = now_ns();
    failed = gtco_pool_run(&pool, NULL);
    each[i] = (double)(now_ns() - began) * 1e-9 / count;
  }
  gtco_pool_stop(&pool);
  double seconds = -failed;
  if (!failed) {
    qsort(each, (size_t)rounds, sizeof *each, ascending);
    seconds = each[(rounds - 1) / 4];
  }
  free(each);
  return seconds;
}

/* Seconds that a step takes beyond its tasks, which are one of `task_ns` for each of `threads`. Negative: -errno. */
__attribute__((visibility("default"))) double gtco_barrier_seconds(int threads, int rounds, int64_t task_ns) {
  if (threads < 1 || rounds < 1 || task_ns < 0) return -EINVAL;
  gtco_step steps[STEPS];
  for (int i = 0; i < STEPS; ++i) steps[i] = (gtco_step){wait_kernel, 0, (uint32_t)threads};
  void* args[] = {&task_ns};
  const double each = seconds_of_step(steps, STEPS, args, threads, rounds), tasks = (double)task_ns * 1e-9;
  return each < 0 ? each : each > tasks ? each - tasks : 0;
}

/* Seconds of each of `count` steps, STEPS at most, that read what the step before wrote, in `tasks` that whichever thread
 * is free takes: `kernel` reads one buffer and writes the other, and the next step has them the other way round.
 * Negative: -errno. */
__attribute__((visibility("default"))) double gtco_handover_seconds(int threads, int rounds, int count,
                                                                    generated kernel, uint32_t tasks, void* x,
                                                                    void* y) {
  if (threads < 1 || rounds < 1 || count < 1 || count > STEPS || tasks < 1) return -EINVAL;
  void* args[] = {x, y, (void*)kernel, y, x, (void*)kernel};
  gtco_step steps[STEPS];
  for (int i = 0; i < count; ++i) steps[i] = (gtco_step){copy_kernel, i % 2 * 3, tasks};
  return seconds_of_step(steps, count, args, threads, rounds);
}
