#include "sizes.h"

#include "error.h"
#include "tensors.h"
#include "variants.h"

static const gtco_plan* const plan = &gtco_the_plan;

gtco_status gtco_sizes_open(gtco_sizes* sizes, char* message) {
  if (plan->range) return gtco_parts_open(&sizes->parts, message);
  if (plan->num_variants == 1) sizes->variant = plan->variants;
  return GTCO_OK;
}

void gtco_sizes_close(gtco_sizes* sizes) { gtco_parts_close(sizes->parts); }

gtco_status gtco_sizes_set(gtco_sizes* sizes, const int64_t* const* shapes, char* message) {
  const gtco_variant* found = NULL;
  gtco_status status;
  if (plan->range) {
    status = gtco_parts_of(sizes->parts, shapes, &sizes->chosen, message);
    if (status == GTCO_OK) found = &sizes->chosen->sized;
  } else {
    status = gtco_find_variant(shapes, &found, message);
  }
  if (status == GTCO_OK) sizes->variant = found;
  return status;
}

gtco_status gtco_sizes_ready(const gtco_sizes* sizes, char* message) {
  if (sizes->variant) return GTCO_OK;
  if (plan->range)
    return gtco_fail(message, GTCO_ERROR_ARGUMENT,
                     "gtco_run: model '%s' was compiled for %s of %lld to %lld; gtco_set_shapes says which one the run has",
                     plan->name, plan->range->symbol, (long long)plan->range->low, (long long)plan->range->high);
  return gtco_fail(message, GTCO_ERROR_ARGUMENT,
                   "gtco_run: model '%s' was compiled for %d shapes; gtco_set_shapes says which one the run has",
                   plan->name, plan->num_variants);
}

int gtco_next_part(const gtco_sizes* sizes, gtco_part* part) {
  if (!plan->range) {
    part->variant = (int)(sizes->variant - plan->variants);
    return !part->begun++;
  }
  const gtco_cover* cover = sizes->chosen->cover;
  const int64_t* counts = sizes->chosen->counts; /* by the variant's place in the cover; the largest runs first */
  if (part->is_last) return 0;
  int place = part->begun ? part->variant - cover->first_variant : cover->num_variants - 1;
  if (part->begun) part->first += cover->sizes[place];
  part->begun = 1;
  while (place >= 0 && part->done == counts[place]) {
    --place;
    part->done = 0;
  }
  ++part->done;
  if (place < 0) {
    if (sizes->chosen->last < 0) return 0;
    place = sizes->chosen->last;
    part->is_last = 1;
    part->first = sizes->chosen->samples - cover->sizes[place];
    if (part->first < 0) part->first = 0;
  }
  part->variant = cover->first_variant + place;
  return 1;
}

int64_t gtco_count_parts(const gtco_sizes* sizes) {
  if (!plan->range) return 1;
  int64_t number = sizes->chosen->last >= 0;
  for (int v = 0; v < sizes->chosen->cover->num_variants; ++v) number += sizes->chosen->counts[v];
  return number;
}

const void* gtco_part_pointer(const gtco_sizes* sizes, const gtco_part* part, const void* pointer, int tensor) {
  return part->first ? (const char*)pointer + part->first * sizes->chosen->sample_bytes[tensor] : pointer;
}

int64_t gtco_part_bytes(const gtco_sizes* sizes, const gtco_part* part, int tensor) {
  const int64_t bytes = gtco_tensor(&plan->variants[part->variant], tensor)->nbytes;
  if (!part->is_last) return bytes;
  const int64_t whole = gtco_tensor(sizes->variant, tensor)->nbytes;
  return whole < bytes ? whole : bytes;
}
