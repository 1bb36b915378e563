#define _GNU_SOURCE
#include "cuda/driver.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>

#include "error.h"

#define LIBRARY "libcuda.so.1"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static gtco_driver driver;
static int ready;

/* The child of a fork may find the lock held by a thread that it does not have. */
static void before_fork(void) { pthread_mutex_lock(&lock); }
static void after_fork(void) { pthread_mutex_unlock(&lock); }

__attribute__((constructor)) static void register_fork_handlers(void) {
  pthread_atfork(before_fork, after_fork, after_fork);
}

const gtco_driver* gtco_cuda(void) { return &driver; }

int gtco_driver_version(void) {
  int version = 0;
  if (driver.cuDriverGetVersion && driver.cuDriverGetVersion(&version) != CUDA_SUCCESS) version = 0;
  return version;
}

/* dlsym's object pointer as a function pointer, which ISO C has no cast for. */
static int find(void* library, const char* name, void* function) {
  void* symbol = dlsym(library, name);
  *(void**)function = symbol;
  return symbol != NULL;
}

static gtco_status load(char* message) {
  /* NODELETE: the driver has threads of its own, so it must stay loaded while the process lives. */
  void* library = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (!library) {
    const char* why = dlerror();
    return gtco_fail(message, GTCO_ERROR_DRIVER,
                     "this model runs on NVIDIA GPUs, and their driver cannot be opened (%s); install the NVIDIA driver, "
                     "in a container run it with the GPUs (--gpus all)",
                     why ? why : LIBRARY);
  }
  const char* missing = NULL;
#define FUNCTION(name, exported, parameters) \
  if (!find(library, #exported, &driver.name) && !missing) missing = #exported;
  GTCO_DRIVER_FUNCTIONS(FUNCTION)
#undef FUNCTION
  if (missing) {
    const int version = gtco_driver_version();
    return gtco_fail(message, GTCO_ERROR_DRIVER,
                     "the NVIDIA driver is too old: it serves CUDA %d.%d and lacks %s; update it to one that serves CUDA "
                     "%d.%d or later",
                     version / 1000, version % 1000 / 10, missing, GTCO_OLDEST_CUDA / 1000, GTCO_OLDEST_CUDA % 1000 / 10);
  }
  ready = 1;
  return GTCO_OK;
}

gtco_status gtco_driver_open(char* message) {
  pthread_mutex_lock(&lock);
  gtco_status status = ready ? GTCO_OK : load(message);
  pthread_mutex_unlock(&lock);
  if (status != GTCO_OK) return status;
  CUresult result = driver.cuInit(0);
  if (result == CUDA_ERROR_NOT_INITIALIZED) /* cuInit itself gives this if a parent called it before the fork */
    return gtco_driver_fail(message, result, "cuInit",
                            "starting the NVIDIA driver, which does not survive a fork: a process that this one was "
                            "forked from had started it; use CUDA after the fork alone, or start processes anew (spawn)");
  if (result != CUDA_SUCCESS) return gtco_driver_fail(message, result, "cuInit", "starting the NVIDIA driver");
  return GTCO_OK;
}

gtco_status gtco_driver_fail(char* message, CUresult result, const char* call, const char* doing, ...) {
  char what[GTCO_MESSAGE_BYTES / 2];
  const char *name = NULL, *text = NULL;
  va_list arguments;
  va_start(arguments, doing);
  vsnprintf(what, sizeof what, doing, arguments);
  va_end(arguments);
  if (driver.cuGetErrorName(result, &name) != CUDA_SUCCESS || !name) name = "an unknown error";
  if (driver.cuGetErrorString(result, &text) != CUDA_SUCCESS || !text) text = "no text";
  return gtco_fail(message, result == CUDA_ERROR_OUT_OF_MEMORY ? GTCO_ERROR_MEMORY : GTCO_ERROR_DEVICE,
                   "%s: %s failed with %s (%d, %s)", what, call, name, result, text);
}
