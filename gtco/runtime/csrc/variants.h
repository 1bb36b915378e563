/* The sizes that the model was compiled for: which variant has given shapes. */
#ifndef GTCO_VARIANTS_H
#define GTCO_VARIANTS_H

#include "plan.h"

/* The variant that the next run takes; NULL if gtco_set_shapes has to choose one first. Each kind of model defines it. */
const gtco_variant* gtco_variant_of(const gtco_model* model);

/* GTCO_ERROR_ARGUMENT if a shape is missing. */
gtco_status gtco_check_shapes(const int64_t* const* shapes, char* message);

/* GTCO_ERROR_ARGUMENT for input shapes that no variant has, and a message that lists the sizes of the variants. The axes
 * where a range has its samples are passed over. */
gtco_status gtco_refuse_shapes(const int64_t* const* shapes, char* message);

/* GTCO_ERROR_ARGUMENT, and a message: `size` is outside of the range of `symbol`, or off its step. */
gtco_status gtco_out_of_range(char* message, const char* input, int axis, const char* symbol, int64_t size, int64_t low,
                              int64_t high, int64_t step);

/* Finds the variant of these input shapes. If no variant has them, it returns GTCO_ERROR_ARGUMENT, and the message lists
 * the sizes of the variants. */
gtco_status gtco_find_variant(const int64_t* const* shapes, const gtco_variant** found, char* message);

#endif /* GTCO_VARIANTS_H */
