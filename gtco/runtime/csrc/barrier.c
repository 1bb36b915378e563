/* Times the barrier between two stages, and memory with all threads, by the pool itself. The calibration (barrier.py)
 * measures both once a machine, and the search uses them. No artifact contains this file. */
#define _GNU_SOURCE
#include <errno.h>
#include <sched.h>
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

/* Tasks of a fixed length by the clock, whatever else the core does. */
static void wait_kernel(void* const* b, void* w, int64_t begin, int64_t end) {
  (void)w;
  const int64_t each = *(const int64_t*)b[0];
  for (int64_t i = begin; i < end; ++i) {
    const int64_t until = now_ns() + each;
    while (now_ns() < until) {
    }
  }
}

static int more_than_cpus(int threads) {
  cpu_set_t allowed;
  return !sched_getaffinity(0, sizeof allowed, &allowed) && threads > CPU_COUNT(&allowed);
}

/* Has the signature of a stage's kernel: the buffers one by one, scratch, tasks. */
typedef void (*generated)(void* x, void* y, void* scratch, int64_t begin, int64_t end);

/* b: input, output and the function that reads and writes them. */
static void copy_kernel(void* const* b, void* w, int64_t begin, int64_t end) {
  ((generated)b[2])(b[0], b[1], w, begin, end);
}

/* The same with the last task first: what a thread wrote in another step is read, and overwritten, by another thread. */
static void copy_across_kernel(void* const* b, void* w, int64_t begin, int64_t end) {
  const int64_t tasks = *(const uint32_t*)b[3];
  copy_kernel(b, w, tasks - end, tasks - begin);
}

static int ascending(const void* a, const void* b) {
  const double x = *(const double*)a, y = *(const double*)b;
  return (x > y) - (x < y);
}

/* Seconds of a step among `count`, which take turns. Each of `rounds` gives the mean over all steps, and the result is
 * the lower quartile of these: the least comes from threads that happen to arrive at once, the median from a machine
 * with other work on it. Rounds end early after `most` seconds, but there is at least one. If `timed` is given, it
 * gives a round's seconds instead of the clock. Negative: -errno. */
static double seconds_of_step(const gtco_step* steps, int count, void** args, int threads, int rounds, double most,
                              double (*timed)(void** args)) {
  gtco_pool pool = {.steps = steps,
                    .num_steps = count,
                    .end_step = count,
                    .threads = threads,
                    .has_parallel_step = threads > 1,
                    .crowded = more_than_cpus(threads),
                    .spin_ns = SPIN_NS,
                    .args = args};
  const int error = gtco_pool_start(&pool);
  if (error) return -error;
  double* each = malloc((size_t)rounds * sizeof *each);
  int failed = each ? gtco_pool_run(&pool, NULL) : ENOMEM; /* wakes the workers */
  const int64_t first = now_ns();
  int done = 0;
  while (!failed && done < rounds && (!done || (double)(now_ns() - first) * 1e-9 < most)) {
    const int64_t began = now_ns();
    failed = gtco_pool_run(&pool, NULL);
    const double passed = (double)(now_ns() - began) * 1e-9 / count;
    each[done++] = timed ? timed(args) : passed;
  }
  gtco_pool_stop(&pool);
  double seconds = -failed;
  if (!failed) {
    qsort(each, (size_t)done, sizeof *each, ascending);
    seconds = each[(done - 1) / 4];
  }
  free(each);
  return seconds;
}

/* Seconds that a step takes beyond its tasks; each of `threads` has one task of `task_ns`. Negative: -errno. */
__attribute__((visibility("default"))) double gtco_barrier_seconds(int threads, int rounds, double most,
                                                                   int64_t task_ns) {
  if (threads < 1 || rounds < 1 || task_ns < 0) return -EINVAL;
  gtco_step steps[STEPS];
  for (int i = 0; i < STEPS; ++i) steps[i] = (gtco_step){wait_kernel, 0, (uint32_t)threads, 0};
  void* args[] = {&task_ns};
  const double each = seconds_of_step(steps, STEPS, args, threads, rounds, most, NULL);
  const double tasks = (double)task_ns * 1e-9;
  return each < 0 ? each : each > tasks ? each - tasks : 0;
}

