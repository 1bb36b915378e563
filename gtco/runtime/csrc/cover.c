#include "cover.h"

#include <stdlib.h>
#include <string.h>

#include "error.h"
#include "tensors.h"
#include "variants.h"

static const gtco_plan* const plan = &gtco_the_plan;

static const gtco_variant* first_part(const gtco_parts* parts) { return &plan->variants[parts->cover->first_variant]; }

static int64_t* all_dims(const gtco_variant* variant) {
  size_t total = 0;
  for (int t = 0; t < gtco_num_tensors(); ++t) total += (size_t)gtco_tensor(variant, t)->ndim;
  return calloc(total + 1, sizeof(int64_t));
}

/* Room for the tensors at any number of samples. */
static int describe(gtco_parts* parts) {
  const int tensors = gtco_num_tensors();
  const size_t count = (size_t)tensors + 1;
  parts->counts = calloc((size_t)parts->cover->num_variants, sizeof *parts->counts);
  parts->sample_bytes = calloc(count, sizeof *parts->sample_bytes);
  parts->tensors = calloc(count, sizeof *parts->tensors);
  parts->dims = all_dims(first_part(parts));
  if (!parts->counts || !parts->sample_bytes || !parts->tensors || !parts->dims) return 0;
  int64_t* dims = parts->dims;
  for (int t = 0; t < tensors; ++t) {
    const gtco_tensor_info* one = gtco_tensor(first_part(parts), t);
    parts->sample_bytes[t] = plan->range->axes[t] < 0 ? 0 : one->nbytes / parts->cover->sizes[0];
    parts->tensors[t] = *one;
    parts->tensors[t].dims = dims;
    for (int axis = 0; axis < one->ndim; ++axis) *dims++ = one->dims[axis];
  }
  parts->sized.inputs = parts->tensors;
  parts->sized.outputs = parts->tensors + plan->num_inputs;
  return 1;
}

