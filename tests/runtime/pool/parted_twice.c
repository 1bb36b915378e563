/* Two threads find at the same time that a worker shares its CPU. */
#define _GNU_SOURCE
#include <sched.h>
static int asked(pid_t id, size_t size, cpu_set_t* mask);
static int moved(pid_t id, size_t size, const cpu_set_t* mask);
#define sched_getaffinity asked
#define sched_setaffinity moved
#include "thread_pool.c"
#include "plain_calls.h"
#undef sched_getaffinity
#undef sched_setaffinity

static gtco_pool pool;
static cpu_set_t now;
static int moves, inside;

static int asked(pid_t id, size_t size, cpu_set_t* mask) {
  (void)id, (void)size;
  *mask = now;
  return 0;
}

/* The second thread comes while the first has narrowed what the worker may use. */
static int moved(pid_t id, size_t size, const cpu_set_t* mask) {
  (void)id, (void)size;
  now = *mask;
  if (++moves == 1) {
    part(&pool, 1);
    inside = moves - 1;
  }
  return 0;
}

int main(void) {
  struct gtco_worker workers[2];
  const volatile uint32_t cpu = 0;
  memset(workers, 0, sizeof workers);
  pool.threads = 2;
  pool.workers = workers;
  workers[0].cpu = workers[1].cpu = &cpu;
  workers[1].id = 1;
  CPU_SET(0, &now), CPU_SET(1, &now);
  for (int round = 1; round <= 2; ++round) {
    part(&pool, 1);
    if (moves != 2 * round || inside) return round; /* away, and free again */
    if (CPU_COUNT(&now) != 2) return 3;
  }
  return 0;
}
