/* What a program may do around its models: in_process WHAT LIBRARY [OTHER]. Ends with 0 if all was well. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "gtco_api.h"

#define BYTES (1 << 16) /* of a tensor, at most */
#define TENSORS 8
#define TASKS 32 /* of the library of test_restart.py */

static gtco_status (*p_open)(const gtco_options*, gtco_model**);
static gtco_status (*p_run)(gtco_model*, const void* const*, void* const*);
static gtco_status (*p_set_shapes)(gtco_model*, const int64_t* const*);
static const gtco_tensor_info* (*p_input)(const gtco_model*, int);
static const gtco_tensor_info* (*p_output)(const gtco_model*, int);
static const char* (*p_error)(const gtco_model*);

static gtco_model* model;
static const void* inputs[TENSORS];
static void* outputs[TENSORS];

static int end(const char* text, const char* more) {
  fprintf(stderr, "%s%s\n", text, more);
  return 1;
}

static void* found(void* library, const char* name) {
  void* symbol = dlsym(library, name);
  if (!symbol) exit(end("no ", name));
  return symbol;
}

static void load(const char* path) {
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!library) exit(end("dlopen: ", dlerror()));
  p_open = found(library, "gtco_open");
  p_run = found(library, "gtco_run");
  p_set_shapes = found(library, "gtco_set_shapes");
  p_input = found(library, "gtco_sized_input");
  p_output = found(library, "gtco_sized_output");
  p_error = found(library, "gtco_last_error");
  for (int t = 0; t < TENSORS; ++t) {
    inputs[t] = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    outputs[t] = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  }
}

static void open_model(void) {
  const gtco_options options = {.num_threads = 2};
  if (p_open(&options, &model) != GTCO_OK) exit(end("gtco_open: ", p_error(NULL)));
}

static void run(void) {
  if (p_run(model, inputs, outputs) != GTCO_OK) exit(end("gtco_run: ", p_error(model)));
}

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* From here on the system refuses a call to all threads, if its first argument is at least `least`. */
static void refuse(uint32_t call, uint32_t least) {
  struct sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 3),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args)),
      BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, least, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  struct sock_fprog program = {sizeof filter / sizeof *filter, filter};
  prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
  if (syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program) != 0) exit(77);
}

/* ---- exit: the process ends while a thread runs, in calls that signals end ---- */

static void nothing(int number) { (void)number; }

static void* run_always(void* argument) {
  sigset_t alarms;
  sigemptyset(&alarms);
  sigaddset(&alarms, SIGALRM);
  pthread_sigmask(SIG_UNBLOCK, &alarms, NULL);
  for (;;) run();
  return argument;
}

static int ends(const char* path, const char* slow_to_close) {
  load(path);
  open_model();
  if (!dlopen(slow_to_close, RTLD_NOW)) return end("dlopen: ", dlerror()); /* its destructor comes after the model's */
  struct sigaction action = {.sa_handler = nothing, .sa_flags = SA_RESTART};
  sigaction(SIGALRM, &action, NULL);
  sigset_t alarms;
  sigemptyset(&alarms);
  sigaddset(&alarms, SIGALRM);
  pthread_sigmask(SIG_BLOCK, &alarms, NULL);
  const struct itimerval often = {{0, 500}, {0, 500}};
  setitimer(ITIMER_REAL, &often, NULL);
  pthread_t thread;
  pthread_create(&thread, NULL, run_always, NULL);
  usleep(20000);
  exit(0);
}

/* ---- messages: the process ends while threads that had an error end ---- */

static void* fail_once(void* argument) {
  const gtco_options wrong = {.num_threads = -1};
  gtco_model* none;
  if (p_open(&wrong, &none) == GTCO_OK) _exit(9);
  return argument;
}

static void* fail_always(void* argument) {
  for (;;) {
    pthread_t threads[8];
    for (int t = 0; t < 8; ++t) pthread_create(&threads[t], NULL, fail_once, NULL);
    for (int t = 0; t < 8; ++t) pthread_join(threads[t], NULL);
  }
  return argument;
}

