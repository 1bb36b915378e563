/* The course of a run: the caller publishes the first step; every thread takes ranges of its tasks until none is left;
 * the thread that finishes a step's last task publishes the next step. Barriers wait only for tasks, not for threads: a
 * worker that is late, asleep or without a CPU holds nobody up unless it holds tasks. Those of a thread that has no CPU
 * are taken over by a thread that waits for them. Workers are woken once a run.
 *
 * Affinity scheduling (Markatos and LeBlanc, 1994): a thread begins with its own share of a step's tasks, the same part
 * of them in every step. So it finds in its own caches what it wrote in the step before, as far as both steps cut their
 * tensors alike. When its share is done, it takes tasks of the others'. */
#define _GNU_SOURCE
#include "thread_pool.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "cpu/count.h"
#include "cpu/mode.h"
#include "restart.h"

#define STEP_BITS 20
#define STEP_IDLE 0xfffffu   /* no run under way */
#define STEP_SERIAL 0xffffeu /* a run is under way, nothing to take yet */
#define WAKE_WORKERS 1u
#define WAKE_CALLER 2u
#define POLLS_BETWEEN_CLOCKS 32
#define NS_BEFORE_YIELD 50000 /* then a spinning thread yields its CPU at every look at the clock */
#define NS_BEFORE_LOOK 20000   /* then a waiting thread looks whether those it waits for have a CPU */
#define NS_BETWEEN_LOOKS 10000 /* a thread whose CPU time stays the same from one look to the next has none */
#define LONG_NS 4000000 /* a thread's turn of a CPU that it shares with another process, about */
#define UNBROKEN_RANGES 20

struct gtco_worker {
  pthread_t thread; /* unused in the first, which is the caller */
  gtco_pool* pool;
  int index;
  uint32_t over; /* the pool's word when no task was left */
  _Atomic clockid_t clock; /* its CPU time */
  _Atomic pid_t id; /* 0: unknown, as the caller's */
  const volatile uint32_t* _Atomic cpu; /* where it is */
  uint64_t tickets; /* so many ranges it has begun that others may take over */
  /* The ticket of the range under way; 0: none that others may take over. Who sets it to 0 goes on with the range, and
   * reports it and the `finished` tasks of the same step that the thread did before. */
  _Alignas(64) _Atomic uint64_t held;
  _Atomic uint32_t step;
  _Atomic int64_t begin, end, finished;
  /* (the pool's word : 32, tasks taken : 32) of its share. Of another word, nothing was taken yet: so nobody has to
   * begin the shares of a step, and a thread may come late, or miss whole runs, and can still only take a task that is
   * free. */
  _Alignas(64) _Atomic uint64_t share;
};

typedef struct {
  uint32_t step;
  int64_t begin, end;
  int64_t finished; /* tasks of the step that are done and not reported */
} range;

static inline uint32_t step_of(uint32_t word) { return word & STEP_IDLE; }
static inline uint32_t generation_of(uint32_t word) { return word >> STEP_BITS; }
static inline uint32_t make_word(uint32_t generation, uint32_t step) { return generation << STEP_BITS | step; }

/* -1 if the system refuses that clock, as a sandbox may refuse those of other threads. */
static int64_t read_ns(clockid_t clock) {
  struct timespec t;
  return clock_gettime(clock, &t) == 0 ? (int64_t)t.tv_sec * 1000000000 + t.tv_nsec : -1;
}

static void set_clock(struct gtco_worker* worker, pthread_t thread) {
  clockid_t clock;
  if (pthread_getcpuclockid(thread, &clock) == 0) atomic_store_explicit(&worker->clock, clock, memory_order_relaxed);
}

static int64_t now_ns(void) { return read_ns(CLOCK_MONOTONIC); }

static void futex_wait(gtco_pool* pool, uint32_t expected, uint32_t bits) {
  syscall(SYS_futex, (uint32_t*)&pool->word, FUTEX_WAIT_BITSET_PRIVATE, expected, NULL, NULL, bits);
}

static void futex_wake(gtco_pool* pool, uint32_t bits) {
  syscall(SYS_futex, (uint32_t*)&pool->word, FUTEX_WAKE_BITSET_PRIVATE, INT_MAX, NULL, NULL, bits);
}

/* Sequentially consistent against the counters of sleepers in await(): either the sleeper sees the new word (the futex
 * compares it), or we see the sleeper. */
