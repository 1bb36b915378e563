/* What the programs that are run on the fake driver have in common. */
#ifndef STRESS_H
#define STRESS_H

#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "gtco_api.h"

void fake_reset(int, int, int, unsigned);
void fake_fail(long, int);
const char* fake_failed(void);
const char* fake_faults(void);
const char* fake_live(void);
uintptr_t fake_alloc(int, size_t);
void fake_write(uintptr_t, const void*, size_t);
void fake_read(void*, uintptr_t, size_t);
void* fake_stream(int, unsigned);
void fake_sync(void*, int);

#define CHECK(condition, text)                                                     \
  do {                                                                             \
    if (!(condition)) {                                                            \
      fprintf(stderr, "line %d: %s is not so: %s\n", __LINE__, #condition, text);  \
      _exit(1);                                                                    \
    }                                                                              \
  } while (0)

/* The n-th of the driver's next calls fails. */
static void fail_call(long n) { fake_fail(n, n % 2 ? 999 : 2); }

/* Checks what a failed call led to; `status` is what the runtime said. Returns 0 if there was no such call. */
static int check_failed_call(gtco_status status) {
  fake_fail(0, 0);
  const char* name = fake_failed();
  if (!*name) return 0;
  CHECK(status == GTCO_OK || status == GTCO_ERROR_DEVICE || status == GTCO_ERROR_MEMORY, name);
  CHECK(!*fake_faults(), fake_faults());
  CHECK(!*fake_live() || strcmp(name, "cuCtxPushCurrent_v2") == 0, fake_live());
  return 1;
}

#endif /* STRESS_H */
