/* gtco_open, gtco_run and the rest of gtco_api.h: allocates a handle's memory, and passes user pointers to the kernels. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "cpu/count.h"
#include "cpu/features.h"
#include "error.h"
#include "plan.h"
#include "sizes.h"
#include "tensors.h"
#include "thread_pool.h"
#include "variants.h"
#include "weights.h"

#define EXPORT __attribute__((visibility("default")))
#define PAGE 4096
#define MAX_THREADS 1024
#define DEFAULT_SPIN_US 500
#define CROWDED_SPIN_US 50
#ifdef __aarch64__
#define ANY_TARGET "aarch64"
#else
#define ANY_TARGET "x86-64-v3"
#endif

/* A place in args that holds a user's pointer, so it changes from run to run. */
typedef struct {
  int32_t ref;
  int32_t tensor; /* inputs first, then outputs */
} patch;

struct gtco_model {
  gtco_pool pool;
  gtco_weights weights;
  char* memory; /* arena | staging of every input and output | workspaces */
  size_t memory_bytes;
  char** staging; /* where an unaligned input or output goes, inputs first */
  void** pointers; /* what the kernels see in this run, inputs first */
  patch* patches;
  int* patches_end; /* of each variant; they begin where those of the variant before end */
  int num_patches;
  char* parallel;   /* of each variant: whether a step of it has several tasks */
  gtco_sizes sizes; /* of the next run */
  pthread_mutex_t sizing; /* held while they change, so that a fork copies all of them or none */
  _Atomic int busy;
  char error[GTCO_MESSAGE_BYTES];
  gtco_model *next, *previous; /* list of open handles, for fork */
};

static const gtco_plan* const plan = &gtco_the_plan;

/* ---- open handles, so that a forked child can forget the workers that it does not have ---- */

static pthread_mutex_t list_lock = PTHREAD_MUTEX_INITIALIZER;
static gtco_model* open_models;

static void before_fork(void) {
  pthread_mutex_lock(&list_lock);
  for (gtco_model* m = open_models; m; m = m->next) pthread_mutex_lock(&m->sizing);
}

static void after_fork_parent(void) {
  for (gtco_model* m = open_models; m; m = m->next) pthread_mutex_unlock(&m->sizing);
  pthread_mutex_unlock(&list_lock);
}

static void after_fork_child(void) {
  for (gtco_model* m = open_models; m; m = m->next) {
    gtco_pool_after_fork(&m->pool);
    atomic_store(&m->busy, 0);
  }
  after_fork_parent();
}

__attribute__((constructor)) static void register_fork_handlers(void) {
  pthread_atfork(before_fork, after_fork_parent, after_fork_child);
}

static void enlist(gtco_model* model) {
  pthread_mutex_lock(&list_lock);
  model->next = open_models;
  if (open_models) open_models->previous = model;
  open_models = model;
  pthread_mutex_unlock(&list_lock);
}

static void delist(gtco_model* model) {
  pthread_mutex_lock(&list_lock);
  if (model->previous) model->previous->next = model->next;
  if (model->next) model->next->previous = model->previous;
  if (open_models == model) open_models = model->next;
  pthread_mutex_unlock(&list_lock);
}

/* ---- opening ---- */

static gtco_status choose_threads(const gtco_options* options, int* threads, char* message) {
  long n = options ? options->num_threads : 0;
  if (n < 0 || n > MAX_THREADS)
    return gtco_fail(message, GTCO_ERROR_ARGUMENT, "num_threads is %ld; it must be 0 (default) to %d", n, MAX_THREADS);
  const char* text = getenv("GTCO_NUM_THREADS");
  if (n == 0 && text && *text) {
    char* end;
    n = strtol(text, &end, 10);
    if (*end || n < 1 || n > MAX_THREADS)
      return gtco_fail(message, GTCO_ERROR_ARGUMENT, "GTCO_NUM_THREADS is '%.40s'; it must be a number from 1 to %d",
                       text, MAX_THREADS);
  }
  if (n == 0) n = plan->threads;
  *threads = n > 0 ? (int)n : gtco_allowed_cores();
  if (*threads > MAX_THREADS) *threads = MAX_THREADS;
  return GTCO_OK;
}

