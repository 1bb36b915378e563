/* The shapes of a handle's next run, and the variants that the run goes through: one, or with a range several (cover.h). */
#ifndef GTCO_SIZES_H
#define GTCO_SIZES_H

#include "cover.h"
#include "plan.h"

/* Of one handle. */
typedef struct {
  const gtco_variant* variant; /* the tensors of the next run; NULL until gtco_set_shapes chooses it */
  gtco_parts* parts;           /* of a model with a range: how its samples are run, at each choice of its other sizes */
  gtco_parts* chosen;          /* of these, for the next run */
} gtco_sizes;

/* Makes everything that is needed to choose shapes later. Also after an error the sizes are closed. */
gtco_status gtco_sizes_open(gtco_sizes* sizes, char* message);
void gtco_sizes_close(gtco_sizes* sizes);

/* Chooses the shapes. Returns GTCO_ERROR_ARGUMENT, and changes nothing, if the model was not compiled for them. */
gtco_status gtco_sizes_set(gtco_sizes* sizes, const int64_t* const* shapes, char* message);

/* GTCO_ERROR_ARGUMENT if no shapes were chosen, and a run needs them. */
gtco_status gtco_sizes_ready(const gtco_sizes* sizes, char* message);

/* A part of a run: a variant on some of the samples. */
typedef struct {
  int begun;     /* zeroed before the first part */
  int variant;   /* its number */
  int64_t first; /* the sample that it begins at; 0 for a model without a range */
  int64_t done;  /* parts of this variant up to this one */
  int is_last;   /* 1 for the part that has more samples than are left */
} gtco_part;

/* Makes `part` the part of the run that comes after it, or the first part if `part` is all zero. Returns 0 after the last
 * part. */
int gtco_next_part(const gtco_sizes* sizes, gtco_part* part);

/* How many parts the run has. */
int64_t gtco_count_parts(const gtco_sizes* sizes);

/* Where this part's samples of a tensor begin, from where the whole tensor does. */
const void* gtco_part_pointer(const gtco_sizes* sizes, const gtco_part* part, const void* pointer, int tensor);

/* How many bytes the caller's tensor has there for this part. They are fewer than the variant's tensor has if the run has
 * fewer samples than the variant. Then the tensor cannot be used in place, and nobody reads the rest of the outputs. */
int64_t gtco_part_bytes(const gtco_sizes* sizes, const gtco_part* part, int tensor);

#endif /* GTCO_SIZES_H */
