/* For programs that contain thread_pool.c: the restarts of calls, of which these make none. A call is its kernel alone. */
int gtco_begin_restarts(const gtco_step* steps, int num_steps) { (void)steps, (void)num_steps; return 1; }
void gtco_no_more_restarts(void) {}
int gtco_can_end_calls(void) { return 1; }
const volatile uint32_t* gtco_this_cpu(void) { return NULL; }
void gtco_end_calls(void) {}
int gtco_call_restartable(gtco_kernel k, void* const* b, void* w, int64_t i, int64_t j, const _Atomic uint64_t* h,
                          uint64_t t) {
  (void)h, (void)t;
  k(b, w, i, j);
  return 1;
}
