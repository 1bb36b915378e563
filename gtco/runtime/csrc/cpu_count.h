/* How many cores this process may use. */
#ifndef GTCO_CPU_COUNT_H
#define GTCO_CPU_COUNT_H

/* Logical CPUs of the affinity mask, cut to the cgroup (v1 or v2) CPU quota; at least 1. More threads than this share. */
int gtco_allowed_cpus(void);

/* The default number of threads: as above, but hardware threads of one core count once, since they share its
 * multiply-add units. */
int gtco_allowed_cores(void);

/* The CPU quota alone, rounded up; INT_MAX where there is none. root: what lies before /proc and /sys, "" but for tests. */
int gtco_cgroup_quota(const char* root);

#endif /* GTCO_CPU_COUNT_H */
