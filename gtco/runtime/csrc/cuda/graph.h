/* The model's launches: one by one, or as a CUDA graph that is launched as a whole. Each variant has a graph. */
#ifndef GTCO_CUDA_GRAPH_H
#define GTCO_CUDA_GRAPH_H

#include "cuda/device.h"

typedef struct {
  CUgraph graph;
  CUgraphExec executable;
} gtco_graph;

/* The launches of one handle. `arguments` has one pointer to device memory a ref of the plan; `params` points to each of
 * them, as the driver takes parameters. */
typedef struct {
  const gtco_kernels* kernels;
  CUdeviceptr* arguments;
  void** params;
  gtco_graph* graphs; /* one a variant */
  CUgraphNode* nodes; /* one a launch */
  CUdeviceptr* built; /* the arguments that the executables have */
} gtco_launches;

/* Launches every step of the variant on the stream, in order. If `events` is given (one more than steps), records one
 * before the first step and one after each. */
gtco_status gtco_launch_all(const gtco_launches* launches, int variant, CUstream stream, CUevent* events, char* message);

/* Builds the graphs of all variants without launching them. */
gtco_status gtco_graphs_build(gtco_launches* launches, char* message);
void gtco_graphs_destroy(gtco_launches* launches);

/* Launches the variant's graph on the stream with the current arguments. First it updates the nodes whose arguments have
 * changed since the last launch; launches that are in a stream already keep theirs. */
gtco_status gtco_graph_launch(gtco_launches* launches, int variant, CUstream stream, char* message);

#endif /* GTCO_CUDA_GRAPH_H */
