#define _GNU_SOURCE
#include "restart.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "restart_frame.h"

#if defined(GTCO_RESTARTS) && defined(SYS_membarrier)

/* Of linux/membarrier.h and linux/rseq.h, which old systems do not have. */
#define END_CALLS (1 << 7)          /* MEMBARRIER_CMD_PRIVATE_EXPEDITED_RSEQ, since Linux 5.10 */
#define REGISTER_END_CALLS (1 << 8) /* MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED_RSEQ */
#define CPU_AT 4                    /* of cpu_id in the struct rseq of a thread */
#define POINTER_AT 8                /* of rseq_cs */

typedef struct {
  uint32_t version, flags;
  uint64_t begin, bytes, ended;
} __attribute__((aligned(32))) section;

extern const char gtco_kernels_begin[] __attribute__((visibility("hidden")));
extern const char gtco_kernels_end[] __attribute__((visibility("hidden")));
extern const char gtco_call_ended[] __attribute__((visibility("hidden")));
int gtco_call_in_frame(gtco_kernel, void* const*, void*, int64_t, int64_t, gtco_frame*);
gtco_frame* gtco_this_frame(void);

static section kernels;
static ptrdiff_t rseq_offset; /* of the struct rseq from a thread's pointer */
static int possible;
static pthread_once_t asked = PTHREAD_ONCE_INIT;
static pthread_key_t frames; /* of each thread: the gtco_frame of its call */
static _Atomic int users;    /* pools whose calls may be ended */

/* With shadow stacks a return must match its call. */
static int shadow_stack(void) {
  uint64_t pointer = 0;
  __asm__ volatile("rdsspq %0" : "+r"(pointer));
  return pointer != 0;
}

/* Asks the system, once. glibc registers a struct rseq for every thread since 2.35; a program that keeps it from that
 * makes the size 0. */
static void ask(void) {
  const ptrdiff_t* offset = dlsym(RTLD_DEFAULT, "__rseq_offset");
  const unsigned* size = dlsym(RTLD_DEFAULT, "__rseq_size");
  if (!offset || !size || !*size || shadow_stack()) return;
  if (syscall(SYS_membarrier, REGISTER_END_CALLS, 0, 0) != 0 || pthread_key_create(&frames, NULL) != 0) return;
  rseq_offset = *offset;
  kernels.begin = (uint64_t)(uintptr_t)gtco_kernels_begin;
  kernels.bytes = (uint64_t)(gtco_kernels_end - gtco_kernels_begin);
  kernels.ended = (uint64_t)(uintptr_t)gtco_call_ended;
  possible = 1;
}

/* When the library is closed. At the end of a process, other threads may still run. */
__attribute__((destructor)) static void forget(void) {
  if (possible && atomic_load(&users) == 0) pthread_key_delete(frames);
}

int gtco_begin_restarts(const gtco_step* steps, int num_steps) {
  for (int s = 0; s < num_steps; ++s) {
    const char* code = (const char*)(uintptr_t)steps[s].kernel;
    if (code < gtco_kernels_begin || code >= gtco_kernels_end) return 0; /* linked in another order */
  }
  pthread_once(&asked, ask);
  if (possible) atomic_fetch_add(&users, 1);
  return possible;
}

void gtco_no_more_restarts(void) { atomic_fetch_sub(&users, 1); }

gtco_frame* gtco_this_frame(void) { return pthread_getspecific(frames); }

static char* this_rseq(void) {
  char* thread;
  __asm__("mov %%fs:0, %0" : "=r"(thread));
  return thread + rseq_offset;
}

const volatile uint32_t* gtco_this_cpu(void) {
  return possible ? (const volatile uint32_t*)(this_rseq() + CPU_AT) : NULL;
}

int gtco_call_restartable(gtco_kernel kernel, void* const* b, void* w, int64_t begin, int64_t end,
                          const _Atomic uint64_t* held, uint64_t ticket) {
  gtco_frame frame = {NULL, (uint64_t*)(this_rseq() + POINTER_AT), &kernels, held, ticket};
  if (pthread_setspecific(frames, &frame) != 0) { /* no memory for it */
    kernel(b, w, begin, end);
    return 1;
  }
  return gtco_call_in_frame(kernel, b, w, begin, end, &frame);
}

/* Asked by doing it, since a filter may look at the command. A call that is ended here is begun again by its thread. */
int gtco_can_end_calls(void) { return syscall(SYS_membarrier, END_CALLS, 0, 0) == 0; }

void gtco_end_calls(void) {
  /* Two threads would write the same results at different times. */
  if (syscall(SYS_membarrier, END_CALLS, 0, 0) != 0) abort();
}

#else

int gtco_begin_restarts(const gtco_step* steps, int num_steps) {
  (void)steps, (void)num_steps;
  return 0;
}

void gtco_no_more_restarts(void) {}

int gtco_can_end_calls(void) { return 0; }

int gtco_call_restartable(gtco_kernel kernel, void* const* b, void* w, int64_t begin, int64_t end,
                          const _Atomic uint64_t* held, uint64_t ticket) {
  (void)held, (void)ticket;
  kernel(b, w, begin, end);
  return 1;
}

const volatile uint32_t* gtco_this_cpu(void) { return NULL; }

void gtco_end_calls(void) {}

#endif