static void publish(gtco_pool* pool, uint32_t word, uint32_t whom) {
  atomic_exchange(&pool->word, word);
  uint32_t bits = 0;
  if (whom & WAKE_WORKERS && atomic_load(&pool->sleeping_workers)) bits |= WAKE_WORKERS;
  if (whom & WAKE_CALLER && atomic_load(&pool->sleeping_caller)) bits |= WAKE_CALLER;
  if (bits) futex_wake(pool, bits);
}

/* Publishes a step of several tasks, of which none is done. */
static void publish_step(gtco_pool* pool, uint32_t generation, uint32_t step, uint32_t whom) {
  const uint32_t tasks = pool->steps[step].tasks, threads = (uint32_t)pool->threads;
  atomic_store_explicit(&pool->done, 0, memory_order_relaxed); /* both are released by the publication */
  atomic_store_explicit(&pool->shares, tasks < threads ? tasks : threads, memory_order_relaxed);
  publish(pool, make_word(generation, step), whom);
}

/* The first task of a thread's share of so many, or the one behind the last thread's. */
static inline uint32_t share_begin(uint32_t tasks, int thread, int threads) {
  return (uint32_t)((uint64_t)tasks * (uint32_t)thread / (uint32_t)threads);
}

/* Takes tasks of the share of `owner` in the step of `word`, if any are left. Guided self-scheduling (Polychronopoulos
 * and Kuck, 1987): the first ranges are long, for locality, the last are single tasks, so that threads end within one
 * task of each other. The owner takes half of what is left, others leave it more. */
static int take_of(gtco_pool* pool, uint32_t word, int owner, int thread, range* r) {
  const uint32_t tasks = pool->steps[step_of(word)].tasks, first = share_begin(tasks, owner, pool->threads);
  const uint32_t size = share_begin(tasks, owner + 1, pool->threads) - first;
  const uint32_t divisor = owner == thread ? 2u : 2u * (uint32_t)pool->threads;
  _Atomic uint64_t* share = &pool->workers[owner].share;
  uint64_t seen = atomic_load_explicit(share, memory_order_acquire);
  for (;;) {
    const uint32_t taken = (uint32_t)(seen >> 32) == word ? (uint32_t)seen : 0;
    if (taken == size) return 0;
    /* The step is current after the load of the share, which therefore is of this step or an older one. It stays current
     * until the share's tasks are done, so success means that these are free, whatever happened since the load. */
    if (atomic_load_explicit(&pool->word, memory_order_acquire) != word) return 0;
    const uint32_t n = (size - taken) / divisor ? (size - taken) / divisor : 1;
    if (atomic_compare_exchange_weak_explicit(share, &seen, (uint64_t)word << 32 | (taken + n), memory_order_acq_rel,
                                              memory_order_acquire)) {
      if (taken + n == size) atomic_fetch_sub_explicit(&pool->shares, 1, memory_order_relaxed);
      *r = (range){step_of(word), (int64_t)first + taken, (int64_t)first + taken + n, r->finished};
      return 1;
    }
  }
}

/* Takes a range of tasks: of the thread's own share, else of the next thread's that has any. */
static int take(gtco_pool* pool, int thread, range* r) {
  uint32_t word = atomic_load_explicit(&pool->word, memory_order_acquire);
  for (;;) {
    if (step_of(word) >= STEP_SERIAL) return 0;
    int owner = thread, left = pool->threads;
    do {
      if (take_of(pool, word, owner, thread, r)) return 1;
      if (++owner == pool->threads) owner = 0;
    } while (--left && atomic_load_explicit(&pool->shares, memory_order_relaxed));
    const uint32_t now = atomic_load_explicit(&pool->word, memory_order_acquire);
    if (now == word) {
      pool->workers[thread].over = word;
      return 0;
    }
    word = now;
  }
}

/* A word comes back after 4096 runs. A share that nobody touched in all that time would look as if it were of the step:
 * it gets a word of no step. The count makes it different from that of the time before, for a thread that is late. */
static void clear_shares(gtco_pool* pool) {
  ++pool->cleared;
  pool->workers[0].over = make_word(0, STEP_IDLE);
  for (int i = 0; i < pool->threads; ++i)
    atomic_store(&pool->workers[i].share, (uint64_t)make_word(0, STEP_IDLE) << 32 | pool->cleared);
}

static void run_tasks(gtco_pool* pool, int thread, const range* r) {
  const gtco_step* s = &pool->steps[r->step];
  s->kernel(pool->args + s->first_ref, pool->workspaces + thread * pool->workspace_stride, r->begin, r->end);
}

