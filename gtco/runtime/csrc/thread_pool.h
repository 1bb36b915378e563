/* Runs a plan's steps, in order, on a fixed number of threads of which the caller is number 0. */
#ifndef GTCO_THREAD_POOL_H
#define GTCO_THREAD_POOL_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

#include "plan.h"

/* The fields before `word` are constant while a run is under way. */
typedef struct gtco_pool {
  const gtco_step* steps;
  int num_steps;
  int first_step, end_step; /* of the variant that runs: a late worker may still look at a step of another one */
  int threads;
  int has_parallel_step; /* of that variant; while the pool is started, of any */
  int crowded;           /* more threads than CPUs: spinning would take the CPU from the thread we wait for */
  int64_t spin_ns;
  char* workspaces;      /* thread i's is workspaces + i * workspace_stride */
  int64_t workspace_stride;
  void** args;           /* every step's buffers, in the order of the plan's refs */
  double* step_seconds;  /* NULL: not profiling */
  int64_t step_began_ns; /* written by whoever finished the step before */
  struct gtco_worker* workers; /* one a thread, the caller's first */
  _Atomic uint8_t* unbroken;   /* of each step: how many of its next ranges run without restarts */
  int can_restart;
  int started;           /* workers that exist in this process */

  uint32_t cleared;      /* how often the generations began again */

  _Alignas(64) _Atomic uint32_t word; /* (generation : 12, step : 20); a futex */
  _Alignas(64) _Atomic int64_t done;  /* tasks of the current step that are finished */
  _Atomic uint32_t shares;            /* those of it that have tasks left, at least */
  _Alignas(64) _Atomic int32_t sleeping_workers;
  _Atomic int32_t sleeping_caller;
  _Atomic int32_t stop;
  _Atomic int32_t parting; /* a thread moves a worker to another CPU */
} gtco_pool;

/* Starts the workers; returns 0, or errno of pthread_create. All fields of the pool but the constant ones must be zero. */
int gtco_pool_start(gtco_pool* pool);
/* Ends the workers, and frees what gtco_pool_start took. */
void gtco_pool_stop(gtco_pool* pool);
/* Runs all steps; returns 0, or errno if workers could not be started. */
int gtco_pool_run(gtco_pool* pool, double* step_seconds);
/* In the child of a fork, which has the memory but not the workers: the next run starts new ones. */
void gtco_pool_after_fork(gtco_pool* pool);

#endif /* GTCO_THREAD_POOL_H */
