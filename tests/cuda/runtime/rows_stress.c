/* The GPU runtime of a model of several numbers of rows (rows.py), to be watched by AddressSanitizer:
 * `rows_stress LIBRARY ROWS...`. Every call of the driver fails in turn, while a handle is opened, run at each of these
 * numbers on the host and on the device, and closed. Tensors of the host are no larger than they must be. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "gtco_api.h"
#include "stress.h"

#define FUNCTIONS(F) F(open) F(close) F(set_shapes) F(num_steps) F(run) F(run_shapes) F(run_on) F(profile) F(last_error)
#define DECLARE(name) static __typeof__(&gtco_##name) p_##name;
FUNCTIONS(DECLARE)

enum { COLUMNS = 40 };

typedef struct {
  int rows;
  float *x, *y, *wanted;
  int8_t* mask;
} tensors;

static size_t bytes(const tensors* t) { return (size_t)t->rows * COLUMNS * sizeof *t->x; }

static tensors made(int rows) {
  tensors t = {.rows = rows};
  t.x = malloc(bytes(&t));
  t.y = malloc(bytes(&t));
  t.wanted = malloc(bytes(&t));
  t.mask = malloc((size_t)rows);
  for (int i = 0; i < rows * COLUMNS; ++i) {
    const float scale = -1 + 3.0f * (float)(i % COLUMNS) / (COLUMNS - 1);
    t.x[i] = (float)(i % 17) - 8;
    t.mask[i / COLUMNS] = (int8_t)(i / COLUMNS % 5 - 2);
    const float value = t.x[i] * scale + t.mask[i / COLUMNS];
    t.wanted[i] = value > 0 ? value : 0;
  }
  return t;
}

static void compare(const tensors* t) {
  for (int i = 0; i < t->rows * COLUMNS; ++i) {
    const float difference = t->y[i] - t->wanted[i];
    CHECK(difference < 1e-5f && difference > -1e-5f, "an output");
  }
  memset(t->y, 0xff, bytes(t));
}

/* Runs in all ways at this number of rows, until something fails. */
static gtco_status run_at(gtco_model* model, const tensors* t) {
  const int64_t x[] = {t->rows, COLUMNS}, mask[] = {t->rows};
  const int64_t* shapes[] = {x, mask};
  const void* inputs[] = {t->x, t->mask};
  void* outputs[] = {t->y};
  const uintptr_t on[] = {fake_alloc(0, bytes(t)), fake_alloc(0, (size_t)t->rows), fake_alloc(0, bytes(t))};
  const void* device_inputs[] = {(void*)on[0], (void*)on[1]};
  void* device_outputs[] = {(void*)on[2]};
  fake_write(on[0], t->x, bytes(t));
  fake_write(on[1], t->mask, (size_t)t->rows);
  gtco_status status = p_run_shapes(model, shapes, inputs, outputs);
  if (status == GTCO_OK) {
    compare(t);
    status = p_run_on(model, device_inputs, device_outputs, NULL);
  }
  if (status != GTCO_OK) return status;
  fake_sync(NULL, 0);
  fake_read(t->y, on[2], bytes(t));
  compare(t);
  double* seconds = malloc((size_t)p_num_steps(model) * sizeof *seconds);
  status = p_profile(model, device_inputs, outputs, seconds);
  if (status == GTCO_OK) compare(t);
  free(seconds);
  return status;
}

static gtco_status all_ways(const tensors* every, int count) {
  gtco_model* model;
  gtco_status status = p_open(NULL, &model);
  if (status != GTCO_OK) {
    CHECK(model == NULL && *p_last_error(NULL), "a failed open");
    return status;
  }
  for (int n = 0; n < count && status == GTCO_OK; ++n) status = run_at(model, &every[n]);
  CHECK(status == GTCO_OK || *p_last_error(model), "no message");
  const int64_t none[] = {0, COLUMNS};
  const int64_t* shapes[] = {none, none};
  CHECK(p_set_shapes(model, shapes) == GTCO_ERROR_ARGUMENT, "no rows");
  p_close(model);
  return status;
}

int main(int count, char** arguments) {
  CHECK(count > 2, "usage: rows_stress LIBRARY ROWS...");
  void* library = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
  CHECK(library, dlerror());
#define FIND(name) p_##name = dlsym(library, "gtco_" #name);
  FUNCTIONS(FIND)
  const int shapes = count - 2;
  tensors* every = malloc((size_t)shapes * sizeof *every);
  for (int n = 0; n < shapes; ++n) every[n] = made(atoi(arguments[2 + n]));
  fake_reset(1, 8, 0, 1);
  CHECK(all_ways(every, shapes) == GTCO_OK, "without a failure");
  for (long n = 1;; ++n) {
    fake_reset(1, 8, 0, (unsigned)n);
    fail_call(n);
    const gtco_status status = all_ways(every, shapes);
    if (!check_failed_call(status)) break;
    CHECK(n < 10000, "it ends");
  }
  for (int n = 0; n < shapes; ++n) {
    free(every[n].x);
    free(every[n].y);
    free(every[n].wanted);
    free(every[n].mask);
  }
  free(every);
  dlclose(library);
  printf("done\n");
  return 0;
}
