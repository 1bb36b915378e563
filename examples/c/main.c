/* Runs a compiled model on zeros and prints what it takes and gives.
 *
 *     make MODEL=path/to/vit.so && ./run
 *     ./run 4x3x224x224    the shape of each input, for a model that was compiled for several
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

/* Reads 4x3x224x224 into the sizes of an input. Returns 0 if it has another number of axes. */
static int read_shape(const gtco_tensor_info* info, const char* text, int64_t* sizes) {
  int axes = 0;
  for (const char* next = text; *next; ++axes) {
    char* end;
    const long long size = strtoll(next, &end, 10);
    if (end == next || (*end && *end != 'x')) return 0;
    if (axes < info->ndim) sizes[axes] = size;
    next = *end ? end + 1 : end;
  }
  return axes == info->ndim;
}

/* Sets the shapes that are given on the command line, one for each input. */
static int set_shapes(gtco_model* model, int count, char** texts) {
  const int64_t** shapes = calloc((size_t)count + 1, sizeof *shapes);
  gtco_status status = GTCO_ERROR_ARGUMENT;
  if (!shapes) return 0;
  if (count != gtco_num_inputs(model)) {
    fprintf(stderr, "usage: run [SHAPE of each of the %d inputs, such as 4x3x224x224]\n", gtco_num_inputs(model));
    return 0;
  }
  for (int i = 0; i < count; ++i) {
    const gtco_tensor_info* info = gtco_input(model, i);
    int64_t* sizes = calloc((size_t)info->ndim + 1, sizeof *sizes);
    if (!sizes) return 0;
    if (!read_shape(info, texts[i], sizes)) {
      fprintf(stderr, "'%s' has %d axes, and '%s' is not a shape of so many\n", info->name, info->ndim, texts[i]);
      return 0;
    }
    shapes[i] = sizes;
  }
  status = gtco_set_shapes(model, shapes);
  if (status != GTCO_OK) fprintf(stderr, "%s\n", gtco_last_error(model));
  for (int i = 0; i < count; ++i) free((void*)shapes[i]);
  free(shapes);
  return status == GTCO_OK;
}

int main(int argc, char** argv) {
  gtco_model* model = NULL;
  gtco_status status = gtco_open(NULL, &model); /* NULL: the default number of threads */
  if (status != GTCO_OK) {
    fprintf(stderr, "cannot open the model: %s (%s)\n", gtco_last_error(NULL), gtco_status_string(status));
    return 1;
  }
  if (argc > 1 && !set_shapes(model, argc - 1, argv + 1)) return 1;
  if (!gtco_sized_input(model, 0) && !gtco_sized_output(model, 0)) {
    fprintf(stderr, "the model was compiled for several shapes: give one, for gtco_set_shapes\n");
    return 1;
  }
  const int num_inputs = gtco_num_inputs(model), num_outputs = gtco_num_outputs(model);
  void** inputs = calloc((size_t)num_inputs + 1, sizeof *inputs);
  void** outputs = calloc((size_t)num_outputs + 1, sizeof *outputs);
  if (!inputs || !outputs) return 1;
  for (int i = 0; i < num_inputs; ++i) {
    describe("input", gtco_sized_input(model, i));
    if (!(inputs[i] = allocate(gtco_sized_input(model, i)))) return 1;
  }
  for (int i = 0; i < num_outputs; ++i) {
    describe("output", gtco_sized_output(model, i));
    if (!(outputs[i] = allocate(gtco_sized_output(model, i)))) return 1;
  }
  printf("%d steps on %d threads\n", gtco_num_steps(model), gtco_num_threads(model));

  status = gtco_run(model, (const void* const*)inputs, outputs);
  if (status != GTCO_OK) {
    fprintf(stderr, "the run failed: %s\n", gtco_last_error(model));
    return 1;
  }
  for (int i = 0; i < num_outputs; ++i) print_first(gtco_sized_output(model, i), outputs[i]);

  for (int i = 0; i < num_inputs; ++i) free(inputs[i]);
  for (int i = 0; i < num_outputs; ++i) free(outputs[i]);
  free(inputs);
  free(outputs);
  gtco_close(model);
  return 0;
}
