/* The entry of a library of products: it packs weights, remembers the choices of sizes, and runs kernels on the pool's
 * threads. */
#define _GNU_SOURCE
#include <math.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cpu/count.h"
#include "cpu/features.h"
#include "products/table.h"
#include "thread_pool.h"

#define EXPORT __attribute__((visibility("default")))
#define LARGEST ((int64_t)1 << 40) /* of a size */
#define MOST_BYTES ((double)((int64_t)1 << 61))
#define MOST_TASKS 0x7fffffff
#define REMEMBERED 256  /* sizes whose choice is kept */

typedef struct {
  gtco_problem problem; /* of m = 0: nothing is kept here */
  gtco_product_config config;
} choice;

struct gtco_products {
  gtco_pool pool;
  gtco_step step;
  void* args[5];
  gtco_cut cut;
  int64_t weights_at; /* bytes from the beginning of packed weights */
  int ready;
  int past; /* C may be written past the caches, if it begins with a line */
  choice known[REMEMBERED];
  char error[256];
  gtco_products *next, *previous; /* list of open handles, for fork */
};

/* Open handles, so that a forked child can forget the workers that it does not have. */
static pthread_mutex_t list_lock = PTHREAD_MUTEX_INITIALIZER;
static gtco_products* open_products;

static void before_fork(void) { pthread_mutex_lock(&list_lock); }

static void after_fork_parent(void) { pthread_mutex_unlock(&list_lock); }

static void after_fork_child(void) {
  for (gtco_products* p = open_products; p; p = p->next) gtco_pool_after_fork(&p->pool);
  pthread_mutex_unlock(&list_lock);
}

__attribute__((constructor)) static void register_fork_handlers(void) {
  pthread_atfork(before_fork, after_fork_parent, after_fork_child);
}

static void enlist(gtco_products* p) {
  pthread_mutex_lock(&list_lock);
  p->next = open_products;
  if (open_products) open_products->previous = p;
  open_products = p;
  pthread_mutex_unlock(&list_lock);
}

static void delist(gtco_products* p) {
  pthread_mutex_lock(&list_lock);
  if (p->previous) p->previous->next = p->next;
  if (p->next) p->next->previous = p->previous;
  if (open_products == p) open_products = p->next;
  pthread_mutex_unlock(&list_lock);
}

int gtco_problem_fail(gtco_products* p, const char* format, ...) {
  va_list values;
  va_start(values, format);
  vsnprintf(p->error, sizeof p->error, format, values);
  va_end(values);
  return -1;
}

int gtco_positive(int64_t m, int64_t n, int64_t k) {
  if (m < 1 || n < 1 || k < 1 || m > LARGEST || n > LARGEST || k > LARGEST) return 0;
  const double dm = (double)m, dn = (double)n + 128, dk = (double)k;
  return fmax(fmax(dm * dk, dk * dn), dm * dn) * sizeof(float) < MOST_BYTES;
}

static gtco_problem of_matrix(int64_t m, int64_t n, int64_t k) { return (gtco_problem){.m = m, .n = n, .k = k}; }

static int checked(gtco_products* p, int64_t m, int64_t n, int64_t k) {
  if (gtco_positive(m, n, k)) return 0;
  return gtco_problem_fail(p,
                           "there is no product of m=%lld, n=%lld, k=%lld: sizes are from 1 to 2^40, and no matrix has "
                           "more than 2^61 bytes",
                           (long long)m, (long long)n, (long long)k);
}

EXPORT gtco_products* gtco_products_open(int threads) {
  char missing[512];
  if (gtco_missing_features(gtco_the_features, gtco_the_machine.features, missing, sizeof missing)) return NULL;
  gtco_products* p = aligned_alloc(64, (sizeof *p + 63) / 64 * 64);
  if (!p) return NULL;
  memset(p, 0, sizeof *p);
  const int cores = gtco_allowed_cores();
  p->pool.threads = threads > 0 ? threads : cores;
  p->pool.crowded = p->pool.threads > gtco_allowed_cpus();
  p->pool.spin_ns = p->pool.crowded ? 0 : 2000000;
  p->pool.steps = &p->step;
  p->pool.num_steps = p->pool.end_step = p->pool.has_parallel_step = 1;
  p->pool.args = p->args;
  p->step.kernel = gtco_product_tasks;
  p->step.closed = gtco_the_kernels_are_closed;
  p->step.tasks = 1;
  if (gtco_pool_start(&p->pool) != 0) {
    gtco_pool_stop(&p->pool);
    free(p);
    return NULL;
  }
  enlist(p);
  return p;
}