static gtco_status open_one(gtco_parts* parts, const gtco_cover* cover, char* message) {
  const int last = cover->num_variants - 1;
  parts->cover = cover;
  parts->best = 0;
  for (int v = 1; v <= last; ++v)
    if ((double)cover->prices[v] / (double)cover->sizes[v] <=
        (double)cover->prices[parts->best] / (double)cover->sizes[parts->best])
      parts->best = v;
  /* Of `best` others, some add up to a multiple of its size, and it does these at no higher price. So a cheapest sequence
   * has fewer others, and a number beyond this bound has a part of `best`. */
  parts->entries = (cover->sizes[parts->best] + 1) * cover->sizes[last] + 1;
  if (parts->entries > plan->range->high + 1) parts->entries = plan->range->high + 1;
  parts->price = calloc((size_t)parts->entries, sizeof *parts->price);
  parts->part = calloc((size_t)parts->entries, sizeof *parts->part);
  if (!describe(parts) || !parts->price || !parts->part)
    return gtco_fail(message, GTCO_ERROR_MEMORY, "out of memory for the sizes of '%s'", plan->range->symbol);
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

gtco_status gtco_parts_open(gtco_parts** every, char* message) {
  const gtco_range* range = plan->range;
  *every = calloc((size_t)range->num_covers, sizeof **every);
  if (!*every) return gtco_fail(message, GTCO_ERROR_MEMORY, "out of memory for the sizes of '%s'", range->symbol);
  for (int c = 0; c < range->num_covers; ++c) {
    const gtco_status status = open_one(&(*every)[c], &range->covers[c], message);
    if (status != GTCO_OK) return status;
  }
  return GTCO_OK;
}

void gtco_parts_close(gtco_parts* every) {
  for (int c = 0; every && c < plan->range->num_covers; ++c) {
    free(every[c].counts);
    free(every[c].sample_bytes);
    free(every[c].price);
    free(every[c].part);
    free(every[c].tensors);
    free(every[c].dims);
  }
  free(every);
}

/* Whether these shapes have the other sizes of these parts, whatever their number of samples. */
static int has_other_sizes(const gtco_parts* parts, const int64_t* const* shapes) {
  for (int i = 0; i < plan->num_inputs; ++i)
    for (int axis = 0; axis < plan->inputs[i].ndim; ++axis)
      if (axis != plan->range->axes[i] && shapes[i][axis] != first_part(parts)->inputs[i].dims[axis]) return 0;
  return 1;
}

/* Whether so many samples can be run: those of the range, and those of a part. */
static int is_size(const gtco_parts* parts, int64_t size) {
  const gtco_range* range = plan->range;
  for (int v = 0; v < parts->cover->num_variants; ++v)
    if (parts->cover->sizes[v] == size) return 1;
  return size >= range->low && size <= range->high && (size - range->low) % range->step == 0;
}

/* The number of samples in these shapes. */
static gtco_status samples_of(const gtco_parts* parts, const int64_t* const* shapes, int64_t* samples, char* message) {
  const gtco_range* range = plan->range;
  int first = -1;
  for (int i = 0; i < plan->num_inputs; ++i) {
    const int axis = range->axes[i];
    if (axis < 0) continue;
    const int64_t size = shapes[i][axis];
    if (!is_size(parts, size))
      return gtco_out_of_range(message, plan->inputs[i].name, axis, range->symbol, size, range->low, range->high,
                               range->step);
    if (first >= 0 && size != *samples)
      return gtco_fail(message, GTCO_ERROR_ARGUMENT,
                       "gtco_set_shapes: '%s' is %lld in input '%s' and %lld in input '%s'; sizes of one name are equal "
                       "in all inputs",
                       range->symbol, (long long)*samples, plan->inputs[first].name, (long long)size,
                       plan->inputs[i].name);
    *samples = size;
    first = i;
  }
  return GTCO_OK;
}

/* Of so many samples, how many are run in parts that add up: all of them, or less if a last part that has more than are
 * left is cheaper. */
static int64_t find_last(gtco_parts* parts, int64_t left) {
  const gtco_cover* cover = parts->cover;
  int64_t least = parts->price[left], rest = left;
  parts->last = -1;
  for (int v = 0; v < cover->num_variants; ++v) {
    const int64_t first = left - cover->sizes[v] + 1;
    for (int64_t n = first > 0 ? first : 0; n < left; ++n) {
      if (n && parts->part[n] < 0) continue;
      const int64_t price = parts->price[n] + cover->prices[v];
      if (price < least) {
        least = price;
        rest = n;
        parts->last = v;
      }
      if (!n) break; /* with others before it, it costs more */
    }
  }
  return rest;
}

/* Notes the parts of so many samples, and the tensors at that number. */
static void use_samples(gtco_parts* parts, int64_t samples) {
  const gtco_cover* cover = parts->cover;
  int64_t left = samples;
  parts->samples = samples;
  memset(parts->counts, 0, (size_t)cover->num_variants * sizeof *parts->counts);
  if (left >= parts->entries) {
    const int64_t best = cover->sizes[parts->best];
    parts->counts[parts->best] = (left - parts->entries + best) / best;
    left -= parts->counts[parts->best] * best;
  }
  left = find_last(parts, left);
  for (; left > 0; left -= cover->sizes[parts->part[left]]) ++parts->counts[parts->part[left]];
  for (int t = 0; t < gtco_num_tensors(); ++t) {
    const int axis = plan->range->axes[t];
    if (axis < 0) continue;
    const int64_t one = gtco_tensor(first_part(parts), t)->dims[axis] / cover->sizes[0];
    ((int64_t*)parts->tensors[t].dims)[axis] = one * samples;
    parts->tensors[t].nbytes = parts->sample_bytes[t] * samples;
  }
  parts->sized.num_steps = 0;
  for (int v = 0; v < cover->num_variants; ++v)
    parts->sized.num_steps += (int32_t)((parts->counts[v] + (v == parts->last)) * first_part(parts)[v].num_steps);
}

gtco_status gtco_parts_of(gtco_parts* every, const int64_t* const* shapes, gtco_parts** found, char* message) {
  gtco_status status = gtco_check_shapes(shapes, message);
  if (status != GTCO_OK) return status;
  for (int c = 0; c < plan->range->num_covers; ++c) {
    if (!has_other_sizes(&every[c], shapes)) continue;
    int64_t samples = 0;
    status = samples_of(&every[c], shapes, &samples, message);
    if (status != GTCO_OK) return status;
    use_samples(&every[c], samples);
    *found = &every[c];
    return GTCO_OK;
  }
  return gtco_refuse_shapes(shapes, message);
}
