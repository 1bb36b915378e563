/* Runs a compiled model on zeros and prints what it takes and gives.
 *
 *     make MODEL=path/to/vit.so && ./run
 *
 * The header is the one that gtco wrote beside the library; the Makefile names it.
 */
#include <stdio.h>
#include <stdlib.h>

#include MODEL_HEADER

#define SHOWN 5

static const char* const DTYPES[] = {"float32", "float64", "float16", "bfloat16", "int64",  "int32", "int16",
                                     "int8",    "uint64",  "uint32",  "uint16",   "uint8", "bool"};

static void describe(const char* kind, const gtco_tensor_info* info) {
  printf("%s %s: %s[", kind, info->name, DTYPES[info->dtype]);
  for (int i = 0; i < info->ndim; ++i) printf("%s%lld", i ? ", " : "", (long long)info->dims[i]);
  printf("], %lld bytes\n", (long long)info->nbytes);
}

/* Zeros, aligned to 64 bytes: such memory is used in place, any other is copied. */
static void* allocate(const gtco_tensor_info* info) {
  size_t bytes = ((size_t)info->nbytes + 63) / 64 * 64;
  char* memory = aligned_alloc(64, bytes ? bytes : 64);
  for (size_t i = 0; memory && i < bytes; ++i) memory[i] = 0;
  return memory;
}

static void print_first(const gtco_tensor_info* info, const void* data) {
  if (info->dtype != GTCO_FLOAT32) return;
  long long count = info->nbytes / 4;
  printf("%s =", info->name);
  for (long long i = 0; i < count && i < SHOWN; ++i) printf(" %g", ((const float*)data)[i]);
  printf("%s\n", count > SHOWN ? " ..." : "");
}

int main(void) {
  gtco_model* model = NULL;
  gtco_status status = gtco_open(NULL, &model); /* NULL: the default number of threads */
  if (status != GTCO_OK) {
    fprintf(stderr, "cannot open the model: %s (%s)\n", gtco_last_error(NULL), gtco_status_string(status));
    return 1;
  }
  const int num_inputs = gtco_num_inputs(model), num_outputs = gtco_num_outputs(model);
  void** inputs = calloc((size_t)num_inputs + 1, sizeof *inputs);
  void** outputs = calloc((size_t)num_outputs + 1, sizeof *outputs);
  if (!inputs || !outputs) return 1;
  for (int i = 0; i < num_inputs; ++i) {
    describe("input", gtco_input(model, i));
    if (!(inputs[i] = allocate(gtco_input(model, i)))) return 1;
  }
  for (int i = 0; i < num_outputs; ++i) {
    describe("output", gtco_output(model, i));
    if (!(outputs[i] = allocate(gtco_output(model, i)))) return 1;
  }
  printf("%d steps on %d threads\n", gtco_num_steps(model), gtco_num_threads(model));

  status = gtco_run(model, (const void* const*)inputs, outputs);
  if (status != GTCO_OK) {
    fprintf(stderr, "the run failed: %s\n", gtco_last_error(model));
    return 1;
  }
  for (int i = 0; i < num_outputs; ++i) print_first(gtco_output(model, i), outputs[i]);

  for (int i = 0; i < num_inputs; ++i) free(inputs[i]);
  for (int i = 0; i < num_outputs; ++i) free(outputs[i]);
  free(inputs);
  free(outputs);
  gtco_close(model);
  return 0;
}