/* Runs a range in such a way that another thread may take it over. Returns 0 if one did. A call that ended because the
 * CPU was taken away, while nobody waited for it, is repeated as a whole. If that takes long, so are the next
 * ranges of the step: tasks that outlast a turn of the CPU would never end. */
static int run_range(gtco_pool* pool, int thread, const range* r) {
  const gtco_step* s = &pool->steps[r->step];
  if (!pool->can_restart || !s->closed) {
    run_tasks(pool, thread, r);
    return 1;
  }
  _Atomic uint8_t* unbroken = &pool->unbroken[r->step];
  const uint8_t left = atomic_load_explicit(unbroken, memory_order_relaxed);
  if (left) {
    atomic_store_explicit(unbroken, left - 1, memory_order_relaxed);
    run_tasks(pool, thread, r);
    return 1;
  }
  struct gtco_worker* self = &pool->workers[thread];
  const uint64_t ticket = ++self->tickets;
  atomic_store_explicit(&self->step, r->step, memory_order_relaxed);
  atomic_store_explicit(&self->begin, r->begin, memory_order_relaxed);
  atomic_store_explicit(&self->end, r->end, memory_order_relaxed);
  atomic_store_explicit(&self->finished, r->finished, memory_order_relaxed);
  atomic_store_explicit(&self->held, ticket, memory_order_release);
  const int done = gtco_call_restartable(s->kernel, pool->args + s->first_ref,
                                         pool->workspaces + thread * pool->workspace_stride, r->begin, r->end,
                                         &self->held, ticket);
  uint64_t mine = ticket;
  if (!atomic_compare_exchange_strong(&self->held, &mine, 0)) return 0;
  if (!done) {
    const int64_t began = read_ns(self->clock);
    run_tasks(pool, thread, r);
    if (read_ns(self->clock) - began > LONG_NS) atomic_store_explicit(unbroken, UNBROKEN_RANGES, memory_order_relaxed);
  }
  return 1;
}

static void record(gtco_pool* pool, uint32_t step) {
  if (!pool->step_seconds) return;
  int64_t now = now_ns();
  pool->step_seconds[step - (uint32_t)pool->first_step] = (double)(now - pool->step_began_ns) * 1e-9;
  pool->step_began_ns = now;
}

/* Begins at `step`: runs steps of one task in this thread, whose caches have the data, and publishes the first step
 * that has more tasks. A thread that takes over such a task goes on in its place. */
static void advance(gtco_pool* pool, int thread, uint32_t step) {
  for (; (int)step < pool->end_step && pool->steps[step].tasks == 1; ++step) {
    if (!run_range(pool, thread, &(range){step, 0, 1, 0})) return;
    record(pool, step);
  }
  const uint32_t generation = generation_of(atomic_load_explicit(&pool->word, memory_order_relaxed));
  if ((int)step < pool->end_step)
    publish_step(pool, generation, step, WAKE_WORKERS | WAKE_CALLER);
  else
    publish(pool, make_word(generation, STEP_IDLE), WAKE_CALLER);
}

/* Works until there is no task to take; begins with the range `r` if it has tasks. Finished tasks are reported once a
 * step, not once a range: a step is over only when all are reported, so ranges taken before the report belong to one
 * step. */
static void participate(gtco_pool* pool, int thread, range* r) {
  int given = r->begin < r->end;
  for (;; r->finished = 0) {
    int mine = 1;
    while (mine && (given || take(pool, thread, r))) {
      given = 0;
      mine = run_range(pool, thread, r);
      r->finished += r->end - r->begin;
    }
    if (!mine) continue;
    if (!r->finished) return;
    const gtco_step* s = &pool->steps[r->step];
    if (s->tasks == 1 ||
        atomic_fetch_add_explicit(&pool->done, r->finished, memory_order_acq_rel) + r->finished == (int64_t)s->tasks) {
      record(pool, r->step);
      advance(pool, thread, r->step + 1);
    }
  }
}

static void move_apart(gtco_pool* pool, int thread) {
  const pid_t id = atomic_load_explicit(&pool->workers[thread].id, memory_order_acquire);
  cpu_set_t allowed, others;
  if (!id || sched_getaffinity(id, sizeof allowed, &allowed) != 0) return;
  others = allowed;
  for (int i = 0; i < pool->threads; ++i) {
    const volatile uint32_t* cpu = atomic_load_explicit(&pool->workers[i].cpu, memory_order_acquire);
    if (i != thread && cpu && *cpu < CPU_SETSIZE) CPU_CLR(*cpu, &others);
  }
  if (CPU_COUNT(&others) == 0) return;
  sched_setaffinity(id, sizeof others, &others);
  sched_setaffinity(id, sizeof allowed, &allowed);
}

