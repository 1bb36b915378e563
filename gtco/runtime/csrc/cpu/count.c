#define _GNU_SOURCE
#include "cpu/count.h"

#include <errno.h>
#include <limits.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The affinity mask, grown until the kernel's fits; the caller frees it. NULL if it cannot be read. */
static cpu_set_t* affinity(int* capacity) {
  for (int n = 1024; n <= 1 << 20; n *= 2) {
    cpu_set_t* set = CPU_ALLOC((size_t)n);
    if (!set) return NULL;
    if (sched_getaffinity(0, CPU_ALLOC_SIZE((size_t)n), set) == 0) {
      *capacity = n;
      return set;
    }
    CPU_FREE(set);
    if (errno != EINVAL) return NULL;
  }
  return NULL;
}

/* The lowest CPU of the core that cpu belongs to; cpu itself if sysfs does not say. */
static int core_of(int cpu) {
  char path[96];
  snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list", cpu);
  FILE* file = fopen(path, "re");
  int first = cpu;
  if (!file) return cpu;
  if (fscanf(file, "%d", &first) != 1 || first < 0) first = cpu;
  fclose(file);
  return first;
}

/* Quota in CPUs from one cgroup folder, rounded up; INT_MAX if it sets none. */
static int folder_quota(const char* folder, int v2) {
  char path[PATH_MAX + 32];
  double quota = -1, period = 0;
  FILE* file;
  if (v2) {
    snprintf(path, sizeof path, "%s/cpu.max", folder);
    if (!(file = fopen(path, "re"))) return INT_MAX;
    if (fscanf(file, "%lf %lf", &quota, &period) != 2) quota = -1; /* "max 100000" */
    fclose(file);
  } else {
    snprintf(path, sizeof path, "%s/cpu.cfs_quota_us", folder);
    if (!(file = fopen(path, "re"))) return INT_MAX;
    if (fscanf(file, "%lf", &quota) != 1) quota = -1;
    fclose(file);
    snprintf(path, sizeof path, "%s/cpu.cfs_period_us", folder);
    if (!(file = fopen(path, "re"))) return INT_MAX;
    if (fscanf(file, "%lf", &period) != 1) period = 0;
    fclose(file);
  }
  if (quota <= 0 || period <= 0 || quota / period > 1 << 20) return INT_MAX;
  int cpus = (int)(quota / period);
  return cpus < quota / period ? cpus + 1 : cpus;
}

/* The least quota of a cgroup and its ancestors. In a container the path in /proc/self/cgroup may be the host's, which
 * does not exist here; then the walk up to the mount point still finds the container's own limit. */
static int path_quota(const char* mount, const char* cgroup, int v2) {
  char folder[PATH_MAX];
  int least = INT_MAX;
  size_t root = strlen(mount);
  int length = snprintf(folder, sizeof folder, "%s%s", mount, cgroup);
  if (length < 0 || (size_t)length >= sizeof folder) return INT_MAX;
  for (;;) {
    int quota = folder_quota(folder, v2);
    if (quota < least) least = quota;
    char* slash = strrchr(folder, '/');
    if (!slash || (size_t)(slash - folder) < root) return least;
    *slash = '\0';
  }
}

/* path_quota of root/sys/fs/cgroup/name. */
static int mount_quota(const char* root, const char* name, const char* cgroup, int v2) {
  char mount[PATH_MAX];
  int length = snprintf(mount, sizeof mount, "%s/sys/fs/cgroup%s%s", root, *name ? "/" : "", name);
  return length < 0 || (size_t)length >= sizeof mount ? INT_MAX : path_quota(mount, cgroup, v2);
}

