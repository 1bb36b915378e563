/* The graph is built node by node, not captured from a stream. So every node can be updated when its pointers change,
 * and no other thread's work can disturb a capture or be disturbed by one. */
#define _GNU_SOURCE
#include "cuda/graph.h"

#include <string.h>
#include <time.h>

#define ENQUEUE_NS 10000 /* the host's time for a launch with its event, with a margin */

static const gtco_plan* const plan = &gtco_the_plan;
static const gtco_cuda_plan* const cuda_plan = &gtco_the_cuda_plan;

static const char* kernel_name(int step) { return cuda_plan->functions[cuda_plan->launches[step].function].name; }

/* Keeps a stream waiting while the host fills it. Without this, steps that are shorter than their launch would wait for
 * the host. The waiting always ends, because a driver whose queue is full waits for the stream. */
static void hold(void* nanoseconds) {
  const uintptr_t all = (uintptr_t)nanoseconds;
  const struct timespec pause = {.tv_sec = (time_t)(all / 1000000000), .tv_nsec = (long)(all % 1000000000)};
  nanosleep(&pause, NULL);
}

gtco_status gtco_launch_all(const gtco_launches* l, CUstream stream, CUevent* events, char* message) {
  if (events)
    GTCO_CUDA_TRY(message, cuLaunchHostFunc, (stream, hold, (void*)((uintptr_t)ENQUEUE_NS * (uintptr_t)plan->num_steps)),
                  "holding the stream until %d steps are enqueued", plan->num_steps);
  for (int s = 0; s < plan->num_steps; ++s) {
    const gtco_launch* step = &cuda_plan->launches[s];
    if (events) GTCO_CUDA_TRY(message, cuEventRecord, (events[s], stream), "timing step %d", s);
    GTCO_CUDA_TRY(message, cuLaunchKernel,
                  (l->kernels->functions[step->function], step->grid[0], step->grid[1], step->grid[2], step->threads, 1,
                   1, step->shared, stream, l->params + step->first_ref, NULL),
                  "launching step %d (%s)", s, kernel_name(s));
  }
  if (events)
    GTCO_CUDA_TRY(message, cuEventRecord, (events[plan->num_steps], stream), "timing step %d", plan->num_steps - 1);
  return GTCO_OK;
}

static gtco_node_params node_params(const gtco_launches* l, int s) {
  const gtco_launch* step = &cuda_plan->launches[s];
  return (gtco_node_params){
      .function = l->kernels->functions[step->function],
      .grid = {step->grid[0], step->grid[1], step->grid[2]},
      .block = {step->threads, 1, 1},
      .shared = step->shared,
      .params = l->params + step->first_ref,
  };
}

static void remember(gtco_launches* l) {
  memcpy(l->built, l->arguments, (size_t)plan->num_refs * sizeof *l->built);
}

/* The edge from one step to the next. From sm_90 on, kernels call after_previous() of device.cuh, and so may begin before
 * the one ahead of them has ended (programmatic dependent launch). A step ends after all before it: it waits for the one
 * ahead, which waited itself. */
static gtco_edge edge(const gtco_launches* l) {
  if (l->kernels->image->major < 9) return (gtco_edge){0};
  return (gtco_edge){
      .from_port = GTCO_PORT_PROGRAMMATIC,
      .type = CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC,
  };
}

static gtco_status build(gtco_launches* l, char* message) {
  const gtco_edge to_next = edge(l);
  GTCO_CUDA_TRY(message, cuGraphCreate, (&l->graph, 0), "making the model's graph");
  for (int s = 0; s < plan->num_steps; ++s) {
    const gtco_node_params what = node_params(l, s);
    GTCO_CUDA_TRY(message, cuGraphAddKernelNode, (&l->nodes[s], l->graph, NULL, 0, &what),
                  "adding step %d (%s) to the model's graph", s, kernel_name(s));
    if (s)
      GTCO_CUDA_TRY(message, cuGraphAddDependencies, (l->graph, &l->nodes[s - 1], &l->nodes[s], &to_next, 1),
                    "putting step %d (%s) behind the one before", s, kernel_name(s));
  }
  GTCO_CUDA_TRY(message, cuGraphInstantiate, (&l->executable, l->graph, 0), "making the model's graph of %d steps",
                plan->num_steps);
  remember(l);
  return GTCO_OK;
}

gtco_status gtco_graph_build(gtco_launches* l, char* message) {
  gtco_status status = build(l, message);
  if (status != GTCO_OK) gtco_graph_destroy(l);
  return status;
}

static gtco_status update(gtco_launches* l, char* message) {
  if (memcmp(l->built, l->arguments, (size_t)plan->num_refs * sizeof *l->built) == 0) return GTCO_OK;
  for (int s = 0; s < plan->num_steps; ++s) {
    const gtco_launch* step = &cuda_plan->launches[s];
    const size_t bytes = (size_t)step->num_refs * sizeof *l->built;
    if (memcmp(l->built + step->first_ref, l->arguments + step->first_ref, bytes) == 0) continue;
    const gtco_node_params what = node_params(l, s);
    GTCO_CUDA_TRY(message, cuGraphExecKernelNodeSetParams, (l->executable, l->nodes[s], &what),
                  "giving step %d (%s) the pointers of this run", s, kernel_name(s));
  }
  remember(l);
  return GTCO_OK;
}

gtco_status gtco_graph_launch(gtco_launches* l, CUstream stream, char* message) {
  gtco_status status = GTCO_OK;
  if (!l->executable) {
    status = gtco_graph_build(l, message);
  } else {
    status = update(l, message);
    /* Some nodes have the new pointers and some the old ones; the next run sets all of them. */
    if (status != GTCO_OK) memset(l->built, 0xff, (size_t)plan->num_refs * sizeof *l->built);
  }
  if (status != GTCO_OK) return status;
  GTCO_CUDA_TRY(message, cuGraphLaunch, (l->executable, stream), "launching the model's graph");
  return GTCO_OK;
}

void gtco_graph_destroy(gtco_launches* l) {
  if (l->executable) gtco_cuda()->cuGraphExecDestroy(l->executable);
  if (l->graph) gtco_cuda()->cuGraphDestroy(l->graph);
  l->executable = NULL;
  l->graph = NULL;
}
