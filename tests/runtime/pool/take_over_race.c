/* A thread that is looked at gets a CPU again and ends its range, just before the range would be taken over. */
#define _GNU_SOURCE
#include <time.h>
static int hooked(clockid_t clock, struct timespec* time);
#define clock_gettime hooked
#include "thread_pool.c"
#include "plain_calls.h"
#undef clock_gettime

static struct gtco_worker* loses; /* the thread whose clock is read */
static int looks;

/* A clock that stands still. At the second look the other thread ends its range. */
static int hooked(clockid_t clock, struct timespec* time) {
  (void)clock;
  time->tv_sec = time->tv_nsec = 0;
  if (++looks == 2) atomic_store(&loses->held, 0);
  return 0;
}

int main(void) {
  struct gtco_worker workers[2];
  memset(workers, 0, sizeof workers);
  gtco_pool pool;
  memset(&pool, 0, sizeof pool);
  pool.threads = 2;
  pool.workers = workers;
  loses = &workers[1];
  workers[1].step = 3, workers[1].begin = 9, workers[1].end = 11, workers[1].finished = 9;
  workers[1].held = 7;
  suspect seen = {1, 0, 0};
  range r = {0, 0, 0, 0};
  if (take_over(&pool, 0, &seen, &r)) return 1; /* the first look */
  if (take_over(&pool, 0, &seen, &r)) return 2; /* the other thread was quicker */
  if (looks != 2) return 3;
  return r.step || r.begin || r.end || r.finished ? 4 : 0;
}
