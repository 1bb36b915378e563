/* cpu/features.h for AArch64: Linux tells a process by its auxiliary vector what the CPU and the system allow. */
#ifdef __aarch64__
#include <stdio.h>
#include <string.h>
#include <sys/auxv.h>

#include "cpu/features.h"

#ifndef AT_HWCAP2
#define AT_HWCAP2 26
#endif

typedef struct {
  const char* name;
  unsigned long word;
  int bit;
} feature;

static const feature FEATURES[] = {
#define FEATURE(name, word, bit) {name, word, bit},
#include "cpu/features_arm.def"
#undef FEATURE
};

int gtco_has_feature(const char* name) {
  for (size_t k = 0; k < sizeof FEATURES / sizeof FEATURES[0]; ++k)
    if (strcmp(FEATURES[k].name, name) == 0) return (int)(getauxval(FEATURES[k].word) >> FEATURES[k].bit & 1u);
  return 0;
}

void gtco_begin_check(void) {}

int gtco_tiles_refused(void) { return 0; }

/* Linux has numbers for these CPUs and no names. Cores of several kinds have several numbers: the last one counts,
 * which is that of the fastest kind on most machines. */
void gtco_cpu_name(char name[64]) {
  char line[256];
  unsigned implementer = 0, part = 0;
  strcpy(name, "unknown CPU");
  FILE* file = fopen("/proc/cpuinfo", "re");
  if (!file) return;
  while (fgets(line, sizeof line, file)) {
    const char* colon = strchr(line, ':');
    if (!colon) continue;
    if (strncmp(line, "CPU implementer", 15) == 0) sscanf(colon + 1, "%x", &implementer);
    if (strncmp(line, "CPU part", 8) == 0) sscanf(colon + 1, "%x", &part);
  }
  fclose(file);
  if (part) snprintf(name, 64, "AArch64 CPU, implementer 0x%02x, part 0x%03x", implementer, part);
}

#endif