static int ends_with_messages(const char* path) {
  load(path);
  for (int n = 0; n < 1000; ++n) {
    const pid_t child = fork();
    if (child == 0) {
      pthread_t thread;
      for (int t = 0; t < 3; ++t) pthread_create(&thread, NULL, fail_always, NULL);
      usleep(1000 + (useconds_t)(n % 17) * 100);
      exit(0);
    }
    int status;
    waitpid(child, &status, 0);
    if (status != 0) return end("a process died in exit()", "");
  }
  return 0;
}

/* ---- fault: the program's handler makes an input readable on the first access, in whichever thread ---- */

static void readable(int number, siginfo_t* info, void* context) {
  (void)number, (void)context;
  if (info->si_addr < inputs[0] || (const char*)info->si_addr >= (const char*)inputs[0] + BYTES) _exit(9);
  mprotect((void*)inputs[0], BYTES, PROT_READ | PROT_WRITE);
}

static int faults(const char* path) {
  struct sigaction action = {.sa_sigaction = readable, .sa_flags = SA_SIGINFO};
  sigaction(SIGSEGV, &action, NULL);
  load(path);
  open_model();
  for (int i = 0; i < 300; ++i) {
    mprotect((void*)inputs[0], BYTES, PROT_NONE);
    run();
  }
  return 0;
}

/* ---- sandboxes that are entered after the model was opened ---- */

static int without_barriers(const char* path) {
  load(path);
  open_model();
  refuse(SYS_membarrier, 0);
  for (double until = now() + 2; now() < until;) run();
  return 0;
}

/* Of other threads' CPU time, whose clocks have negative numbers. A range that goes on in another thread ends there. */
static int without_clocks(const char* path) {
  load(path);
  open_model();
  refuse(SYS_clock_gettime, 0x80000000u);
  for (double until = now() + 2; now() < until;) {
    run();
    if (memcmp(outputs[2], outputs[3], TASKS * sizeof(uint64_t)) != 0) return end("a range was taken over", "");
  }
  return 0;
}

/* ---- folder: the library is loaded by a relative path, and the program goes elsewhere ---- */

static int goes_elsewhere(const char* path) {
  load(path);
  if (chdir("/") != 0) return 1;
  open_model();
  run();
  return 0;
}

/* ---- fork: a child has the sizes of before or after those that another thread sets ---- */

static void set_batch(int64_t batch) {
  const int64_t x[] = {batch, 2, 3, 40}, mask[] = {batch, 2, 3}, same[] = {2, 40}, kept[] = {2};
  const int64_t* const shapes[] = {x, mask, same, kept};
  if (p_set_shapes(model, shapes) != GTCO_OK) exit(end("gtco_set_shapes: ", p_error(model)));
}

static void* set_always(void* argument) {
  for (;;) set_batch(9), set_batch(1);
  return argument;
}

static int forks(const char* path) {
  load(path);
  open_model();
  set_batch(9);
  pthread_t thread;
  pthread_create(&thread, NULL, set_always, NULL);
  int torn = 0;
  for (double until = now() + 3; !torn && now() < until;) {
    const pid_t child = fork();
    if (child == 0) {
      const int64_t b = p_input(model, 0)->dims[0];
      _exit((b != 1 && b != 9) || p_input(model, 0)->nbytes != b * 960 || p_input(model, 1)->dims[0] != b ||
            p_input(model, 1)->nbytes != b * 6 || p_output(model, 0)->dims[0] != b || p_output(model, 0)->nbytes != b * 960);
    }
    int status;
    waitpid(child, &status, 0);
    torn = status != 0;
  }
  return torn ? end("a child has sizes of two shapes", "") : 0;
}

int main(int count, char** arguments) {
  const char *what = arguments[1], *library = arguments[2];
  if (!strcmp(what, "exit")) return ends(library, arguments[3]);
  if (!strcmp(what, "messages")) return ends_with_messages(library);
  if (!strcmp(what, "fault")) return faults(library);
  if (!strcmp(what, "barriers")) return without_barriers(library);
  if (!strcmp(what, "clocks")) return without_clocks(library);
  if (!strcmp(what, "folder")) return goes_elsewhere(library);
  if (!strcmp(what, "fork")) return forks(library);
  return count;
}
