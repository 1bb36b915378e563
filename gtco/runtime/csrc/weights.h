/* The weights that live in a file beside the library. */
#ifndef GTCO_WEIGHTS_H
#define GTCO_WEIGHTS_H

#include "plan.h"

#define HUGE_PAGE (2 << 20) /* bytes */

typedef struct {
  void* mapping; /* NULL if the weights are inside the library */
  size_t bytes;
  const unsigned char* data;
} gtco_weights;

/* Maps LIBRARY.weights, or points to the weights inside the library. Only a page of the header is read. */
gtco_status gtco_weights_open(const gtco_plan* plan, gtco_weights* weights, char* message);
void gtco_weights_close(gtco_weights* weights);

#endif /* GTCO_WEIGHTS_H */
