#include "error.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A pthread key, not __thread: thread-local storage in a library makes it depend on ld-linux besides libc. */
static pthread_key_t key;
static int key_ready;

__attribute__((constructor)) static void create_key(void) { key_ready = pthread_key_create(&key, free) == 0; }

/* Without this, a thread that ends after dlclose would call through a key whose owner is gone. */
__attribute__((destructor)) static void delete_key(void) {
  if (!key_ready) return;
  free(pthread_getspecific(key));
  pthread_key_delete(key);
}

gtco_status gtco_fail(char* buffer, gtco_status status, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(buffer, GTCO_MESSAGE_BYTES, format, arguments);
  va_end(arguments);
  return status;
}

void gtco_set_thread_error(const char* text) {
  if (!key_ready) return;
  char* buffer = pthread_getspecific(key);
  if (!buffer) {
    if (!text) return;
    buffer = malloc(GTCO_MESSAGE_BYTES);
    if (!buffer || pthread_setspecific(key, buffer) != 0) {
      free(buffer);
      return;
    }
  }
  snprintf(buffer, GTCO_MESSAGE_BYTES, "%s", text ? text : "");
}

const char* gtco_thread_error(void) {
  const char* buffer = key_ready ? pthread_getspecific(key) : NULL;
  return buffer ? buffer : "";
}

__attribute__((visibility("default"))) const char* gtco_status_string(gtco_status status) {
  switch (status) {
    case GTCO_OK: return "ok";
    case GTCO_ERROR_ARGUMENT: return "invalid argument";
    case GTCO_ERROR_CPU: return "this CPU lacks instructions that the model was compiled for";
    case GTCO_ERROR_MEMORY: return "out of memory";
    case GTCO_ERROR_WEIGHTS: return "the weights file is missing, truncated or of another model";
    case GTCO_ERROR_THREADS: return "a thread could not be started";
    case GTCO_ERROR_BUSY: return "another thread is running this handle: open one handle per thread";
    case GTCO_ERROR_DRIVER: return "there is no NVIDIA driver, or it is too old";
    case GTCO_ERROR_DEVICE: return "there is no such GPU, or a call of the NVIDIA driver failed";
    case GTCO_ERROR_IMAGE: return "the model was not compiled for this GPU";
  }
  return "unknown status";
}
