/* The GPU runtime on the fake driver, to be watched by AddressSanitizer or ThreadSanitizer: `stress LIBRARY THREADS ROUNDS`.
 * First every call of the driver fails in turn, while handles are opened, run in all ways and closed. Then threads open,
 * run and close handles on two devices, and runs of one handle that all share may be busy. Both kinds of launches are
 * used, so the library must know both. Prints the faults. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "gtco_api.h"
#include "stress.h"

#define FUNCTIONS(F) F(open) F(close) F(run) F(run_on) F(profile) F(last_error) F(num_steps)
#define DECLARE(name) static __typeof__(&gtco_##name) p_##name;
FUNCTIONS(DECLARE)

enum { ROWS = 96, COLUMNS = 40, ITEMS = ROWS * COLUMNS };

typedef struct {
  float x[ITEMS];
  int8_t mask[ROWS];
  float y[ITEMS], total[COLUMNS];
} tensors;

static tensors wanted;
static gtco_model* shared;
static int rounds;
static atomic_int seen_busy;

static void fill(tensors* t) {
  memset(t, 0, sizeof *t);
  for (int i = 0; i < ITEMS; ++i) t->x[i] = (float)(i % 17) - 8;
  for (int i = 0; i < ROWS; ++i) t->mask[i] = (int8_t)(i % 5 - 2);
}

static void compare(const tensors* t) {
  CHECK(memcmp(t->y, wanted.y, sizeof t->y) == 0 && memcmp(t->total, wanted.total, sizeof t->total) == 0, "outputs");
}

/* Opens, runs in all ways and closes, until something fails; gives the status of the failure. */
static gtco_status all_ways(int device, gtco_launches_option launches, tensors* host) {
  gtco_model* model;
  double seconds[8];
  gtco_options options = {.device = device, .launches = launches};
  gtco_status status = p_open(&options, &model);
  if (status != GTCO_OK) {
    CHECK(model == NULL && *p_last_error(NULL), "a failed open");
    return status;
  }
  const void* inputs[] = {host->x, host->mask};
  void* outputs[] = {host->y, host->total};
  const uintptr_t on[] = {fake_alloc(device, sizeof host->x), fake_alloc(device, sizeof host->mask),
                          fake_alloc(device, sizeof host->y), fake_alloc(device, sizeof host->total)};
  fake_write(on[0], host->x, sizeof host->x);
  fake_write(on[1], host->mask, sizeof host->mask);
  const void* device_inputs[] = {(void*)on[0], (void*)on[1]};
  void* device_outputs[] = {(void*)on[2], (void*)on[3]};
  /* a run of zeros on another stream, which may not meet the first one in the arena */
  const uintptr_t zero = fake_alloc(device, sizeof host->x), apart = fake_alloc(device, 2 * sizeof host->y);
  const void* zeros[] = {(void*)zero, (void*)zero};
  void* elsewhere[] = {(void*)apart, (void*)(apart + sizeof host->y)};
  memset(host->y, 0, sizeof host->y);
  fake_write(zero, host->y, sizeof host->y);
  void *stream = fake_stream(device, 1), *other = fake_stream(device, 1);
  status = p_run(model, inputs, outputs);
  if (status == GTCO_OK) {
    compare(host);
    status = p_run_on(model, device_inputs, device_outputs, stream);
  }
  if (status == GTCO_OK) status = p_run_on(model, zeros, elsewhere, other);
  if (status == GTCO_OK) status = p_profile(model, device_inputs, outputs, seconds);
  if (status == GTCO_OK) {
    compare(host);
    fake_sync(stream, device);
    fake_read(host->y, on[2], sizeof host->y);
    fake_read(host->total, on[3], sizeof host->total);
    compare(host);
  }
  CHECK(status == GTCO_OK || *p_last_error(model), "no message");
  p_close(model);
  return status;
}

static void fail_each_call(gtco_launches_option launches) {
  tensors* host = malloc(sizeof *host);
  for (long n = 1;; ++n) {
    fake_reset(2, 8, 0, (unsigned)n);
    fill(host);
    fail_call(n);
    gtco_status status = all_ways((int)(n % 2), launches, host);
    if (!check_failed_call(status)) break;
    CHECK(n < 1000, "it ends");
  }
  free(host);
}

static void* work(void* argument) {
  const int number = (int)(intptr_t)argument;
  tensors* host = malloc(sizeof *host);
  for (int r = 0; r < rounds; ++r) {
    fill(host);
    const gtco_launches_option launches = r / 2 % 2 ? GTCO_LAUNCHES_GRAPH : GTCO_LAUNCHES_PERSISTENT;
    CHECK(all_ways((number + r) % 2, launches, host) == GTCO_OK, p_last_error(NULL));
    const void* inputs[] = {host->x, host->mask};
    void* outputs[] = {host->y, host->total};
    memset(host->y, 0, sizeof host->y);
    gtco_status status = p_run(shared, inputs, outputs);
    CHECK(status == GTCO_OK || status == GTCO_ERROR_BUSY, "the shared handle");
    if (status == GTCO_OK) compare(host);
    else atomic_fetch_add(&seen_busy, 1);
  }
  free(host);
  return NULL;
}

int main(int count, char** arguments) {
  CHECK(count == 4, "usage: stress LIBRARY THREADS ROUNDS");
  void* library = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
  CHECK(library, dlerror());
#define FIND(name) p_##name = dlsym(library, "gtco_" #name);
  FUNCTIONS(FIND)
  const int threads = atoi(arguments[2]);
  rounds = atoi(arguments[3]);

  gtco_model* model;
  fake_reset(2, 8, 0, 1);
  fill(&wanted);
  CHECK(p_open(NULL, &model) == GTCO_OK, p_last_error(NULL));
  CHECK(p_run(model, (const void*[]){wanted.x, wanted.mask}, (void*[]){wanted.y, wanted.total}) == GTCO_OK, "first run");
  CHECK(wanted.total[0] > 0, "outputs of the first run");  /* otherwise none could differ from them */
  p_close(model);
  fail_each_call(GTCO_LAUNCHES_GRAPH);
  fail_each_call(GTCO_LAUNCHES_PERSISTENT);

  fake_reset(2, 8, 0, 1);
  CHECK(p_open(NULL, &shared) == GTCO_OK, p_last_error(NULL));
  pthread_t thread[64];
  for (int t = 0; t < threads; ++t) pthread_create(&thread[t], NULL, work, (void*)(intptr_t)t);
  for (int t = 0; t < threads; ++t) pthread_join(thread[t], NULL);
  p_close(shared);
  CHECK(!*fake_faults(), fake_faults());
  CHECK(!*fake_live(), fake_live());
  dlclose(library);
  printf("done\n");
  return 0;
}
