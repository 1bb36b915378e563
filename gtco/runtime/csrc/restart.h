/* Calls of kernels that another thread can end, by Linux's restartable sequences (rseq, since 4.18). The scheduler ends
 * such a call itself where it takes the CPU away: when the thread continues, it does so behind the call. So another
 * thread that waits for the result can do the same work again and be sure that nobody writes beside it. */
#ifndef GTCO_RESTART_H
#define GTCO_RESTART_H

#include <stdatomic.h>
#include <stdint.h>

#include "plan.h"

/* 1 if the calls of these steps can be ended in this process. Then gtco_no_more_restarts says when there are no more. */
int gtco_begin_restarts(const gtco_step* steps, int num_steps);
void gtco_no_more_restarts(void);

/* Runs tasks as long as *held is `ticket`. Returns 1 at their end, and 0 if the call was ended before. Kernels must not
 * call code outside of the library. */
int gtco_call_restartable(gtco_kernel kernel, void* const* b, void* w, int64_t begin, int64_t end,
                          const _Atomic uint64_t* held, uint64_t ticket);

/* Where the system writes the number of the CPU that the calling thread runs on; NULL if calls cannot be ended. */
const volatile uint32_t* gtco_this_cpu(void);

/* 0 where a sandbox that the process entered later refuses gtco_end_calls. */
int gtco_can_end_calls(void);

/* Ends the restartable calls of all other threads that are under way. What they wrote is visible afterwards, and they
 * write nothing more. */
void gtco_end_calls(void);

#endif /* GTCO_RESTART_H */
