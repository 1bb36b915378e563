/* How many samples are run as parts, each of which is a variant (gtco_range in plan.h). Parts add up to the samples, or
 * the last one has more than are left: it computes samples of the parts before it again, or, in a run of fewer samples
 * than it has, some that nobody asked for. */
#ifndef GTCO_COVER_H
#define GTCO_COVER_H

#include "plan.h"

/* The parts at one choice of the model's other sizes. */
typedef struct {
  const gtco_cover* cover;
  int64_t samples;       /* of the shapes that are set */
  int64_t* counts;       /* parts of each variant that add up; the largest variant runs first */
  int last;              /* the variant, by its place in the cover, of a part that has more than are left; -1 for none */
  int64_t* sample_bytes; /* of each tensor, inputs first; 0 if it is the same for all samples */
  int64_t entries;       /* numbers of samples in the tables, from 0 */
  int64_t* price;        /* of each number: its least price */
  int32_t* part;         /* of each number: a part of its cheapest sequence; -1 where no parts add up to it */
  int best;              /* the variant of least price a sample */
  gtco_variant sized;    /* the tensors at the shapes that are set */
  gtco_tensor_info* tensors;
  int64_t* dims;
} gtco_parts;

/* Makes the tables, one gtco_parts for each of the range's covers. Also after an error they are closed. */
gtco_status gtco_parts_open(gtco_parts** every, char* message);
void gtco_parts_close(gtco_parts* every);

/* The parts for inputs of these shapes, whose `sized` is then the model at these shapes. Returns GTCO_ERROR_ARGUMENT, and
 * changes nothing, if the model was not compiled for the shapes. */
gtco_status gtco_parts_of(gtco_parts* every, const int64_t* const* shapes, gtco_parts** found, char* message);

#endif /* GTCO_COVER_H */
