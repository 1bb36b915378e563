#include "cover.h"

#include <stdlib.h>
#include <string.h>

#include "error.h"
#include "tensors.h"

static const gtco_plan* const plan = &gtco_the_plan;

static const gtco_tensor_info* described(int tensor) {
  return gtco_is_output(tensor) ? &plan->outputs[tensor - plan->num_inputs] : &plan->inputs[tensor];
}

static int64_t* all_dims(int* total) {
  *total = 0;
  for (int t = 0; t < gtco_num_tensors(); ++t) *total += described(t)->ndim;
  return calloc((size_t)*total + 1, sizeof(int64_t));
}

/* Where the samples of each tensor are, and room for the tensors at any number of samples. */
static int describe(gtco_parts* parts) {
  const int tensors = gtco_num_tensors();
  const size_t count = (size_t)tensors + 1;
  int total;
  parts->counts = calloc((size_t)plan->num_variants, sizeof *parts->counts);
  parts->sample_bytes = calloc(count, sizeof *parts->sample_bytes);
  parts->axes = calloc(count, sizeof *parts->axes);
  parts->tensors = calloc(count, sizeof *parts->tensors);
  parts->dims = all_dims(&total);
  if (!parts->counts || !parts->sample_bytes || !parts->axes || !parts->tensors || !parts->dims) return 0;
  int64_t* dims = parts->dims;
  for (int t = 0; t < tensors; ++t) {
    const gtco_tensor_info* one = gtco_tensor(plan->variants, t);
    parts->axes[t] = -1;
    for (int axis = 0; axis < one->ndim; ++axis)
      if (described(t)->symbols[axis]) parts->axes[t] = axis;
    parts->sample_bytes[t] = parts->axes[t] < 0 ? 0 : one->nbytes / plan->cover->sizes[0];
    parts->tensors[t] = *one;
    parts->tensors[t].dims = dims;
    for (int axis = 0; axis < one->ndim; ++axis) *dims++ = one->dims[axis];
  }
  parts->sized.inputs = parts->tensors;
  parts->sized.outputs = parts->tensors + plan->num_inputs;
  return 1;
}

gtco_status gtco_parts_open(gtco_parts* parts, char* message) {
  const gtco_cover* cover = plan->cover;
  const int last = plan->num_variants - 1;
  parts->best = 0;
  for (int v = 1; v <= last; ++v)
    if ((double)cover->prices[v] / (double)cover->sizes[v] <=
        (double)cover->prices[parts->best] / (double)cover->sizes[parts->best])
      parts->best = v;
  /* Of `best` others, some add up to a multiple of its size, and it does these at no higher price. So a cheapest sequence
   * has fewer others, and a number beyond this bound has a part of `best`. */
  parts->entries = (cover->sizes[parts->best] + 1) * cover->sizes[last] + 1;
  if (parts->entries > cover->high + 1) parts->entries = cover->high + 1;
  parts->price = calloc((size_t)parts->entries, sizeof *parts->price);
  parts->part = calloc((size_t)parts->entries, sizeof *parts->part);
  if (!describe(parts) || !parts->price || !parts->part)
    return gtco_fail(message, GTCO_ERROR_MEMORY, "out of memory for the sizes of '%s'", cover->symbol);
  for (int64_t n = 1; n < parts->entries; ++n) {
    parts->part[n] = -1;
    for (int v = 0; v <= last && cover->sizes[v] <= n; ++v) {
      const int64_t rest = n - cover->sizes[v];
      if (rest && parts->part[rest] < 0) continue;
      const int64_t price = parts->price[rest] + cover->prices[v];
      if (parts->part[n] >= 0 && price > parts->price[n]) continue;
      parts->price[n] = price;
      parts->part[n] = v; /* of equal prices the larger part, which comes later */
    }
  }
  return GTCO_OK;
}

