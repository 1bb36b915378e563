#include "error.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A thread's message. All are in a list, because nobody else could free the messages of threads that outlive the
 * library. */
typedef struct buffer {
  char text[GTCO_MESSAGE_BYTES];
  struct buffer *next, *previous;
} buffer;

/* A pthread key, not __thread: thread-local storage in a library makes it depend on ld-linux besides libc. */
static pthread_key_t key;
static int key_ready;
static pthread_mutex_t list_lock = PTHREAD_MUTEX_INITIALIZER;
static buffer* buffers;
static int closed; /* no message exists any more, although threads may still run at the end of the process */

static void enlist(buffer* b) {
  b->next = buffers;
  if (buffers) buffers->previous = b;
  buffers = b;
}

/* When a thread ends. */
static void release(void* ended) {
  buffer* b = ended;
  pthread_mutex_lock(&list_lock);
  if (!closed) {
    if (b->previous) b->previous->next = b->next;
    if (b->next) b->next->previous = b->previous;
    if (buffers == b) buffers = b->next;
    free(b);
  }
  pthread_mutex_unlock(&list_lock);
}

static void before_fork(void) { pthread_mutex_lock(&list_lock); }
static void after_fork(void) { pthread_mutex_unlock(&list_lock); }

__attribute__((constructor)) static void create_key(void) {
  key_ready = pthread_key_create(&key, release) == 0;
  pthread_atfork(before_fork, after_fork, after_fork);
}

/* At dlclose, and at the end of the process. The key is deleted first: through it, a thread that ends later would call a function that is unloaded. */
__attribute__((destructor)) static void delete_key(void) {
  if (!key_ready) return;
  pthread_key_delete(key);
  pthread_mutex_lock(&list_lock);
  closed = 1;
  while (buffers) {
    buffer* next = buffers->next;
    free(buffers);
    buffers = next;
  }
  pthread_mutex_unlock(&list_lock);
}

gtco_status gtco_fail(char* buffer, gtco_status status, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(buffer, GTCO_MESSAGE_BYTES, format, arguments);
  va_end(arguments);
  return status;
}

static buffer* mine_or_new(const char* text) {
  buffer* mine = pthread_getspecific(key);
  if (mine || !text) return mine;
  mine = calloc(1, sizeof *mine);
  if (!mine || pthread_setspecific(key, mine) != 0) {
    free(mine);
    return NULL;
  }
  enlist(mine);
  return mine;
}

void gtco_set_thread_error(const char* text) {
  if (!key_ready) return;
  pthread_mutex_lock(&list_lock);
  buffer* mine = closed ? NULL : mine_or_new(text);
  if (mine) snprintf(mine->text, sizeof mine->text, "%s", text ? text : "");
  pthread_mutex_unlock(&list_lock);
}

const char* gtco_thread_error(void) {
  const buffer* mine = key_ready && !closed ? pthread_getspecific(key) : NULL;
  return mine ? mine->text : "";
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
