/* sizes LIBRARY CASES ROUNDS: runs a library of many sizes in two threads, each with a handle of its own, at another
 * size in every call. CASES has the inputs and the wanted outputs of each size (test_many_sizes.py writes it). Between
 * calls it asks for sizes that the library does not have; these are refused, and the handle stays as it is. Prints the
 * nanoseconds of a change of shapes, and of a call whose shapes stand beside one without shapes. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "gtco_api.h"

#define MOST 16 /* tensors */
#define REQUIRE(condition, ...)                                  \
  do {                                                           \
    if (!(condition)) fprintf(stderr, __VA_ARGS__), fail(); \
  } while (0)

typedef struct {
  const int64_t* shapes[MOST];
  int64_t ndim[MOST], bytes[MOST];
  const void* inputs[MOST];
  const void* wanted[MOST];
} sizes;

static void fail(void) {
  fputc('\n', stderr);
  exit(1);
}

static int64_t many, num_inputs, num_outputs, rounds, largest[MOST];
static sizes* every;
static gtco_status (*open_)(const gtco_options*, gtco_model**);
static gtco_status (*set_shapes)(gtco_model*, const int64_t* const*);
static gtco_status (*run)(gtco_model*, const void* const*, void* const*);
static gtco_status (*run_shapes)(gtco_model*, const int64_t* const*, const void* const*, void* const*);
static const char* (*last_error)(const gtco_model*);
static void (*close_)(gtco_model*);

static void read_cases(const char* path) {
  FILE* file = fopen(path, "rb");
  REQUIRE(file, "cannot open %s", path);
  fseek(file, 0, SEEK_END);
  const long length = ftell(file);
  rewind(file);
  char* at = aligned_alloc(64, (size_t)(length + 127) / 64 * 64);
  REQUIRE(at && fread(at, 1, (size_t)length, file) == (size_t)length, "cannot read %s", path);
  fclose(file);
  const int64_t* head = (const int64_t*)at;
  many = head[0], num_inputs = head[1], num_outputs = head[2];
  at += 24;
  every = calloc((size_t)many, sizeof *every);
  for (int64_t v = 0; v < many; ++v)
    for (int64_t i = 0; i < num_inputs + num_outputs; ++i) {
      const int64_t* h = (const int64_t*)at;
      const int64_t ndim = h[0], bytes = h[1 + ndim];
      const void* data = at + 8 * (ndim + 2);
      if (i < num_inputs) {
        every[v].ndim[i] = ndim, every[v].shapes[i] = h + 1, every[v].inputs[i] = data;
      } else {
        const int64_t o = i - num_inputs;
        every[v].wanted[o] = data, every[v].bytes[o] = bytes;
        if (bytes > largest[o]) largest[o] = bytes;
      }
      at += 8 * (ndim + 2) + (bytes + 7) / 8 * 8;
    }
}

static int64_t nanoseconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static uint32_t drawn(uint32_t* state) { return (*state = *state * 1664525u + 1013904223u) >> 8; }

static void refuses(gtco_model* model, const sizes* one, uint32_t* state) {
  static const int64_t wrong[] = {0, -1, 1LL << 40, INT64_MAX, INT64_MIN, 1999};
  int64_t dims[MOST][16];
  const int64_t* shapes[MOST];
  for (int64_t i = 0; i < num_inputs; ++i) {
    memcpy(dims[i], one->shapes[i], 8 * (size_t)one->ndim[i]);
    shapes[i] = dims[i];
  }
  const int64_t input = drawn(state) % num_inputs;
  dims[input][drawn(state) % one->ndim[input]] = wrong[drawn(state) % 6];
  REQUIRE(set_shapes(model, shapes) == GTCO_ERROR_ARGUMENT, "a wrong size was taken");
  REQUIRE(strlen(last_error(model)) > 30, "no message");
}

static void* thread(void* seed) {
  uint32_t state = (uint32_t)(uintptr_t)seed;
  gtco_model* model;
  const gtco_options options = {.num_threads = 2};
  REQUIRE(open_(&options, &model) == GTCO_OK, "cannot open");
  void* outputs[MOST];
  for (int64_t o = 0; o < num_outputs; ++o) outputs[o] = aligned_alloc(64, (size_t)(largest[o] + 63) / 64 * 64);
  int64_t v = 0;
  for (int64_t n = 0; n < rounds; ++n) {
    const sizes* one = &every[v = (v + 1 + drawn(&state) % (many - 1)) % many];
    for (int64_t o = 0; o < num_outputs; ++o) memset(outputs[o], 0xA5, (size_t)one->bytes[o]);
    gtco_status status;
    if (n % 2) {
      status = run_shapes(model, one->shapes, one->inputs, outputs);
    } else {
      status = set_shapes(model, one->shapes);
      refuses(model, one, &state);
      if (status == GTCO_OK) status = run(model, one->inputs, outputs);
    }
    REQUIRE(status == GTCO_OK, "status %d: %s", (int)status, last_error(model));
    for (int64_t o = 0; o < num_outputs; ++o)
      REQUIRE(!memcmp(outputs[o], one->wanted[o], (size_t)one->bytes[o]), "output %d differs at size number %d", (int)o,
              (int)v);
  }
  if (seed == (void*)1) { /* times, for readers */
    int64_t change = 0, least = INT64_MAX, plain = INT64_MAX;
    for (int64_t n = 0; n < 4000; ++n) {
      const sizes* one = &every[(n * 7) % many];
      const int64_t start = nanoseconds();
      set_shapes(model, one->shapes);
      change += nanoseconds() - start;
    }
    set_shapes(model, every[many - 1].shapes);
    for (int64_t n = 0; n < 2000; ++n) {
      int64_t start = nanoseconds();
      run(model, every[many - 1].inputs, outputs);
      int64_t took = nanoseconds() - start;
      if (took < plain) plain = took;
      start = nanoseconds();
      run_shapes(model, every[many - 1].shapes, every[many - 1].inputs, outputs);
      took = nanoseconds() - start;
      if (took < least) least = took;
    }
    printf("%lld ns to set other shapes; a call takes %lld ns, and %lld with its shapes\n", (long long)(change / 4000),
           (long long)plain, (long long)least);
  }
  for (int64_t o = 0; o < num_outputs; ++o) free(outputs[o]);
  close_(model);
  return NULL;
}

int main(int argc, char** argv) {
  REQUIRE(argc == 4, "sizes LIBRARY CASES ROUNDS");
  void* library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
  REQUIRE(library, "%s", dlerror());
  *(void**)&open_ = dlsym(library, "gtco_open");
  *(void**)&set_shapes = dlsym(library, "gtco_set_shapes");
  *(void**)&run = dlsym(library, "gtco_run");
  *(void**)&run_shapes = dlsym(library, "gtco_run_shapes");
  *(void**)&last_error = dlsym(library, "gtco_last_error");
  *(void**)&close_ = dlsym(library, "gtco_close");
  read_cases(argv[2]);
  rounds = atoll(argv[3]);
  pthread_t threads[2];
  for (uintptr_t t = 0; t < 2; ++t) pthread_create(&threads[t], NULL, thread, (void*)(t + 1));
  for (int t = 0; t < 2; ++t) pthread_join(threads[t], NULL);
  return 0;
}