EXPORT void gtco_products_close(gtco_products* p) {
  if (!p) return;
  delist(p);
  gtco_pool_stop(&p->pool);
  free(p->pool.workspaces);
  free(p);
}

/* Panels of packed B: those of n columns, and so many more that the last tile of every width that is not wider than
 * all columns reads inside. */
int64_t gtco_panels(int64_t n) {
  const int64_t vectors = (n + gtco_the_machine.lanes - 1) / gtco_the_machine.lanes;
  int64_t most = vectors;
  for (int i = 0; i < gtco_the_machine.nests; ++i) {
    const int64_t width = gtco_the_nests[i].vectors;
    if (gtco_the_nests[i].columns) continue;
    const int64_t covered = (vectors + width - 1) / width * width;
    if (width <= vectors && covered > most) most = covered;
  }
  return most;
}

/* k up to whole vectors. */
static int64_t whole(int64_t k) {
  return (k + gtco_the_machine.lanes - 1) / gtco_the_machine.lanes * gtco_the_machine.lanes;
}

int64_t gtco_panels_bytes(int64_t n, int64_t k) {
  return (gtco_panels(n) * k * gtco_the_machine.lanes * (int64_t)sizeof(float) + 63) / 64 * 64;
}

void gtco_pack_panels(const float* b, int64_t n, int64_t k, float* packed) {
  const int64_t lanes = gtco_the_machine.lanes, panels = gtco_panels(n);
  for (int64_t panel = 0; panel < panels; ++panel) {
    const int64_t left = n - panel * lanes, columns = left < 0 ? 0 : left < lanes ? left : lanes;
    for (int64_t step = 0; step < k; ++step) {
      float* to = packed + (panel * k + step) * lanes;
      memcpy(to, b + step * n + panel * lanes * (columns > 0), (size_t)columns * sizeof *to);
      memset(to + columns, 0, (size_t)(lanes - columns) * sizeof *to);
    }
  }
}

EXPORT int64_t gtco_products_packed_bytes(int64_t n, int64_t k) {
  if (!gtco_positive(1, n, k)) return -1;
  const gtco_problem problem = of_matrix(1, n, k);
  if (gtco_product_along_k(&problem)) return (n * whole(k) * (int64_t)sizeof(float) + 63) / 64 * 64;
  return gtco_panels_bytes(n, k);
}

EXPORT int gtco_products_pack(const float* b, int64_t n, int64_t k, float* packed) {
  if (!gtco_positive(1, n, k)) return -1;
  const gtco_problem problem = of_matrix(1, n, k);
  if (!gtco_product_along_k(&problem)) {
    gtco_pack_panels(b, n, k, packed);
    return 0;
  }
  memset(packed, 0, (size_t)(n * whole(k)) * sizeof *packed);
  for (int64_t step = 0; step < k; ++step)
    for (int64_t column = 0; column < n; ++column) packed[column * whole(k) + step] = b[step * n + column];
  return 0;
}

int gtco_problem_threads(const gtco_products* p) { return p->pool.threads; }

EXPORT int gtco_products_candidates(const gtco_products* p, int64_t m, int64_t n, int64_t k, int room,
                                    gtco_product_config* configs, double* seconds) {
  const gtco_problem problem = of_matrix(m, n, k);
  return gtco_positive(m, n, k) ? gtco_product_candidates(&problem, p->pool.threads, room, configs, seconds) : -1;
}

EXPORT int gtco_products_choose(const gtco_products* p, int64_t m, int64_t n, int64_t k, gtco_product_config* config,
                                double* seconds) {
  if (!gtco_positive(m, n, k)) return -1;
  const gtco_problem problem = of_matrix(m, n, k);
  gtco_product_choose(&problem, p->pool.threads, config, seconds);
  return 0;
}

/* The config of these sizes, out of those that were chosen before if it is among them. */
static void choose(gtco_products* p, const gtco_problem* problem, gtco_product_config* config) {
  const uint64_t prime = 0x9e3779b97f4a7c15u;
  uint64_t mixed = 0, number;
  for (size_t i = 0; i < sizeof *problem / sizeof number; ++i) {
    memcpy(&number, (const char*)problem + i * sizeof number, sizeof number);
    mixed = (mixed ^ number) * prime;
  }
  choice* one = &p->known[mixed >> 56];
  if (memcmp(&one->problem, problem, sizeof *problem)) {
    double seconds;
    gtco_product_choose(problem, p->pool.threads, &one->config, &seconds);
    one->problem = *problem;
  }
  *config = one->config;
}

