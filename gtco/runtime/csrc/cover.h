/* How many samples are run as parts, each of which is a variant (gtco_cover in plan.h). */
#ifndef GTCO_COVER_H
#define GTCO_COVER_H

#include "plan.h"

typedef struct {
  int64_t* counts;       /* parts of each variant, for the shapes that are set; the largest variant runs first */
  int64_t* sample_bytes; /* of each tensor, inputs first; 0 if it is the same for all samples */
  int* axes;             /* of each tensor: where its samples are; -1 if it is the same for all samples */
  int64_t entries;       /* numbers of samples in the tables, from 0 */
  int64_t* price;        /* of each number: its least price */
  int32_t* part;         /* of each number: a part of its cheapest sequence; -1 where no parts add up to it */
  int best;              /* the variant of least price a sample */
  gtco_variant sized;    /* the tensors at the shapes that are set */
  gtco_tensor_info* tensors;
  int64_t* dims;
} gtco_parts;

/* Makes the tables. */
gtco_status gtco_parts_open(gtco_parts* parts, char* message);
void gtco_parts_close(gtco_parts* parts);

/* The parts for inputs of these shapes, and in *found the model at these shapes. Returns GTCO_ERROR_ARGUMENT, and changes
 * nothing, if the shapes are not in the range. */
gtco_status gtco_parts_of(gtco_parts* parts, const int64_t* const* shapes, const gtco_variant** found, char* message);

#endif /* GTCO_COVER_H */
