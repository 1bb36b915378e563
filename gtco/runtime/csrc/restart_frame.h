/* What the assembly of restartable calls shares with restart.c. */
#ifndef GTCO_RESTART_FRAME_H
#define GTCO_RESTART_FRAME_H

/* A sanitizer keeps a stack of its own, which a call that is ended in the middle would leave wrong. */
#if defined(__x86_64__) && defined(__linux__) && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#define GTCO_RESTARTS
#endif

#include <stdatomic.h>
#include <stdint.h>

/* A thread's restartable call. The assembly knows the offsets. */
typedef struct {
  void* stack_pointer;                 /* 0: where the call's registers are saved */
  uint64_t* armed;                     /* 8: the thread's pointer to the section; NULL inside: no call is under way */
  const void* section;                 /* 16 */
  const _Atomic uint64_t* held;        /* 24 */
  uint64_t ticket;                     /* 32 */
} gtco_frame;

#endif /* GTCO_RESTART_FRAME_H */