/* Moves a worker from the CPU that it shares with another thread of the pool. The scheduler would leave them there while
 * a process keeps another CPU busy. Only one thread does so at a time: a second one would take the CPUs that the worker
 * may use for this moment for all that it may use. */
static void part(gtco_pool* pool, int thread) {
  if (atomic_exchange(&pool->parting, 1)) return;
  move_apart(pool, thread);
  atomic_store(&pool->parting, 0);
}

/* What a waiting thread knows of one that it waits for. */
typedef struct {
  int thread;
  uint64_t ticket; /* 0: nothing */
  int64_t cpu_ns;
} suspect;

/* Takes the range of a thread that has no CPU. Two looks at the same range are needed to see that. */
static int take_over(gtco_pool* pool, int thread, suspect* seen, range* r) {
  struct gtco_worker* other = &pool->workers[seen->thread];
  uint64_t ticket = atomic_load_explicit(&other->held, memory_order_acquire);
  if (seen->thread != thread && ticket) {
    const int64_t cpu_ns = read_ns(other->clock);
    if (seen->ticket != ticket) {
      seen->ticket = ticket;
      seen->cpu_ns = cpu_ns;
      return 0;
    }
    if (cpu_ns >= 0 && cpu_ns == seen->cpu_ns && gtco_can_end_calls()) {
      const range theirs = {atomic_load_explicit(&other->step, memory_order_relaxed),
                            atomic_load_explicit(&other->begin, memory_order_relaxed),
                            atomic_load_explicit(&other->end, memory_order_relaxed),
                            atomic_load_explicit(&other->finished, memory_order_relaxed)};
      seen->ticket = 0;
      /* Success means that the range is that of the ticket. Else the other thread goes on with it. */
      if (!atomic_compare_exchange_strong(&other->held, &ticket, 0)) return 0;
      *r = theirs;
      if (*other->cpu == *pool->workers[thread].cpu) part(pool, seen->thread ? seen->thread : thread);
      gtco_end_calls();
      return 1;
    }
  }
  seen->ticket = 0;
  seen->thread = (seen->thread + 1) % pool->threads;
  return 0;
}

static int awaited(const gtco_pool* pool, uint32_t word, int thread) {
  if (step_of(word) < STEP_SERIAL && word != pool->workers[thread].over) return 1;
  return thread ? atomic_load_explicit(&pool->stop, memory_order_relaxed) != 0 : step_of(word) == STEP_IDLE;
}

/* Waits until there is a task to take, or the run (for the caller) or the pool (for a worker) is over. Fills `r` with the
 * tasks of another thread if it takes some over, and else with none. */
static void await(gtco_pool* pool, int thread, range* r) {
  const int caller = thread == 0;
  int64_t began = 0, looked = 0;
  suspect seen = {0, 0, 0};
  *r = (range){0, 0, 0, 0};
  for (;;) {
    for (int i = 0; i < POLLS_BETWEEN_CLOCKS; ++i) {
      if (awaited(pool, atomic_load_explicit(&pool->word, memory_order_acquire), thread)) return;
      gtco_pause();
    }
    int64_t now = now_ns();
    if (!began) began = now;
    if (pool->can_restart && now - began > NS_BEFORE_LOOK && now - looked > NS_BETWEEN_LOOKS &&
        step_of(atomic_load(&pool->word)) != STEP_IDLE) {
      looked = now;
      if (take_over(pool, thread, &seen, r)) return;
    }
    if (now - began < pool->spin_ns) {
      if (pool->crowded || now - began > NS_BEFORE_YIELD) sched_yield();
      continue;
    }
    _Atomic int32_t* sleepers = caller ? &pool->sleeping_caller : &pool->sleeping_workers;
    const uint32_t word = atomic_load(&pool->word);
    atomic_fetch_add(sleepers, 1);
    /* stop is set before its publication, so a worker that misses it here finds the futex changed. */
    if (!awaited(pool, word, thread)) futex_wait(pool, word, caller ? WAKE_CALLER : WAKE_WORKERS);
    atomic_fetch_sub(sleepers, 1);
    began = 0;
  }
}

