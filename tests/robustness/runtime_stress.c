/* Things that many threads of a program may do with one library at the same time: `stress LIBRARY THREADS ROUNDS [fork]`.
 * Each thread opens handles with 1 to 8 threads, runs and closes them, runs a handle that all share (which may be busy),
 * makes mistakes, and reads descriptions. With "fork" one more thread forks, and each child runs the shared handle and
 * one of its own. Outputs are compared with the first run's bit by bit. Prints a line for each fault and exits with 1.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "gtco_api.h"

#define MOST 8
#define CHECK(condition)                                                  \
  do {                                                                    \
    if (!(condition)) {                                                   \
      fprintf(stderr, "line %d: %s is not so\n", __LINE__, #condition);   \
      _exit(1);                                                           \
    }                                                                     \
  } while (0)

#define FUNCTIONS(F) \
  F(open) F(close) F(run) F(profile) F(num_inputs) F(num_outputs) F(input) F(output) F(num_steps) F(num_threads) \
  F(metadata) F(last_error)
#define DECLARE(name) static __typeof__(&gtco_##name) p_##name;
FUNCTIONS(DECLARE)

typedef struct {
  void* inputs[MOST];
  void* outputs[MOST];
} tensors;

static gtco_model* shared;
static tensors wanted;
static int rounds, forking;
static atomic_int running;
static pthread_barrier_t start;

static tensors make_tensors(const gtco_model* model, size_t misaligned) {
  tensors t = {{0}, {0}};
  for (int i = 0; i < p_num_inputs(model); ++i) {
    const gtco_tensor_info* info = p_input(model, i);
    char* data = t.inputs[i] = (char*)malloc((size_t)info->nbytes + 64) + misaligned;
    for (int64_t k = 0; k < info->nbytes / (info->dtype == GTCO_FLOAT32 ? 4 : 1); ++k)
      if (info->dtype == GTCO_FLOAT32) memcpy(data + 4 * k, &(float){(float)(k % 17) - 8}, 4);
      else data[k] = (char)(k % 5 - 2);
  }
  for (int i = 0; i < p_num_outputs(model); ++i)
    t.outputs[i] = (char*)malloc((size_t)p_output(model, i)->nbytes + 64) + misaligned;
  return t;
}

static void free_tensors(const gtco_model* model, tensors t, size_t misaligned) {
  for (int i = 0; i < p_num_inputs(model); ++i) free((char*)t.inputs[i] - misaligned);
  for (int i = 0; i < p_num_outputs(model); ++i) free((char*)t.outputs[i] - misaligned);
}

static void check_outputs(const gtco_model* model, tensors t) {
  for (int i = 0; i < p_num_outputs(model); ++i)
    CHECK(memcmp(t.outputs[i], wanted.outputs[i], (size_t)p_output(model, i)->nbytes) == 0);
}

static gtco_status run(gtco_model* model, tensors t) {
  return p_run(model, (const void* const*)t.inputs, t.outputs);
}

static void own_handle(int threads, int runs) {
  gtco_model* model = NULL;
  double seconds[64];
  CHECK(p_open(&(gtco_options){.num_threads = threads, .spin_microseconds = threads % 3 - 1}, &model) == GTCO_OK);
  CHECK(p_num_threads(model) == threads && p_num_steps(model) <= 64);
  size_t misaligned = (size_t)(threads % 2 * 4);
  tensors t = make_tensors(model, misaligned);
  for (int i = 0; i < runs; ++i) {
    CHECK(p_profile(model, (const void* const*)t.inputs, t.outputs, i % 2 ? seconds : NULL) == GTCO_OK);
    check_outputs(model, t);
  }
  void* output = t.outputs[0];
  t.outputs[0] = NULL;
  CHECK(run(model, t) == GTCO_ERROR_ARGUMENT && strstr(p_last_error(model), "NULL"));
  t.outputs[0] = output;
  CHECK(run(model, t) == GTCO_OK && *p_last_error(model) == '\0');
  check_outputs(model, t);
  free_tensors(model, t, misaligned);
  p_close(model);
}

static void mistakes(void) {
  gtco_model* model = (gtco_model*)&shared;
  CHECK(p_open(&(gtco_options){.num_threads = -1}, &model) == GTCO_ERROR_ARGUMENT && !model);
  CHECK(strstr(p_last_error(NULL), "num_threads is -1"));
  CHECK(p_open(NULL, NULL) == GTCO_ERROR_ARGUMENT && p_run(NULL, NULL, NULL) == GTCO_ERROR_ARGUMENT);
  p_close(NULL);
}

static void* work(void* argument) {
  const int number = *(int*)argument;
  tensors t = make_tensors(shared, 0);
  pthread_barrier_wait(&start);
  for (int i = 0; i < rounds; ++i) {
    own_handle((number + i) % 8 + 1, 3);
    gtco_status status = run(shared, t);
    CHECK(status == GTCO_OK || status == GTCO_ERROR_BUSY);
    if (status == GTCO_OK) check_outputs(shared, t);
    mistakes();
    CHECK(strlen(p_metadata(shared)) > 2);
  }
  free_tensors(shared, t, 0);
  atomic_fetch_sub(&running, 1);
  return NULL;
}

/* A child has one thread, whatever the others were doing; an alarm ends a child that hangs. */
static void* fork_children(void* argument) {
  (void)argument;
  pthread_barrier_wait(&start);
  do {
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
      alarm(120);
      tensors t = make_tensors(shared, 0);
      for (int i = 0; i < 3; ++i) {
        CHECK(run(shared, t) == GTCO_OK);
        check_outputs(shared, t);
      }
      own_handle(3, 2);
      p_close(shared);
      _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  } while (atomic_load(&running));
  return NULL;
}

int main(int count, char** arguments) {
  CHECK(count >= 4);
  const int threads = atoi(arguments[2]);
  rounds = atoi(arguments[3]);
  forking = count > 4;
  void* library = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
  if (!library) fprintf(stderr, "%s\n", dlerror());
  CHECK(library);
#define LOOK_UP(name) CHECK(p_##name = (__typeof__(p_##name))dlsym(library, "gtco_" #name));
  FUNCTIONS(LOOK_UP)
  CHECK(p_open(&(gtco_options){.num_threads = 3}, &shared) == GTCO_OK);
  wanted = make_tensors(shared, 0);
  CHECK(run(shared, wanted) == GTCO_OK);
  pthread_t workers[64], forker;
  int numbers[64];
  CHECK(threads <= 64);
  atomic_store(&running, threads);
  pthread_barrier_init(&start, NULL, (unsigned)(threads + forking));
  for (int i = 0; i < threads; ++i) {
    numbers[i] = i;
    CHECK(pthread_create(&workers[i], NULL, work, &numbers[i]) == 0);
  }
  if (forking) CHECK(pthread_create(&forker, NULL, fork_children, NULL) == 0);
  for (int i = 0; i < threads; ++i) pthread_join(workers[i], NULL);
  if (forking) pthread_join(forker, NULL);
  free_tensors(shared, wanted, 0);
  p_close(shared);
  dlclose(library);
  puts("done");
  return 0;
}
