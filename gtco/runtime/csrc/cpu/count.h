/* How many cores this process may use. */
#ifndef GTCO_CPU_COUNT_H
#define GTCO_CPU_COUNT_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <sched.h>

/* Logical CPUs of the affinity mask, cut to the cgroup (v1 or v2) CPU quota; at least 1. More threads than this share. */
int gtco_allowed_cpus(void);

/* The default number of threads: as above, but hardware threads of one core count once, since they share its
 * multiply-add units. Cores that are much slower than the fastest one (the little ones of Arm's big.LITTLE) do not count,
 * since a step waits for its last task. */
int gtco_allowed_cores(void);

/* Keeps the calling thread, one of so many, on the fast cores, if there are cores of several speeds and enough fast ones. */
void gtco_stay_on_fast_cpus(int threads);

/* Removes the CPUs with less than 3/4 of the capacity of the fastest one from a set of `capacity` CPUs. Returns how many
 * are left, and 0 if none was removed. root: as below. */
int gtco_keep_fast_cpus(const char* root, int capacity, cpu_set_t* set);

/* The CPU quota alone, rounded up; INT_MAX where there is none. root: what lies before /proc and /sys, "" but for tests. */
int gtco_cgroup_quota(const char* root);

#endif /* GTCO_CPU_COUNT_H */
