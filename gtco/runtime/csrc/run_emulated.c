/* A program that an emulator runs: opens a library and runs it for the process that started it (runtime/emulated.py).
 *
 * run_emulated LIBRARY THREADS. It answers each command on its input by a message on its output: int32 status, int32
 * bytes, and so many bytes of text where the status is not 0. The commands are letters, with data behind them:
 *   (none) the answer to opening comes first;
 *   s      int64 sizes of every input: the shapes of the next runs;
 *   r      the inputs, dense: a run; the outputs follow the answer;
 *   p      as r; behind the outputs come the seconds of each step, as doubles. An emulator's seconds mean nothing. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gtco_api.h"

static const char* (*last_error)(const gtco_model*);

static void answer(int32_t status, const char* text) {
  const int32_t bytes = status ? (int32_t)strlen(text) : 0;
  fwrite(&status, sizeof status, 1, stdout);
  fwrite(&bytes, sizeof bytes, 1, stdout);
  if (bytes) fwrite(text, (size_t)bytes, 1, stdout);
}

static void* function(void* library, const char* name) {
  void* found = dlsym(library, name);
  if (!found) {
    answer(-1, name);
    fflush(stdout);
    exit(1);
  }
  return found;
}

static void* taken(size_t bytes) {
  void* data = malloc(bytes + 1);
  if (!data || (bytes && fread(data, bytes, 1, stdin) != 1)) exit(1);
  return data;
}

int main(int count, char** arguments) {
  if (count != 3) return 2;
  void* library = dlopen(arguments[1], RTLD_NOW);
  if (!library) {
    answer(-1, dlerror());
    return 1;
  }
  gtco_status (*open)(const gtco_options*, gtco_model**) = function(library, "gtco_open");
  gtco_status (*run)(gtco_model*, const void* const*, void* const*, double*) = function(library, "gtco_profile");
  gtco_status (*set_shapes)(gtco_model*, const int64_t* const*) = function(library, "gtco_set_shapes");
  int (*num_inputs)(const gtco_model*) = function(library, "gtco_num_inputs");
  int (*num_outputs)(const gtco_model*) = function(library, "gtco_num_outputs");
  int (*num_steps)(const gtco_model*) = function(library, "gtco_num_steps");
  const gtco_tensor_info* (*input)(const gtco_model*, int) = function(library, "gtco_sized_input");
  const gtco_tensor_info* (*output)(const gtco_model*, int) = function(library, "gtco_sized_output");
  const gtco_tensor_info* (*any_input)(const gtco_model*, int) = function(library, "gtco_input");
  last_error = (const char* (*)(const gtco_model*))function(library, "gtco_last_error");

  gtco_options options;
  memset(&options, 0, sizeof options);
  options.num_threads = atoi(arguments[2]);
  gtco_model* model = NULL;
  gtco_status status = open(&options, &model);
  answer((int32_t)status, last_error(NULL));
  fflush(stdout);
  if (status != GTCO_OK) return 1;

  const int inputs = num_inputs(model), outputs = num_outputs(model);
  void** in = calloc((size_t)inputs + 1, sizeof *in);
  void** out = calloc((size_t)outputs + 1, sizeof *out);
  for (int command; (command = getchar()) != EOF;) {
    if (command == 's') {
      for (int i = 0; i < inputs; ++i) in[i] = taken((size_t)any_input(model, i)->ndim * sizeof(int64_t));
      status = set_shapes(model, (const int64_t* const*)in);
      answer((int32_t)status, last_error(model));
    } else {
      for (int i = 0; i < inputs; ++i) in[i] = taken((size_t)input(model, i)->nbytes);
      for (int i = 0; i < outputs; ++i) out[i] = calloc((size_t)output(model, i)->nbytes + 1, 1);
      const int steps = num_steps(model);
      double* seconds = calloc((size_t)steps + 1, sizeof *seconds);
      status = run(model, (const void* const*)in, out, command == 'p' ? seconds : NULL);
      answer((int32_t)status, last_error(model));
      for (int i = 0; i < outputs; ++i) {
        if (status == GTCO_OK) fwrite(out[i], (size_t)output(model, i)->nbytes, 1, stdout);
        free(out[i]);
      }
      if (command == 'p' && status == GTCO_OK) fwrite(seconds, sizeof *seconds, (size_t)steps, stdout);
      free(seconds);
    }
    for (int i = 0; i < inputs; ++i) free(in[i]);
    fflush(stdout);
  }
  return 0;
}