void gtco_parts_close(gtco_parts* parts) {
  free(parts->counts);
  free(parts->sample_bytes);
  free(parts->axes);
  free(parts->price);
  free(parts->part);
  free(parts->tensors);
  free(parts->dims);
}

/* Whether so many samples can be run: those of the range, and those of a part. */
static int is_size(int64_t size) {
  const gtco_cover* cover = plan->cover;
  for (int v = 0; v < plan->num_variants; ++v)
    if (cover->sizes[v] == size) return 1;
  return size >= cover->low && size <= cover->high && (size - cover->low) % cover->step == 0;
}

/* The number of samples in these shapes. */
static gtco_status samples_of(const gtco_parts* parts, const int64_t* const* shapes, int64_t* samples, char* message) {
  const gtco_cover* cover = plan->cover;
  int first = -1;
  for (int i = 0; i < plan->num_inputs; ++i) {
    const gtco_tensor_info* info = &plan->inputs[i];
    if (!shapes || (!shapes[i] && info->ndim))
      return gtco_fail(message, GTCO_ERROR_ARGUMENT, "gtco_set_shapes: the shape of input %d ('%s') is NULL", i, info->name);
    for (int axis = 0; axis < info->ndim; ++axis) {
      const int64_t size = shapes[i][axis];
      if (axis != parts->axes[i] && size != info->dims[axis])
        return gtco_fail(message, GTCO_ERROR_ARGUMENT,
                         "gtco_set_shapes: axis %d of input '%s' has size %lld, and this model was compiled for %lld alone",
                         axis, info->name, (long long)size, (long long)info->dims[axis]);
      if (axis != parts->axes[i]) continue;
      if (!is_size(size))
        return gtco_fail(message, GTCO_ERROR_ARGUMENT,
                         "gtco_set_shapes: '%s' (axis %d of input '%s') is %lld, and this model was compiled for %lld to "
                         "%lld in steps of %lld; gtco compile --dim '%s=LOW..HIGH:STEP' gives another range",
                         cover->symbol, axis, info->name, (long long)size, (long long)cover->low, (long long)cover->high,
                         (long long)cover->step, cover->symbol);
      if (first >= 0 && size != *samples)
        return gtco_fail(message, GTCO_ERROR_ARGUMENT,
                         "gtco_set_shapes: '%s' is %lld in input '%s' and %lld in input '%s'; sizes of one name are equal "
                         "in all inputs",
                         cover->symbol, (long long)*samples, plan->inputs[first].name, (long long)size, info->name);
      *samples = size;
      first = i;
    }
  }
  return GTCO_OK;
}

gtco_status gtco_parts_of(gtco_parts* parts, const int64_t* const* shapes, const gtco_variant** found, char* message) {
  const gtco_cover* cover = plan->cover;
  int64_t samples = 0, left;
  const gtco_status status = samples_of(parts, shapes, &samples, message);
  if (status != GTCO_OK) return status;
  memset(parts->counts, 0, (size_t)plan->num_variants * sizeof *parts->counts);
  left = samples;
  if (left >= parts->entries) {
    const int64_t best = cover->sizes[parts->best];
    parts->counts[parts->best] = (left - parts->entries + best) / best;
    left -= parts->counts[parts->best] * best;
  }
  for (; left > 0; left -= cover->sizes[parts->part[left]]) ++parts->counts[parts->part[left]];
  for (int t = 0; t < gtco_num_tensors(); ++t) {
    if (parts->axes[t] < 0) continue;
    const int64_t one = gtco_tensor(plan->variants, t)->dims[parts->axes[t]] / cover->sizes[0];
    ((int64_t*)parts->tensors[t].dims)[parts->axes[t]] = one * samples;
    parts->tensors[t].nbytes = parts->sample_bytes[t] * samples;
  }
  parts->sized.num_steps = 0;
  for (int v = 0; v < plan->num_variants; ++v)
    parts->sized.num_steps += (int32_t)(parts->counts[v] * plan->variants[v].num_steps);
  *found = &parts->sized;
  return GTCO_OK;
}