int gtco_cgroup_quota(const char* root) {
  char line[PATH_MAX];
  int least = INT_MAX, quota;
  int length = snprintf(line, sizeof line, "%s/proc/self/cgroup", root);
  FILE* file = length < 0 || (size_t)length >= sizeof line ? NULL : fopen(line, "re");
  if (!file) return INT_MAX;
  while (fgets(line, sizeof line, file)) { /* hierarchy:controllers:path */
    line[strcspn(line, "\n")] = '\0';
    char* controllers = strchr(line, ':');
    char* path = controllers ? strchr(controllers + 1, ':') : NULL;
    if (!path) continue;
    *path++ = '\0';
    ++controllers;
    if (*controllers == '\0') {
      quota = mount_quota(root, "", path, 1);
      if (quota < least) least = quota;
      quota = mount_quota(root, "unified", path, 1);
    } else {
      char wrapped[PATH_MAX + 2];
      snprintf(wrapped, sizeof wrapped, ",%s,", controllers);
      if (!strstr(wrapped, ",cpu,")) continue;
      quota = mount_quota(root, controllers, path, 0);
      if (quota < least) least = quota;
      quota = mount_quota(root, "cpu", path, 0);
    }
    if (quota < least) least = quota;
  }
  fclose(file);
  return least;
}

/* The capacity of a CPU by sysfs, 1024 for the fastest one; 0 where it is not given, which is so where all are alike. */
static long capacity_of(const char* root, int cpu) {
  char path[PATH_MAX];
  long capacity = 0;
  int length = snprintf(path, sizeof path, "%s/sys/devices/system/cpu/cpu%d/cpu_capacity", root, cpu);
  FILE* file = length < 0 || (size_t)length >= sizeof path ? NULL : fopen(path, "re");
  if (!file) return 0;
  if (fscanf(file, "%ld", &capacity) != 1 || capacity < 0) capacity = 0;
  fclose(file);
  return capacity;
}

int gtco_keep_fast_cpus(const char* root, int capacity, cpu_set_t* set) {
  const size_t bytes = CPU_ALLOC_SIZE((size_t)capacity);
  long most = 0;
  int left = 0, removed = 0;
  for (int cpu = 0; cpu < capacity; ++cpu) {
    if (!CPU_ISSET_S((size_t)cpu, bytes, set)) continue;
    const long own = capacity_of(root, cpu);
    if (own > most) most = own;
  }
  for (int cpu = 0; most && cpu < capacity; ++cpu) {
    if (!CPU_ISSET_S((size_t)cpu, bytes, set)) continue;
    if (4 * capacity_of(root, cpu) >= 3 * most) {
      ++left;
    } else {
      CPU_CLR_S((size_t)cpu, bytes, set);
      ++removed;
    }
  }
  return removed ? left : 0;
}

void gtco_stay_on_fast_cpus(int threads) {
  int capacity = 0;
  cpu_set_t* set = affinity(&capacity);
  if (!set) return;
  const int fast = gtco_keep_fast_cpus("", capacity, set);
  if (fast >= threads) sched_setaffinity(0, CPU_ALLOC_SIZE((size_t)capacity), set);
  CPU_FREE(set);
}

static int count(int by_core) {
  int capacity = 0, cpus = 0;
  cpu_set_t* set = affinity(&capacity);
  if (!set) {
    long online = sysconf(_SC_NPROCESSORS_ONLN);
    cpus = online > 0 && online < INT_MAX ? (int)online : 1;
  } else {
    const size_t bytes = CPU_ALLOC_SIZE((size_t)capacity);
    cpu_set_t* seen = CPU_ALLOC((size_t)capacity);
    if (seen) CPU_ZERO_S(bytes, seen);
    if (by_core) gtco_keep_fast_cpus("", capacity, set);
    for (int cpu = 0; cpu < capacity; ++cpu) {
      if (!CPU_ISSET_S((size_t)cpu, bytes, set)) continue;
      if (by_core && seen) {
        int core = core_of(cpu);
        if (core < capacity && CPU_ISSET_S((size_t)core, bytes, seen)) continue;
        if (core < capacity) CPU_SET_S((size_t)core, bytes, seen);
      }
      ++cpus;
    }
    if (seen) CPU_FREE(seen);
    CPU_FREE(set);
  }
  int quota = gtco_cgroup_quota("");
  if (cpus > quota) cpus = quota;
  return cpus < 1 ? 1 : cpus;
}

int gtco_allowed_cpus(void) { return count(0); }
int gtco_allowed_cores(void) { return count(1); }
