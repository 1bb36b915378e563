/* cpu/features.h for x86-64, by CPUID. */
#ifdef __x86_64__
#define _GNU_SOURCE
#include "cpu/features.h"

#include <cpuid.h>
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* XCR0 bits: the register state that the operating system saves on a context switch. A CPU may have AVX-512 under a
 * kernel or a hypervisor that does not enable it; then the instruction faults although cpuid shows it. */
#define YMM 0x6u      /* SSE, AVX */
#define ZMM 0xe6u     /* and opmask, upper halves of zmm0-15, zmm16-31 */
#define TILE 0x60000u /* tile configuration and data */

#define ARCH_REQ_XCOMP_PERM 0x1023
#define XFEATURE_XTILEDATA 18

enum { EAX, EBX, ECX, EDX };

typedef struct {
  const char* name;
  uint32_t leaf, subleaf;
  int reg, bit;
  uint32_t state;
} feature;

static const feature FEATURES[] = {
#define FEATURE(name, leaf, subleaf, reg, bit, state) {name, leaf, subleaf, reg, bit, state},
#include "cpu/features.def"
#undef FEATURE
};

static uint64_t enabled_state(void) {
  uint32_t r[4];
  if (!__get_cpuid(1, &r[EAX], &r[EBX], &r[ECX], &r[EDX]) || !(r[ECX] & (1u << 27))) return 0; /* OSXSAVE */
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return ((uint64_t)high << 32) | low;
}

/* Linux gives the tiles to a process when it asks for them: to all of its threads, also to those that start later.
 * So its answer is one for all threads. */
static _Atomic int tiles_error;

static int tiles_allowed(void) {
  tiles_error = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) ? errno : 0;
  return tiles_error == 0;
}

static int has(const feature* f, uint64_t state) {
  uint32_t r[4] = {0, 0, 0, 0};
  /* __get_cpuid_count checks the greatest leaf; leaf 7's EAX is its greatest subleaf. */
  if (f->subleaf && f->leaf == 7) {
    if (!__get_cpuid_count(7, 0, &r[EAX], &r[EBX], &r[ECX], &r[EDX]) || r[EAX] < f->subleaf) return 0;
  }
  if (!__get_cpuid_count(f->leaf, f->subleaf, &r[EAX], &r[EBX], &r[ECX], &r[EDX])) return 0;
  if (!(r[f->reg] >> f->bit & 1u) || (state & f->state) != f->state) return 0;
  return f->state != TILE || tiles_allowed();
}

int gtco_tiles_refused(void) { return tiles_error; }

int gtco_has_feature(const char* name) {
  for (size_t k = 0; k < sizeof FEATURES / sizeof FEATURES[0]; ++k)
    if (strcmp(FEATURES[k].name, name) == 0) return has(&FEATURES[k], enabled_state());
  return 0;
}

void gtco_begin_check(void) { tiles_error = 0; }

void gtco_cpu_name(char name[64]) {
  uint32_t r[12];
  memset(r, 0, sizeof r);
  strcpy(name, "unknown CPU");
  for (uint32_t i = 0; i < 3; ++i)
    if (!__get_cpuid(0x80000002u + i, &r[4 * i], &r[4 * i + 1], &r[4 * i + 2], &r[4 * i + 3])) return;
  memcpy(name, r, sizeof r);
  name[sizeof r] = '\0';
  for (size_t n = strlen(name); n && name[n - 1] == ' ';) name[--n] = '\0';
}

#endif
