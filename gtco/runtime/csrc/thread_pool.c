/* The course of a run: the caller publishes the first step; every thread takes ranges of its tasks until none is left;
 * the thread that finishes a step's last task publishes the next step. Barriers wait only for tasks, not for threads: a
 * worker that is late, asleep or without a CPU holds nobody up unless it holds a task. Workers are woken once a run. */
#define _GNU_SOURCE
#include "thread_pool.h"

#include <emmintrin.h>
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define STEP_IDLE 0xffffu   /* no run under way */
#define STEP_SERIAL 0xfffeu /* a run is under way, nothing to take yet */
#define WAKE_WORKERS 1u
#define WAKE_CALLER 2u
#define POLLS_BETWEEN_CLOCKS 32
#define NS_BEFORE_YIELD 50000 /* then a spinning thread yields its CPU at every look at the clock */
#define WATCHING_NS 20000000  /* how long a thread that waits looks for ticks, once in a process */
#define HELD_UP_NS 100000     /* after such a wait for others' tasks, all threads check whether their CPU was taken away */
/* The mode of every thread while it computes, so that results depend on neither the caller's mode nor the thread: round
 * to nearest, no traps, denormals read as zero and flushed to zero (an operation on one can cost 150 cycles). */
#define RUN_MXCSR 0x9fc0u

struct gtco_worker {
  pthread_t thread; /* unused in the first, which is the caller */
  gtco_pool* pool;
  int index;
  gtco_turns turns;
};

static inline uint32_t step_of(uint64_t word) { return (uint32_t)(word >> 32) & 0xffffu; }
static inline uint32_t generation_of(uint64_t word) { return (uint32_t)(word >> 48); }
static inline uint64_t make_word(uint32_t generation, uint32_t step) {
  return (uint64_t)(generation & 0xffffu) << 48 | (uint64_t)step << 32;
}

static int64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* The futex is the word's upper half: it changes with every publication, not with every task taken. */
static uint32_t* futex_of(gtco_pool* pool) { return (uint32_t*)&pool->word + 1; }

static void futex_wait(gtco_pool* pool, uint32_t expected, uint32_t bits) {
  syscall(SYS_futex, futex_of(pool), FUTEX_WAIT_BITSET_PRIVATE, expected, NULL, NULL, bits);
}

static void futex_wake(gtco_pool* pool, uint32_t bits) {
  syscall(SYS_futex, futex_of(pool), FUTEX_WAKE_BITSET_PRIVATE, INT_MAX, NULL, NULL, bits);
}

/* Sequentially consistent against the counters of sleepers in await(): either the sleeper sees the new word (the futex
 * compares it), or we see the sleeper. */
static void publish(gtco_pool* pool, uint64_t word, uint32_t whom) {
  atomic_exchange(&pool->word, word);
  uint32_t bits = 0;
  if (whom & WAKE_WORKERS && atomic_load(&pool->sleeping_workers)) bits |= WAKE_WORKERS;
  if (whom & WAKE_CALLER && atomic_load(&pool->sleeping_caller)) bits |= WAKE_CALLER;
  if (bits) futex_wake(pool, bits);
}

static inline int available(const gtco_pool* pool, uint64_t word) {
  uint32_t step = step_of(word);
  return step < STEP_SERIAL && (uint32_t)word < pool->steps[step].tasks;
}

/* The number of n tasks of a step that may be begun, if the CPU is shared. */
static uint32_t fitting(gtco_pool* pool, gtco_turns* turns, uint32_t step, uint32_t n) {
  return gtco_turns_fit(turns, now_ns(), atomic_load_explicit(&pool->task_ns[step], memory_order_relaxed), n);
}

/* Takes a range of tasks. Guided self-scheduling (Polychronopoulos and Kuck, 1987) at half the fair share: the first
 * ranges are long, for locality, the last are single tasks, so that threads end within one task of each other. */
static int take(gtco_pool* pool, gtco_turns* turns, uint32_t* step, int64_t* begin, int64_t* end) {
  uint64_t word = atomic_load_explicit(&pool->word, memory_order_acquire);
  while (available(pool, word)) {
    uint32_t first = (uint32_t)word;
    uint32_t n = (pool->steps[step_of(word)].tasks - first) / (2u * (uint32_t)pool->threads);
    if (n == 0) n = 1;
    if (turns->until_ns && (n = fitting(pool, turns, step_of(word), n)) == 0) {
      _mm_pause();
      return 0; /* does not wait here: finished tasks must be reported */
    }
    /* Success means that this very step is current and these tasks are free, whatever happened since the load. */
    if (atomic_compare_exchange_weak_explicit(&pool->word, &word, word + n, memory_order_acq_rel,
                                              memory_order_acquire)) {
      *step = step_of(word);
      *begin = first;
      *end = (int64_t)first + n;
      return 1;
    }
  }
  return 0;
}