static gtco_status check_cpu(char* message) {
  char missing[512], cpu[64];
  if (gtco_missing_features(plan->features, plan->num_features, missing, sizeof missing) == 0) return GTCO_OK;
  const int refused = gtco_tiles_refused();
  if (refused)
    return gtco_fail(message, GTCO_ERROR_CPU,
                     "model '%s' multiplies in tiles (AMX), which this CPU has and the system refuses to this process: "
                     "%s%s; or compile it without them, for example with --target icelake-server",
                     plan->name, strerror(refused),
                     refused == ENOSPC ? ". Give every thread an alternative signal stack (sigaltstack) of 16 KiB or more"
                                       : ". It needs Linux 5.16 or newer, and a sandbox that lets arch_prctl pass");
  gtco_cpu_name(cpu);
  return gtco_fail(message, GTCO_ERROR_CPU,
                   "model '%s' was compiled for %s, which this machine (%s) lacks; compile it for this machine, for "
                   "example with --target " ANY_TARGET,
                   plan->name, missing, cpu);
}

/* One mapping for all of a handle's memory. It is not touched here: the system gives pages when kernels write to them.
 * Kernels access nothing beyond the next multiple of GTCO_ALIGNMENT bytes from a buffer's beginning. So users' tensors
 * need no room behind them, even if they end before an inaccessible page (in_place). */