static void* worker_main(void* argument) {
  struct gtco_worker* self = argument;
  range r;
  atomic_store_explicit(&self->cpu, gtco_this_cpu(), memory_order_release);
  atomic_store_explicit(&self->id, (pid_t)syscall(SYS_gettid), memory_order_release);
  gtco_stay_on_fast_cpus(self->pool->threads);
  gtco_enter_mode();
  for (;;) {
    await(self->pool, self->index, &r);
    if (atomic_load(&self->pool->stop)) return NULL;
    participate(self->pool, self->index, &r);
  }
}

int gtco_pool_start(gtco_pool* pool) {
  atomic_store(&pool->word, make_word(0, STEP_IDLE));
  if (pool->threads == 1 || !pool->has_parallel_step) return 0;
  const size_t bytes = (size_t)pool->threads * sizeof *pool->workers;
  if (!pool->workers && (pool->workers = aligned_alloc(_Alignof(struct gtco_worker), bytes)))
    memset(pool->workers, 0, bytes);
  if (!pool->unbroken) pool->unbroken = calloc((size_t)pool->num_steps, sizeof *pool->unbroken);
  if (!pool->workers || !pool->unbroken) return ENOMEM;
  /* Threads that share a CPU because there are too many of them yield it to each other instead. */
  if (!pool->can_restart) pool->can_restart = !pool->crowded && gtco_begin_restarts(pool->steps, pool->num_steps);
  /* The program's signals must go to its own threads, but those of a fault go to the thread that has it. */
  static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS};
  sigset_t blocked, before;
  sigfillset(&blocked);
  for (size_t i = 0; i < sizeof faults / sizeof *faults; ++i) sigdelset(&blocked, faults[i]);
  pthread_sigmask(SIG_SETMASK, &blocked, &before);
  int error = 0;
  for (pool->started = 0; pool->started < pool->threads - 1; ++pool->started) {
    struct gtco_worker* w = &pool->workers[pool->started + 1];
    w->pool = pool;
    w->index = pool->started + 1;
    error = pthread_create(&w->thread, NULL, worker_main, w);
    if (error) break;
    set_clock(w, w->thread);
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
  free((void*)pool->unbroken);
  if (pool->can_restart) gtco_no_more_restarts();
  pool->can_restart = 0;
  pool->workers = NULL;
  pool->unbroken = NULL;
  pool->started = 0;
  atomic_store(&pool->stop, 0);
}

int gtco_pool_run(gtco_pool* pool, double* step_seconds) {
  const int parallel = pool->threads > 1 && pool->has_parallel_step;
  if (parallel && pool->started != pool->threads - 1) {
    int error = gtco_pool_start(pool);
    if (error) return error;
  }
  const gtco_mode mode = gtco_enter_mode();
  pool->step_seconds = step_seconds;
  if (step_seconds) pool->step_began_ns = now_ns();
  if (!parallel) {
    for (uint32_t step = (uint32_t)pool->first_step; (int)step < pool->end_step; ++step) {
      run_tasks(pool, 0, &(range){step, 0, pool->steps[step].tasks, 0});
      record(pool, step);
    }
  } else {
    range r = {0, 0, 0, 0};
    set_clock(&pool->workers[0], pthread_self());
    atomic_store_explicit(&pool->workers[0].cpu, gtco_this_cpu(), memory_order_release);
    const uint32_t word = atomic_load_explicit(&pool->word, memory_order_relaxed);
    const uint32_t generation = generation_of(word + make_word(1, 0)), first = (uint32_t)pool->first_step;
    if (!generation) clear_shares(pool);
    if (pool->steps[first].tasks == 1) {
      /* Sleepers wake up while the caller runs the first steps. */
      publish(pool, make_word(generation, STEP_SERIAL), WAKE_WORKERS);
      advance(pool, 0, first);
    } else {
      publish_step(pool, generation, first, WAKE_WORKERS);
    }
    while (step_of(atomic_load_explicit(&pool->word, memory_order_acquire)) != STEP_IDLE) {
      participate(pool, 0, &r);
      await(pool, 0, &r);
    }
  }
  pool->step_seconds = NULL;
  gtco_leave_mode(mode);
  return 0;
}

void gtco_pool_after_fork(gtco_pool* pool) {
  pool->started = 0;
  if (pool->workers) memset(pool->workers, 0, (size_t)pool->threads * sizeof *pool->workers);
  atomic_store(&pool->word, make_word(0, STEP_IDLE));
  atomic_store(&pool->done, 0);
  atomic_store(&pool->sleeping_workers, 0);
  atomic_store(&pool->sleeping_caller, 0);
  atomic_store(&pool->stop, 0);
  atomic_store(&pool->parting, 0);
}