static void run_tasks(gtco_pool* pool, int thread, uint32_t step, int64_t begin, int64_t end) {
  const gtco_step* s = &pool->steps[step];
  s->kernel(pool->args + s->first_ref, pool->workspaces + thread * pool->workspace_stride, begin, end);
}

/* run_tasks, timed if the CPU is shared. The next reading replaces one that is too long because the CPU was taken away. */
static void run_in_turn(gtco_pool* pool, int thread, uint32_t step, int64_t begin, int64_t end) {
  if (!pool->workers[thread].turns.until_ns) {
    run_tasks(pool, thread, step, begin, end);
    return;
  }
  const int64_t began = now_ns();
  run_tasks(pool, thread, step, begin, end);
  const int64_t each = (now_ns() - began) / (end - begin);
  const int64_t before = atomic_load_explicit(&pool->task_ns[step], memory_order_relaxed);
  const int64_t now = !before || each < before ? each : before + (each < 2 * before ? each - before : before) / 8;
  atomic_store_explicit(&pool->task_ns[step], now, memory_order_relaxed);
}

static void record(gtco_pool* pool, uint32_t step) {
  if (!pool->step_seconds) return;
  int64_t now = now_ns();
  pool->step_seconds[step] = (double)(now - pool->step_began_ns) * 1e-9;
  pool->step_began_ns = now;
}

/* Begins at `step`: runs steps of one task in this thread, whose caches have the data, and publishes the first step
 * that has more tasks, or that this thread should not begin. */
static void advance(gtco_pool* pool, int thread, uint32_t step) {
  gtco_turns* turns = &pool->workers[thread].turns;
  for (; (int)step < pool->num_steps && pool->steps[step].tasks == 1; ++step) {
    if (turns->until_ns && !fitting(pool, turns, step, 1)) break;
    run_in_turn(pool, thread, step, 0, 1);
    record(pool, step);
  }
  uint32_t generation = generation_of(atomic_load_explicit(&pool->word, memory_order_relaxed));
  atomic_store_explicit(&pool->done, 0, memory_order_relaxed); /* released by the publication */
  if ((int)step < pool->num_steps)
    publish(pool, make_word(generation, step), WAKE_WORKERS | WAKE_CALLER);
  else
    publish(pool, make_word(generation, STEP_IDLE), WAKE_CALLER);
}

/* Works until there is no task to take. Finished tasks are reported once a step, not once a range: a step is over only
 * when all are reported, so ranges taken before the report belong to one step. */
static void participate(gtco_pool* pool, int thread) {
  gtco_turns* turns = &pool->workers[thread].turns;
  const uint32_t held_up = atomic_load_explicit(&pool->held_up, memory_order_relaxed);
  uint32_t step = 0;
  int64_t begin, end;
  if (held_up != turns->held_up) {
    turns->held_up = held_up;
    gtco_turns_look(turns, now_ns());
  }
  for (;;) {
    int64_t finished = 0;
    for (; take(pool, turns, &step, &begin, &end); finished += end - begin)
      run_in_turn(pool, thread, step, begin, end);
    if (!finished) return;
    if (atomic_fetch_add_explicit(&pool->done, finished, memory_order_acq_rel) + finished ==
        (int64_t)pool->steps[step].tasks) {
      record(pool, step);
      advance(pool, thread, step + 1);
    }
  }
}

static int awaited(const gtco_pool* pool, uint64_t word, int caller) {
  if (available(pool, word)) return 1;
  return caller ? step_of(word) == STEP_IDLE : atomic_load_explicit(&pool->stop, memory_order_relaxed) != 0;
}

