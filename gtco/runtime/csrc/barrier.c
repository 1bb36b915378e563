/* What the pool adds to a step whose tasks are equal: profiled once a machine (gtco/search/barrier.py), since the search
 * reckons with it between any two stages. No artifact has this file. */
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

static int ascending(const void* a, const void* b) {
  const double x = *(const double*)a, y = *(const double*)b;
  return (x > y) - (x < y);
}

/* Seconds that a step takes beyond its tasks, which are one of `task_ns` for each of `threads`. Of `rounds` means over
 * STEPS steps it is the lower quartile: the least is that of threads which happen to arrive at once, the median that of
 * a machine with other work on it. Negative: -errno. */
__attribute__((visibility("default"))) double gtco_barrier_seconds(int threads, int rounds, int64_t task_ns) {
  if (threads < 1 || rounds < 1 || task_ns < 0) return -EINVAL;
  gtco_step steps[STEPS];
  for (int i = 0; i < STEPS; ++i) steps[i] = (gtco_step){wait_kernel, 0, (uint32_t)threads};
  void* args[] = {&task_ns};
  gtco_pool pool = {.steps = steps,
                    .num_steps = STEPS,
                    .threads = threads,
                    .has_parallel_step = threads > 1,
                    .spin_ns = SPIN_NS,
                    .args = args};
  const int error = gtco_pool_start(&pool);
  if (error) return -error;
  double* extra = malloc((size_t)rounds * sizeof *extra);
  int failed = extra ? gtco_pool_run(&pool, NULL) : ENOMEM; /* wakes the workers */
  for (int i = 0; i < rounds && !failed; ++i) {
    const int64_t began = now_ns();
    failed = gtco_pool_run(&pool, NULL);
    extra[i] = (double)(now_ns() - began) / STEPS - (double)task_ns;
  }
  gtco_pool_stop(&pool);
  double seconds = -failed;
  if (!failed) {
    qsort(extra, (size_t)rounds, sizeof *extra, ascending);
    const double quartile = extra[(rounds - 1) / 4];
    seconds = quartile > 0 ? quartile * 1e-9 : 0;
  }
  free(extra);
  return seconds;
}
