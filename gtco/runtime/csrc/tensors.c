#include "tensors.h"

#include "error.h"
#include "metadata.h"

#define EXPORT __attribute__((visibility("default")))

static const gtco_plan* const plan = &gtco_the_plan;

int gtco_num_tensors(void) { return plan->num_inputs + plan->num_outputs; }
int gtco_is_output(int tensor) { return tensor >= plan->num_inputs; }

const gtco_tensor_info* gtco_tensor(const gtco_variant* variant, int tensor) {
  return gtco_is_output(tensor) ? &variant->outputs[tensor - plan->num_inputs] : &variant->inputs[tensor];
}

size_t gtco_most_bytes(int tensor) {
  int64_t most = 0;
  for (int v = 0; v < plan->num_variants; ++v) {
    const int64_t bytes = gtco_tensor(&plan->variants[v], tensor)->nbytes;
    if (bytes > most) most = bytes;
  }
  return (size_t)most;
}

const void* gtco_pointer(const void* const* inputs, void* const* outputs, int tensor) {
  return gtco_is_output(tensor) ? outputs[tensor - plan->num_inputs] : inputs[tensor];
}

size_t gtco_round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

static int overlap(const void* a, int64_t a_bytes, const void* b, int64_t b_bytes) {
  return a_bytes && b_bytes && (const char*)a < (const char*)b + b_bytes && (const char*)b < (const char*)a + a_bytes;
}

gtco_status gtco_check_pointers(const gtco_variant* variant, const void* const* inputs, void* const* outputs,
                                char* message) {
  if ((!inputs && plan->num_inputs) || (!outputs && plan->num_outputs))
    return gtco_fail(message, GTCO_ERROR_ARGUMENT, "gtco_run: the array of %s pointers is NULL",
                     !inputs && plan->num_inputs ? "input" : "output");
  for (int t = 0; t < gtco_num_tensors(); ++t) {
    const gtco_tensor_info* info = gtco_tensor(variant, t);
    const void* pointer = gtco_pointer(inputs, outputs, t);
    const int output = t - plan->num_inputs;
    if (!pointer && info->nbytes)
      return gtco_fail(message, GTCO_ERROR_ARGUMENT, "gtco_run: the pointer of %s %d ('%s', %lld bytes) is NULL",
                       output < 0 ? "input" : "output", output < 0 ? t : output, info->name, (long long)info->nbytes);
    for (int other = 0; output >= 0 && other < t; ++other)
      if (overlap(pointer, info->nbytes, gtco_pointer(inputs, outputs, other), gtco_tensor(variant, other)->nbytes))
        return gtco_fail(message, GTCO_ERROR_ARGUMENT, "gtco_run: output '%s' overlaps '%s' in memory", info->name,
                         gtco_tensor(variant, other)->name);
  }
  return GTCO_OK;
}

/* ---- describing ---- */

EXPORT int gtco_num_inputs(const gtco_model* model) { return model ? plan->num_inputs : 0; }
EXPORT int gtco_num_outputs(const gtco_model* model) { return model ? plan->num_outputs : 0; }
EXPORT int gtco_abi_version(void) { return GTCO_ABI_VERSION; }

EXPORT const gtco_tensor_info* gtco_input(const gtco_model* model, int index) {
  return model && index >= 0 && index < plan->num_inputs ? &plan->inputs[index] : NULL;
}

EXPORT const gtco_tensor_info* gtco_output(const gtco_model* model, int index) {
  return model && index >= 0 && index < plan->num_outputs ? &plan->outputs[index] : NULL;
}

EXPORT const char* gtco_artifact_metadata(void) { return gtco_metadata_text(); }
EXPORT const char* gtco_metadata(const gtco_model* model) { return model ? gtco_metadata_text() : NULL; }