/* Waits until there is a task to take, or the run (for the caller) or the pool (for a worker) is over. */
static void await(gtco_pool* pool, int caller) {
  int64_t began = 0;
  int told = pool->crowded; /* then threads take the CPU from each other at any time */
  int watching = 0;
  gtco_watch watch = {0, 0};
  for (;;) {
    for (int i = 0; i < POLLS_BETWEEN_CLOCKS; ++i) {
      if (awaited(pool, atomic_load_explicit(&pool->word, memory_order_acquire), caller)) return;
      _mm_pause();
    }
    int64_t now = now_ns();
    if (!began) began = now;
    if (!told && now - began > HELD_UP_NS && step_of(atomic_load(&pool->word)) != STEP_IDLE) {
      told = 1;
      watching = pool->spin_ns && !gtco_tick_ns();
      atomic_fetch_add_explicit(&pool->held_up, 1, memory_order_relaxed);
    }
    if (watching) {
      gtco_watch_ticks(&watch, now);
      watching = !gtco_tick_ns() && now - began < WATCHING_NS;
    }
    if (now - began < pool->spin_ns || watching) {
      if (pool->crowded || now - began > NS_BEFORE_YIELD) sched_yield();
      continue;
    }
    _Atomic int32_t* sleepers = caller ? &pool->sleeping_caller : &pool->sleeping_workers;
    uint64_t word = atomic_load(&pool->word);
    atomic_fetch_add(sleepers, 1);
    /* stop is set before its publication, so a worker that misses it here finds the futex changed. */
    if (!awaited(pool, word, caller)) futex_wait(pool, (uint32_t)(word >> 32), caller ? WAKE_CALLER : WAKE_WORKERS);
    atomic_fetch_sub(sleepers, 1);
    began = 0;
  }
}

static void* worker_main(void* argument) {
  struct gtco_worker* self = argument;
  _mm_setcsr(RUN_MXCSR);
  for (;;) {
    await(self->pool, 0);
    if (atomic_load(&self->pool->stop)) return NULL;
    participate(self->pool, self->index);
  }
}

int gtco_pool_start(gtco_pool* pool) {
  atomic_store(&pool->word, make_word(0, STEP_IDLE));
  if (pool->threads == 1 || !pool->has_parallel_step) return 0;
  if (!pool->workers) pool->workers = calloc((size_t)pool->threads, sizeof *pool->workers);
  if (!pool->task_ns) pool->task_ns = calloc((size_t)pool->num_steps, sizeof *pool->task_ns);
  if (!pool->workers || !pool->task_ns) return ENOMEM;
  /* The program's signals must go to its own threads. */
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  int error = 0;
  for (pool->started = 0; pool->started < pool->threads - 1; ++pool->started) {
    struct gtco_worker* w = &pool->workers[pool->started + 1];
    w->pool = pool;
    w->index = pool->started + 1;
    error = pthread_create(&w->thread, NULL, worker_main, w);
    if (error) break;
    pthread_setname_np(w->thread, "gtco-worker");
  }
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  if (error) gtco_pool_stop(pool);
  return error;
}

void gtco_pool_stop(gtco_pool* pool) {
  atomic_store(&pool->stop, 1);
  publish(pool, make_word(generation_of(atomic_load(&pool->word)) + 1, STEP_IDLE), WAKE_WORKERS);
  for (int i = 0; i < pool->started; ++i) pthread_join(pool->workers[i + 1].thread, NULL);
  free(pool->workers);
  free((void*)pool->task_ns);
  pool->workers = NULL;
  pool->task_ns = NULL;
  pool->started = 0;
  atomic_store(&pool->stop, 0);
}

int gtco_pool_run(gtco_pool* pool, double* step_seconds) {
  const int parallel = pool->threads > 1 && pool->has_parallel_step;
  if (parallel && pool->started != pool->threads - 1) {
    int error = gtco_pool_start(pool);
    if (error) return error;
  }
  const unsigned mode = _mm_getcsr();
  _mm_setcsr(RUN_MXCSR);
  pool->step_seconds = step_seconds;
  if (step_seconds) pool->step_began_ns = now_ns();
  if (!parallel) {
    for (uint32_t step = 0; (int)step < pool->num_steps; ++step) {
      run_tasks(pool, 0, step, 0, pool->steps[step].tasks);
      record(pool, step);
    }
  } else {
    uint32_t generation = generation_of(atomic_load_explicit(&pool->word, memory_order_relaxed)) + 1;
    if (pool->steps[0].tasks == 1) {
      /* Sleepers wake up while the caller runs the first steps. */
      publish(pool, make_word(generation, STEP_SERIAL), WAKE_WORKERS);
      advance(pool, 0, 0);
    } else {
      atomic_store_explicit(&pool->done, 0, memory_order_relaxed);
      publish(pool, make_word(generation, 0), WAKE_WORKERS);
    }
    while (step_of(atomic_load_explicit(&pool->word, memory_order_acquire)) != STEP_IDLE) {
      participate(pool, 0);
      await(pool, 1);
    }
  }
  pool->step_seconds = NULL;
  _mm_setcsr(mode);
  return 0;
}

void gtco_pool_after_fork(gtco_pool* pool) {
  pool->started = 0;
  atomic_store(&pool->word, make_word(0, STEP_IDLE));
  atomic_store(&pool->done, 0);
  atomic_store(&pool->sleeping_workers, 0);
  atomic_store(&pool->sleeping_caller, 0);
  atomic_store(&pool->stop, 0);
}