/* Bytes of scratch, with each thread's on pages of its own, an odd number of them. */
static int64_t stride_of(const gtco_problem* problem, const gtco_product_config* config, const gtco_cut* cut) {
  const int64_t bytes = gtco_product_workspace(problem, config, cut);
  return bytes ? ((bytes + 4095) / 4096 | 1) * 4096 : 0;
}

EXPORT int64_t gtco_products_workspace_bytes(gtco_products* p, int64_t m, int64_t n, int64_t k) {
  if (checked(p, m, n, k)) return -1;
  const gtco_problem problem = of_matrix(m, n, k);
  gtco_product_config config;
  gtco_cut cut;
  choose(p, &problem, &config);
  gtco_product_cut(&problem, &config, &cut);
  return stride_of(&problem, &config, &cut) * p->pool.threads;
}

int gtco_problem_set_config(gtco_products* p, const gtco_problem* problem, const gtco_product_config* config) {
  const int64_t n = problem->n, lanes = gtco_the_machine.lanes;
  p->ready = 0;
  if (config->kernel < 0 || config->kernel >= gtco_the_machine.nests || config->chunks_m < 1 || config->chunks_n < 1 ||
      config->kc < 1 || config->held < 1)
    return gtco_problem_fail(p, "the config has a kernel that does not exist, or a number below 1");
  const gtco_product_nest* nest = &gtco_the_nests[config->kernel];
  if (nest->vectors > (n + lanes - 1) / lanes || nest->columns != (gtco_product_along_k(problem) ? n : 0) ||
      !gtco_product_feeds(problem, nest->feed))
    return gtco_problem_fail(p, "kernel %s does not fit n=%lld, k=%lld", nest->name, (long long)n,
                             (long long)problem->k);
  gtco_cut cut;
  const int64_t tasks = gtco_product_cut(problem, config, &cut), stride = stride_of(problem, config, &cut);
  if (tasks > MOST_TASKS) return gtco_problem_fail(p, "more than 2^31 - 1 tasks: choose fewer chunks");
  const double all = (double)stride * p->pool.threads;
  if (stride > p->pool.workspace_stride) {
    void* made = all < MOST_BYTES ? aligned_alloc(4096, (size_t)(stride * p->pool.threads)) : NULL;
    if (!made) return gtco_problem_fail(p, "no memory for %.0f bytes of scratch", all);
    free(p->pool.workspaces);
    p->pool.workspaces = made;
    p->pool.workspace_stride = stride;
  }
  p->cut = cut;
  p->past = cut.past;
  p->step.tasks = (uint32_t)tasks;
  p->args[4] = (void*)nest->kernel;
  p->weights_at = nest->feed == GTCO_FILTERED ? gtco_panels_bytes(n, problem->k) : 0;
  p->ready = 1;
  return 0;
}

void gtco_problem_forget(gtco_products* p) { p->ready = 0; }

int gtco_problem_set(gtco_products* p, const gtco_problem* problem) {
  gtco_product_config config;
  choose(p, problem, &config);
  return gtco_problem_set_config(p, problem, &config);
}

EXPORT int gtco_products_set_config(gtco_products* p, int64_t m, int64_t n, int64_t k,
                                    const gtco_product_config* config) {
  gtco_problem_forget(p);
  if (checked(p, m, n, k)) return -1;
  const gtco_problem problem = of_matrix(m, n, k);
  return gtco_problem_set_config(p, &problem, config);
}

EXPORT int gtco_products_set(gtco_products* p, int64_t m, int64_t n, int64_t k) {
  gtco_problem_forget(p);
  if (checked(p, m, n, k)) return -1;
  const gtco_problem problem = of_matrix(m, n, k);
  return gtco_problem_set(p, &problem);
}

EXPORT int gtco_products_run(gtco_products* p, const float* a, const float* packed, float* c) {
  if (!p->ready) return gtco_problem_fail(p, "no sizes are set: call gtco_products_set or gtco_convolutions_set before");
  p->cut.past = p->past && (uintptr_t)c % 64 == 0;
  p->args[0] = (void*)a, p->args[1] = (void*)((const char*)packed + p->weights_at), p->args[2] = &p->cut, p->args[3] = c;
  const int error = gtco_pool_run(&p->pool, NULL);
  return error ? gtco_problem_fail(p, "cannot start threads: %s", strerror(error)) : 0;
}

EXPORT const char* gtco_products_kernel_name(int64_t kernel) {
  return kernel >= 0 && kernel < gtco_the_machine.nests ? gtco_the_nests[kernel].name : NULL;
}

EXPORT const char* gtco_products_error(const gtco_products* p) { return p->error; }
