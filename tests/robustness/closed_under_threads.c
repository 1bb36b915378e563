/* A thread that outlives the library that gave it an error: closed_under_threads LIBRARY. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "gtco_api.h"

static pthread_barrier_t meeting;
static gtco_status (*open_model)(const gtco_options*, gtco_model**);
static const char* (*last_error)(const gtco_model*);

static void* outlive(void* argument) {
  const gtco_options wrong = {.num_threads = -1};
  gtco_model* model;
  int* right = argument;
  *right = open_model(&wrong, &model) == GTCO_ERROR_ARGUMENT && strstr(last_error(NULL), "num_threads is -1");
  pthread_barrier_wait(&meeting);
  pthread_barrier_wait(&meeting); /* the library is closed between the two */
  return NULL;
}

int main(int argc, char** argv) {
  pthread_t thread, ended;
  int right[2] = {0, 0};
  if (argc != 2) return 2;
  for (int turn = 0; turn < 3; ++turn) {
    void* library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
    if (!library) return 3;
    *(void**)&open_model = dlsym(library, "gtco_open");
    *(void**)&last_error = dlsym(library, "gtco_last_error");
    pthread_barrier_init(&meeting, NULL, 2);
    pthread_create(&thread, NULL, outlive, &right[0]);
    pthread_barrier_wait(&meeting);
    dlclose(library);
    pthread_barrier_wait(&meeting);
    pthread_join(thread, NULL);
    pthread_barrier_destroy(&meeting);

    /* and a thread that ends before */
    library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
    if (!library) return 3;
    *(void**)&open_model = dlsym(library, "gtco_open");
    *(void**)&last_error = dlsym(library, "gtco_last_error");
    pthread_barrier_init(&meeting, NULL, 2);
    pthread_create(&ended, NULL, outlive, &right[1]);
    pthread_barrier_wait(&meeting);
    pthread_barrier_wait(&meeting);
    pthread_join(ended, NULL);
    pthread_barrier_destroy(&meeting);
    dlclose(library);
  }
  if (!right[0] || !right[1]) return 4;
  puts("done");
  return 0;
}
