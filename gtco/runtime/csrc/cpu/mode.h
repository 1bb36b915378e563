/* What differs between CPUs while a thread computes or waits. */
#ifndef GTCO_CPU_MODE_H
#define GTCO_CPU_MODE_H

#include <stdint.h>

/* The mode of every thread while it computes, so that results depend on neither the caller's mode nor the thread: round
 * to nearest, no traps, denormals flushed to zero (an operation on one can cost 150 cycles). */
#if defined(__x86_64__)

#include <emmintrin.h>

#define RUN_MXCSR 0x9fc0u /* denormals are also read as zero */
typedef unsigned gtco_mode;

static inline gtco_mode gtco_enter_mode(void) {
  const gtco_mode before = _mm_getcsr();
  _mm_setcsr(RUN_MXCSR);
  return before;
}

static inline void gtco_leave_mode(gtco_mode before) { _mm_setcsr(before); }

/* Tells the CPU that the thread waits in a loop. */
static inline void gtco_pause(void) { _mm_pause(); }

#elif defined(__aarch64__)

#define RUN_FPCR (UINT64_C(1) << 24) /* FZ: denormals are also read as zero */
typedef uint64_t gtco_mode;

static inline gtco_mode gtco_enter_mode(void) {
  gtco_mode before;
  __asm__ volatile("mrs %0, fpcr" : "=r"(before));
  __asm__ volatile("msr fpcr, %0" : : "r"(RUN_FPCR));
  return before;
}

static inline void gtco_leave_mode(gtco_mode before) { __asm__ volatile("msr fpcr, %0" : : "r"(before)); }

/* ISB takes about as long as x86's PAUSE; YIELD is no instruction's time on most of these CPUs. */
static inline void gtco_pause(void) { __asm__ volatile("isb" : : : "memory"); }

#else
#error "gtco's runtime knows x86-64 and AArch64"
#endif

#endif /* GTCO_CPU_MODE_H */
