#include "variants.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "error.h"

#define EXPORT __attribute__((visibility("default")))
#define LIST_BYTES 384

static const gtco_plan* const plan = &gtco_the_plan;

/* A text that grows to LIST_BYTES and is cut there. */
typedef struct {
  char text[LIST_BYTES];
  size_t used;
} list;

__attribute__((format(printf, 2, 3))) static void add(list* l, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  const int n = vsnprintf(l->text + l->used, sizeof l->text - l->used, format, arguments);
  va_end(arguments);
  if (n > 0) l->used = l->used + (size_t)n < sizeof l->text ? l->used + (size_t)n : sizeof l->text - 1;
}

static int has_shapes(const gtco_variant* variant, const int64_t* const* shapes) {
  for (int i = 0; i < plan->num_inputs; ++i)
    for (int axis = 0; axis < variant->inputs[i].ndim; ++axis)
      if (variant->inputs[i].dims[axis] != shapes[i][axis]) return 0;
  return 1;
}

static int64_t size_of(int variant, int input, int axis) { return plan->variants[variant].inputs[input].dims[axis]; }

/* The sizes of an axis in the variants, each once. Returns whether `size` is among them. */
static int known_sizes(int input, int axis, int64_t size, list* known) {
  int found = 0;
  for (int v = 0; v < plan->num_variants; ++v) {
    const int64_t one = size_of(v, input, axis);
    int before = 0;
    while (before < v && size_of(before, input, axis) != one) ++before;
    if (before == v) add(known, "%s%lld", v ? "," : "", (long long)one);
    found |= one == size;
  }
  return found;
}

/* The range that an axis of this name has, where its sizes are one. */
static const gtco_named_range* range_named(const char* symbol) {
  for (int r = 0; r < plan->num_named_ranges; ++r)
    if (!strcmp(plan->named_ranges[r].symbol, symbol)) return &plan->named_ranges[r];
  return NULL;
}

gtco_status gtco_out_of_range(char* message, const char* input, int axis, const char* symbol, int64_t size, int64_t low,
                              int64_t high, int64_t step) {
  char steps[48] = "";
  if (step > 1) snprintf(steps, sizeof steps, " in steps of %lld", (long long)step);
  return gtco_fail(message, GTCO_ERROR_ARGUMENT,
                   "gtco_set_shapes: '%s' (axis %d of input '%s') is %lld, and this model was compiled for %lld to "
                   "%lld%s; gtco compile --dim '%s=LOW..HIGH%s' gives another range",
                   symbol, axis, input, (long long)size, (long long)low, (long long)high, steps, symbol,
                   step > 1 ? ":STEP" : "");
}

gtco_status gtco_refuse_shapes(const int64_t* const* shapes, char* message) {
  list given = {"", 0};
  for (int i = 0; i < plan->num_inputs; ++i) {
    const gtco_tensor_info* info = &plan->inputs[i];
    add(&given, "%s'%s' [", i ? ", " : "", info->name);
    for (int axis = 0; axis < info->ndim; ++axis) {
      const int64_t size = shapes[i][axis];
      const char* symbol = info->symbols[axis];
      list known = {"", 0};
      add(&given, "%s%lld", axis ? ", " : "", (long long)size);
      if (plan->range && plan->range->axes[i] == axis) continue;
      if (known_sizes(i, axis, size, &known)) continue;
      if (!symbol)
        return gtco_fail(message, GTCO_ERROR_ARGUMENT,
                         "gtco_set_shapes: axis %d of input '%s' has size %lld, and this model was compiled for %s alone",
                         axis, info->name, (long long)size, known.text);
      const gtco_named_range* range = range_named(symbol);
      if (range)
        return gtco_out_of_range(message, info->name, axis, symbol, size, range->low, range->high, range->step);
      return gtco_fail(message, GTCO_ERROR_ARGUMENT,
                       "gtco_set_shapes: '%s' (axis %d of input '%s') is %lld, and this model was compiled for %s; gtco "
                       "compile --dim '%s=%s,...' adds sizes",
                       symbol, axis, info->name, (long long)size, known.text, symbol, known.text);
    }
    add(&given, "]");
  }
  return gtco_fail(message, GTCO_ERROR_ARGUMENT,
                   "gtco_set_shapes: this model was compiled for each of these sizes, but not for all of them at once: %s; "
                   "sizes of one name are equal in all inputs",
                   given.text);
}

gtco_status gtco_check_shapes(const int64_t* const* shapes, char* message) {
  for (int i = 0; i < plan->num_inputs; ++i)
    if (!shapes || (!shapes[i] && plan->inputs[i].ndim))
      return gtco_fail(message, GTCO_ERROR_ARGUMENT, "gtco_set_shapes: the shape of input %d ('%s') is NULL", i,
                       plan->inputs[i].name);
  return GTCO_OK;
}

gtco_status gtco_find_variant(const int64_t* const* shapes, const gtco_variant** found, char* message) {
  const gtco_status status = gtco_check_shapes(shapes, message);
  if (status != GTCO_OK) return status;
  for (int v = 0; v < plan->num_variants; ++v) {
    *found = &plan->variants[v];
    if (has_shapes(*found, shapes)) return GTCO_OK;
  }
  return gtco_refuse_shapes(shapes, message);
}

/* ---- describing ---- */

EXPORT int gtco_num_steps(const gtco_model* model) {
  const gtco_variant* variant = model ? gtco_variant_of(model) : NULL;
  return variant ? variant->num_steps : 0;
}

EXPORT const gtco_tensor_info* gtco_sized_input(const gtco_model* model, int index) {
  const gtco_variant* variant = model ? gtco_variant_of(model) : NULL;
  return variant && index >= 0 && index < plan->num_inputs ? &variant->inputs[index] : NULL;
}

EXPORT const gtco_tensor_info* gtco_sized_output(const gtco_model* model, int index) {
  const gtco_variant* variant = model ? gtco_variant_of(model) : NULL;
  return variant && index >= 0 && index < plan->num_outputs ? &variant->outputs[index] : NULL;
}
