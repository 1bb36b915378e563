/* The shares of the threads in a step's tasks. */
#include "thread_pool.c"
#include "plain_calls.h"

enum { THREADS = 4, MOST = 64 };
static _Atomic int runs_of[MOST];

static void count(void* const* b, void* w, int64_t begin, int64_t end) {
  (void)b, (void)w;
  for (int64_t task = begin; task < end; ++task) {
    for (int i = 0; i < 10; ++i) gtco_pause(); /* so that other threads come in time */
    ++runs_of[task];
  }
}

static const gtco_step steps[] = {{count, 0, 13, 0}, {count, 0, THREADS, 0}, {count, 0, 2, 0}};

static gtco_pool made(void) {
  gtco_pool pool;
  memset(&pool, 0, sizeof pool);
  pool.steps = steps;
  pool.num_steps = pool.end_step = 3;
  pool.threads = THREADS;
  pool.has_parallel_step = 1;
  pool.spin_ns = 1000000;
  return pool;
}

/* The thread begins with its own share, the same in every step, and then takes all that is left, each task once. */
static int own_share_first(void) {
  static struct gtco_worker workers[THREADS];
  gtco_pool pool = made();
  pool.workers = workers;
  for (uint32_t step = 0; step < 3; ++step) {
    const uint32_t tasks = steps[step].tasks;
    publish_step(&pool, 1, step, 0);
    int taken[MOST] = {0}, order = 0, first = -1;
    for (range r = {0}; take(&pool, 2, &r);) {
      if (first < 0) first = (int)r.begin;
      for (int64_t task = r.begin; task < r.end; ++task) taken[task] += 1 + order++;
    }
    if (first != (int)(tasks * 2 / THREADS)) return 1;
    int sum = 0;
    for (uint32_t task = 0; task < tasks; ++task) {
      const int own = task >= tasks * 2 / THREADS && task < tasks * 3 / THREADS;
      if (own != (taken[task] <= (int)(tasks * 3 / THREADS - tasks * 2 / THREADS))) return 2;
      sum += taken[task];
    }
    if (order != (int)tasks || sum != order * (order + 1) / 2) return 3;
    if (atomic_load(&pool.shares) || workers[2].over != make_word(1, step)) return 4;
    range r = {0};
    if (take(&pool, 1, &r)) return 5;
  }
  return 0;
}

/* A thread that looked at a share in an older step takes nothing of a newer one. */
static int late_thread(void) {
  static struct gtco_worker workers[THREADS];
  gtco_pool pool = made();
  pool.workers = workers;
  range r = {0};
  publish_step(&pool, 1, 0, 0);
  const uint32_t late = make_word(1, 0);
  while (take(&pool, 0, &r)) {
  }
  publish_step(&pool, 1, 1, 0);
  for (int owner = 0; owner < THREADS; ++owner)
    if (take_of(&pool, late, owner, 3, &r)) return 1;
  if (!take(&pool, 3, &r) || r.step != 1 || r.begin != 3) return 2;
  return 0;
}

static int run_once(gtco_pool* pool, int step) {
  memset((void*)runs_of, 0, sizeof runs_of);
  pool->first_step = step;
  pool->end_step = step + 1;
  if (gtco_pool_run(pool, NULL)) return 1;
  for (uint32_t task = 0; task < MOST; ++task)
    if (runs_of[task] != (task < steps[step].tasks)) return 1;
  return 0;
}

/* After 4096 runs the word is the same. The shares that were not touched since then are free all the same. */
static int words_come_back(void) {
  gtco_pool pool = made();
  if (gtco_pool_start(&pool)) return 1;
  for (int lap = 0; lap < 3; ++lap) {
    if (run_once(&pool, 1)) return 2;
    for (int i = 0; i < 4095; ++i)
      if (run_once(&pool, 2)) return 3;
  }
  for (int i = 0; i < 20000; ++i)
    if (run_once(&pool, i % 3)) return 4;
  gtco_pool_stop(&pool);
  return 0;
}

int main(void) {
  alarm(60); /* a share that is lost ends no run */
  int failed = own_share_first();
  if (!failed && (failed = late_thread())) failed += 10;
  if (!failed && (failed = words_come_back())) failed += 20;
  return failed;
}
