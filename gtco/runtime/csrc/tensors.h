/* The model's inputs and outputs as one list, inputs first, and the check of a run's pointers. */
#ifndef GTCO_TENSORS_H
#define GTCO_TENSORS_H

#include "plan.h"

int gtco_num_tensors(void);
const gtco_tensor_info* gtco_tensor(const gtco_variant* variant, int tensor);
int gtco_is_output(int tensor);

/* Bytes of a tensor in the variant where it is largest. */
size_t gtco_most_bytes(int tensor);

const void* gtco_pointer(const void* const* inputs, void* const* outputs, int tensor);

/* GTCO_ERROR_ARGUMENT if a pointer is NULL although its tensor has bytes, or if an output overlaps another tensor. */
gtco_status gtco_check_pointers(const gtco_variant* variant, const void* const* inputs, void* const* outputs,
                                char* message);

size_t gtco_round_up(size_t value, size_t unit);

#endif /* GTCO_TENSORS_H */