static gtco_status allocate(gtco_model* m, char* message) {
  const int tensors = gtco_num_tensors();
  const size_t count = (size_t)(tensors ? tensors : 1);
  m->staging = calloc(count, sizeof *m->staging);
  m->pointers = calloc(count, sizeof *m->pointers);
  m->pool.args = calloc((size_t)plan->num_refs + 1, sizeof *m->pool.args);
  m->patches = calloc((size_t)plan->num_refs + 1, sizeof *m->patches);
  m->patches_end = calloc((size_t)plan->num_variants, sizeof *m->patches_end);
  m->parallel = calloc((size_t)plan->num_variants, sizeof *m->parallel);
  size_t total = gtco_round_up((size_t)plan->arena_bytes, PAGE);
  for (int t = 0; t < tensors; ++t) total += gtco_round_up(gtco_most_bytes(t), PAGE);
  /* An odd number of pages apart, so that the threads' scratch does not fall on the same cache sets. */
  m->pool.workspace_stride = (int64_t)((gtco_round_up((size_t)plan->workspace_bytes, PAGE) / PAGE) | 1) * PAGE;
  total += (size_t)m->pool.workspace_stride * (size_t)m->pool.threads + HUGE_PAGE;
  m->memory_bytes = gtco_round_up(total, PAGE);
  if (m->staging && m->pointers && m->pool.args && m->patches && m->patches_end && m->parallel) {
    m->memory = mmap(NULL, m->memory_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (m->memory == MAP_FAILED) m->memory = NULL;
  }
  if (!m->memory)
    return gtco_fail(message, GTCO_ERROR_MEMORY, "model '%s' needs %lld bytes of memory, which cannot be allocated: %s",
                     plan->name, (long long)m->memory_bytes, strerror(errno));
  madvise(m->memory, m->memory_bytes, MADV_HUGEPAGE); /* fewer TLB misses; a refusal does no harm */
  return GTCO_OK;
}

static void lay_out(gtco_model* m) {
  char* arena = (char*)gtco_round_up((size_t)m->memory, HUGE_PAGE);
  char* next = arena + gtco_round_up((size_t)plan->arena_bytes, PAGE);
  for (int t = 0; t < gtco_num_tensors(); ++t) {
    m->staging[t] = next;
    next += gtco_round_up(gtco_most_bytes(t), PAGE);
  }
  m->pool.workspaces = next;
  for (int v = 0; v < plan->num_variants; ++v) {
    const gtco_variant* variant = &plan->variants[v];
    for (int r = variant->first_ref; r < variant->first_ref + variant->num_refs; ++r) {
      const gtco_ref* ref = &plan->refs[r];
      switch (ref->kind) {
        case GTCO_REF_ARENA: m->pool.args[r] = arena + ref->offset; break;
        case GTCO_REF_WEIGHT: m->pool.args[r] = (void*)(m->weights.data + ref->offset); break;
        case GTCO_REF_INPUT: m->patches[m->num_patches++] = (patch){r, ref->tensor}; break;
        case GTCO_REF_OUTPUT: m->patches[m->num_patches++] = (patch){r, plan->num_inputs + ref->tensor}; break;
      }
    }
    m->patches_end[v] = m->num_patches;
  }
}

static int is_parallel(const gtco_variant* variant) {
  for (int s = variant->first_step; s < variant->first_step + variant->num_steps; ++s)
    if (plan->steps[s].tasks > 1) return 1;
  return 0;
}

/* Makes the steps of this variant the pool's. Everything that they need was prepared when the handle was opened. */
static void use_steps(gtco_model* m, int number) {
  const gtco_variant* variant = &plan->variants[number];
  m->pool.first_step = variant->first_step;
  m->pool.end_step = variant->first_step + variant->num_steps;
  m->pool.has_parallel_step = m->parallel[number];
}

static gtco_status set_up(const gtco_options* options, gtco_model* m, char* message) {
  gtco_pool* pool = &m->pool;
  gtco_status status = check_cpu(message);
  if (status == GTCO_OK) status = choose_threads(options, &pool->threads, message);
  if (status == GTCO_OK) status = gtco_weights_open(plan, &m->weights, message);
  if (status == GTCO_OK) status = allocate(m, message);
  if (status != GTCO_OK) return status;
  lay_out(m);
  pool->steps = plan->steps;
  pool->num_steps = plan->num_steps;
  for (int v = 0; v < plan->num_variants; ++v) pool->has_parallel_step |= m->parallel[v] = is_parallel(&plan->variants[v]);
  pool->crowded = pool->threads > gtco_allowed_cpus();
  int spin = options ? options->spin_microseconds : 0;
  if (spin == 0) spin = pool->crowded ? CROWDED_SPIN_US : DEFAULT_SPIN_US;
  pool->spin_ns = spin < 0 ? 0 : (int64_t)spin * 1000;
  status = gtco_sizes_open(&m->sizes, message);
  if (status != GTCO_OK) return status;
  int error = gtco_pool_start(pool); /* last, since what has failed is released without ending threads */
  if (error)
    return gtco_fail(message, GTCO_ERROR_THREADS, "cannot start %d threads: %s", pool->threads - 1, strerror(error));
  return GTCO_OK;
}

static void release(gtco_model* m) {
  if (m->memory) munmap(m->memory, m->memory_bytes);
  gtco_weights_close(&m->weights);
  free(m->staging);
  free(m->pointers);
  free(m->pool.args);
  free(m->patches);
  free(m->patches_end);
  free(m->parallel);
  gtco_sizes_close(&m->sizes);
  free(m->pool.workers);
  free((void*)m->pool.unbroken);
  free(m);
}

EXPORT gtco_status gtco_open(const gtco_options* options, gtco_model** model) {
  char message[GTCO_MESSAGE_BYTES] = "";
  gtco_status status;
  gtco_model* m = NULL;
  if (!model) {
    status = gtco_fail(message, GTCO_ERROR_ARGUMENT, "gtco_open: the place for the handle is NULL");
  } else {
    *model = NULL;
    m = aligned_alloc(GTCO_ALIGNMENT, gtco_round_up(sizeof *m, GTCO_ALIGNMENT)); /* the pool has aligned fields */
    if (m) {
      memset(m, 0, sizeof *m);
      pthread_mutex_init(&m->sizing, NULL);
      status = set_up(options, m, message);
    } else {
      status = gtco_fail(message, GTCO_ERROR_MEMORY, "out of memory");
    }
  }
  gtco_set_thread_error(message);
  if (status != GTCO_OK) {
    if (m) release(m);
    return status;
  }
  enlist(m);
  *model = m;
  return GTCO_OK;
}

EXPORT void gtco_close(gtco_model* model) {
  if (!model) return;
  delist(model);
  gtco_pool_stop(&model->pool);
  release(model);
}

/* ---- running ---- */

/* True if kernels can use the caller's memory. They may read up to a multiple of GTCO_ALIGNMENT bytes from its
 * beginning. Where the memory is not aligned, that can be past its last line, but must be in its last page. */
static int in_place(const void* pointer, int64_t bytes) {
  const uintptr_t begin = (uintptr_t)pointer;
  if (!begin || begin % GTCO_LEAST_ALIGNMENT) return 0;
  if (begin % GTCO_ALIGNMENT == 0 || bytes <= 0) return 1;
  return (begin + (uintptr_t)bytes - 1) / PAGE == (begin + gtco_round_up((size_t)bytes, GTCO_ALIGNMENT) - 1) / PAGE;
}

static int run_part(gtco_model* m, const gtco_part* part, const void* const* inputs, void* const* outputs,
                    double* seconds) {
  const int tensors = gtco_num_tensors(), number = part->variant;
  for (int t = 0; t < tensors; ++t) {
    const void* pointer = gtco_part_pointer(&m->sizes, part, gtco_pointer(inputs, outputs, t), t);
    const int64_t bytes = gtco_part_bytes(&m->sizes, part, t);
    const int whole = bytes == gtco_tensor(&plan->variants[number], t)->nbytes;
    m->pointers[t] = whole && in_place(pointer, bytes) ? (void*)pointer : m->staging[t];
    if (t < plan->num_inputs && m->pointers[t] != pointer && bytes) memcpy(m->pointers[t], pointer, (size_t)bytes);
  }
  for (int p = number ? m->patches_end[number - 1] : 0; p < m->patches_end[number]; ++p)
    m->pool.args[m->patches[p].ref] = (char*)m->pointers[m->patches[p].tensor] + plan->refs[m->patches[p].ref].offset;
  use_steps(m, number);
  int error = gtco_pool_run(&m->pool, seconds);
  if (error) return error;
  for (int t = plan->num_inputs; t < tensors; ++t) {
    void* pointer = (void*)gtco_part_pointer(&m->sizes, part, outputs[t - plan->num_inputs], t);
    const int64_t bytes = gtco_part_bytes(&m->sizes, part, t);
    if (m->pointers[t] != pointer && bytes) memcpy(pointer, m->pointers[t], (size_t)bytes);
  }
  return 0;
}

static gtco_status run(gtco_model* m, const void* const* inputs, void* const* outputs, double* seconds) {
  gtco_status status = gtco_sizes_ready(&m->sizes, m->error);
  if (status == GTCO_OK) status = gtco_check_pointers(m->sizes.variant, inputs, outputs, m->error);
  if (status != GTCO_OK) return status;
  int error = 0;
  gtco_part part = {0};
  while (!error && gtco_next_part(&m->sizes, &part)) {
    error = run_part(m, &part, inputs, outputs, seconds);
    if (seconds) seconds += plan->variants[part.variant].num_steps;
  }
  if (error)
    return gtco_fail(m->error, GTCO_ERROR_THREADS, "cannot start %d threads after a fork: %s", m->pool.threads - 1,
                     strerror(error));
  return GTCO_OK;
}

const gtco_variant* gtco_variant_of(const gtco_model* model) { return model->sizes.variant; }

static gtco_status set_sizes(gtco_model* m, const int64_t* const* shapes) {
  pthread_mutex_lock(&m->sizing);
  const gtco_status status = gtco_sizes_set(&m->sizes, shapes, m->error);
  pthread_mutex_unlock(&m->sizing);
  return status;
}

/* Takes the handle for one call, which ends with given_back. The message of a handle that is busy belongs to the call
 * under way. */
static gtco_status taken(gtco_model* model) {
  if (!model) return GTCO_ERROR_ARGUMENT;
  if (atomic_exchange(&model->busy, 1)) return GTCO_ERROR_BUSY;
  model->error[0] = '\0';
  return GTCO_OK;
}

static gtco_status given_back(gtco_model* model, gtco_status status) {
  atomic_store(&model->busy, 0);
  return status;
}

EXPORT gtco_status gtco_set_shapes(gtco_model* model, const int64_t* const* shapes) {
  const gtco_status status = taken(model);
  return status == GTCO_OK ? given_back(model, set_sizes(model, shapes)) : status;
}

EXPORT gtco_status gtco_run_shapes(gtco_model* model, const int64_t* const* shapes, const void* const* inputs,
                                   void* const* outputs) {
  gtco_status status = taken(model);
  if (status != GTCO_OK) return status;
  status = set_sizes(model, shapes);
  return given_back(model, status == GTCO_OK ? run(model, inputs, outputs, NULL) : status);
}

EXPORT gtco_status gtco_profile(gtco_model* model, const void* const* inputs, void* const* outputs, double* seconds) {
  const gtco_status status = taken(model);
  return status == GTCO_OK ? given_back(model, run(model, inputs, outputs, seconds)) : status;
}

EXPORT gtco_status gtco_run(gtco_model* model, const void* const* inputs, void* const* outputs) {
  return gtco_profile(model, inputs, outputs, NULL);
}

/* For programs that also use models for GPUs. A model for a CPU has no streams. */
EXPORT gtco_status gtco_run_on(gtco_model* model, const void* const* inputs, void* const* outputs, void* stream) {
  if (!stream) return gtco_run(model, inputs, outputs);
  const gtco_status status = taken(model);
  if (status != GTCO_OK) return status;
  return given_back(model, gtco_fail(model->error, GTCO_ERROR_ARGUMENT,
                                     "gtco_run_on: this model runs on the CPU, which has no streams; pass NULL"));
}

EXPORT const char* gtco_launch_mode(const gtco_model* model) { return model ? "" : NULL; }

EXPORT gtco_status gtco_wait(gtco_model* model) { return model ? GTCO_OK : GTCO_ERROR_ARGUMENT; }

EXPORT int gtco_num_threads(const gtco_model* model) { return model ? model->pool.threads : 0; }
EXPORT const char* gtco_last_error(const gtco_model* model) { return model ? model->error : gtco_thread_error(); }