/* Seconds of each of `count` steps, at most STEPS, that read what the step before wrote: what another thread wrote if
 * `across` is not 0, else what the same thread wrote. `kernel` reads one buffer and writes the other in so many `tasks`,
 * and the next step has them the other way round. Negative: -errno. */
__attribute__((visibility("default"))) double gtco_handover_seconds(int threads, int rounds, double most,
                                                                    int count, generated kernel, uint32_t tasks,
                                                                    int across, void* x, void* y) {
  if (threads < 1 || rounds < 1 || count < 1 || count > STEPS || tasks < 1) return -EINVAL;
  void* args[] = {x, y, (void*)kernel, y, x, (void*)kernel, &tasks};
  gtco_step steps[STEPS];
  for (int i = 0; i < count; ++i)
    steps[i] = (gtco_step){i % 2 && across ? copy_across_kernel : copy_kernel, i % 2 * 3, tasks, 0};
  return seconds_of_step(steps, count, args, threads, rounds, most, NULL);
}

#define LINE 64
typedef float vector __attribute__((vector_size(16), may_alias)); /* every x86-64 and AArch64 has these */

/* Lines of memory that all threads go through; each task is a part of them. `y` is NULL if they are only read. */
typedef struct {
  char *x, *y;
  int64_t tasks, part; /* bytes of a task */
  int64_t *began, *ended; /* of each task */
  vector* sums;
} lines;

static void flush_line(char* line) {
#ifdef __x86_64__
  __builtin_ia32_clflush(line);
#else
  __asm__ volatile("dc civac, %0" : : "r"(line) : "memory");
#endif
}

/* Removes the lines from all caches, of any size. */
static void flush_kernel(void* const* b, void* w, int64_t begin, int64_t end) {
  (void)w;
  const lines* of = b[0];
  for (int64_t i = begin * of->part; i < end * of->part; i += LINE) {
    flush_line(of->x + i);
    if (of->y) flush_line(of->y + i);
  }
  atomic_thread_fence(memory_order_seq_cst);
}

static void pass_kernel(void* const* b, void* w, int64_t begin, int64_t end) {
  (void)w;
  const lines* of = b[0];
  for (int64_t task = begin; task < end; ++task) {
    of->began[task] = now_ns();
    const vector* x = (const vector*)(of->x + task * of->part);
    vector* y = of->y ? (vector*)(of->y + task * of->part) : NULL;
    vector sum = {0};
    for (int64_t i = 0; i < of->part / (int64_t)sizeof *x; i += 4) {
      const vector p = x[i], q = x[i + 1], r = x[i + 2], s = x[i + 3];
      if (y) {
        y[i] = p, y[i + 1] = q, y[i + 2] = r, y[i + 3] = s;
      } else {
        sum += (p + q) + (r + s);
      }
    }
    of->sums[task] = sum; /* so that the compiler keeps the reads */
    of->ended[task] = now_ns();
  }
}

/* From the begin of the first task to the end of the last. */
static double passed(void** args) {
  const lines* of = args[0];
  int64_t began = of->began[0], ended = of->ended[0];
  for (int64_t i = 1; i < of->tasks; ++i) {
    if (of->began[i] < began) began = of->began[i];
    if (of->ended[i] > ended) ended = of->ended[i];
  }
  return (double)(ended - began) * 1e-9;
}

/* Seconds that `threads` take together to read `tasks` parts of `part` bytes of `x`, or to copy them to `y` if it is
 * given, when no cache has any of it. `part` is a multiple of a line, as `x` and `y` are. Negative: -errno. */
__attribute__((visibility("default"))) double gtco_memory_seconds(int threads, int rounds, double most, uint32_t tasks,
                                                                  int64_t part, void* x, void* y) {
  if (threads < 1 || rounds < 1 || tasks < 1 || part < LINE || part % LINE) return -EINVAL;
  int64_t* times = malloc(2 * tasks * sizeof *times);
  vector* sums = aligned_alloc(sizeof *sums, tasks * sizeof *sums);
  double seconds = -ENOMEM;
  if (times && sums) {
    lines of = {x, y, tasks, part, times, times + tasks, sums};
    void* args[] = {&of};
    const gtco_step steps[] = {{flush_kernel, 0, tasks, 0}, {pass_kernel, 0, tasks, 0}};
    seconds = seconds_of_step(steps, 2, args, threads, rounds, most, passed);
  }
  free(times);
  free(sums);
  return seconds;
}
