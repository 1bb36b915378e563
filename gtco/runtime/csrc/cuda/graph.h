/* The model's launches: one by one, or as a CUDA graph that is launched as a whole. */
#ifndef GTCO_CUDA_GRAPH_H
#define GTCO_CUDA_GRAPH_H

#include "cuda/device.h"

/* The launches of one handle. `arguments` has one pointer to device memory a ref of the plan; `params` points to each of
 * them, as the driver takes parameters. */
typedef struct {
  const gtco_kernels* kernels;
  CUdeviceptr* arguments;
  void** params;
  CUgraph graph;
  CUgraphExec executable; /* NULL until it is built */
  CUgraphNode* nodes;     /* one a launch */
  CUdeviceptr* built;     /* the arguments that the executable has */
} gtco_launches;

/* Launches every step on the stream, in order. If `events` is given (one more than steps), records one before the first
 * step and one after each. */
gtco_status gtco_launch_all(const gtco_launches* launches, CUstream stream, CUevent* events, char* message);

/* Launches the graph on the stream with the current arguments. Builds the graph if there is none, and first updates the
 * nodes whose arguments have changed since the last launch. */
gtco_status gtco_graph_launch(gtco_launches* launches, CUstream stream, char* message);

/* Builds it without launching. */
gtco_status gtco_graph_build(gtco_launches* launches, char* message);
void gtco_graph_destroy(gtco_launches* launches);

#endif /* GTCO_CUDA_GRAPH_H */
