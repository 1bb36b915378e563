/* Which instruction sets this CPU and this operating system allow. */
#ifndef GTCO_CPU_FEATURES_H
#define GTCO_CPU_FEATURES_H

#include <stddef.h>

/* Writes the names (separated by ", ") of the features that are absent into missing and returns their number. */
int gtco_missing_features(const char* const* features, int count, char* missing, size_t capacity);

/* Before the features of a model are asked for; then 1 if the CPU and the system allow a feature. */
void gtco_begin_check(void);
int gtco_has_feature(const char* name);

/* The system's error (of errno.h) with which it refused the tiles to this process when they were last asked for; else 0. */
int gtco_tiles_refused(void);

/* The CPU's name: on x86-64 its brand string, on AArch64 its numbers; "unknown CPU" where it has none. */
void gtco_cpu_name(char name[64]);

#endif /* GTCO_CPU_FEATURES_H */
