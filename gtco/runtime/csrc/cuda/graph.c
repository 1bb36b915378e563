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

gtco_status gtco_launch_all(const gtco_launches* l, int variant, CUstream stream, CUevent* events, char* message) {
  const int first = plan->variants[variant].first_step, count = plan->variants[variant].num_steps;
  if (events)
    GTCO_CUDA_TRY(message, cuLaunchHostFunc, (stream, hold, (void*)((uintptr_t)ENQUEUE_NS * (uintptr_t)count)),
                  "holding the stream until %d steps are enqueued", count);
  for (int s = 0; s < count; ++s) {
    const gtco_launch* step = &cuda_plan->launches[first + s];
    if (events) GTCO_CUDA_TRY(message, cuEventRecord, (events[s], stream), "timing step %d", s);
    GTCO_CUDA_TRY(message, cuLaunchKernel,
                  (l->kernels->functions[step->function], step->grid[0], step->grid[1], step->grid[2], step->threads, 1,
                   1, step->shared, stream, l->params + step->first_ref, NULL),
                  "launching step %d (%s)", s, kernel_name(first + s));
  }
  if (events) GTCO_CUDA_TRY(message, cuEventRecord, (events[count], stream), "timing step %d", count - 1);
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

static void remember(gtco_launches* l, const gtco_variant* variant) {
  const size_t bytes = (size_t)variant->num_refs * sizeof *l->built;
  memcpy(l->built + variant->first_ref, l->arguments + variant->first_ref, bytes);
}

static gtco_status build(gtco_launches* l, int number, char* message) {
  const gtco_variant* variant = &plan->variants[number];
  const gtco_edge to_next = edge(l);
  const int first = variant->first_step, count = variant->num_steps;
  gtco_graph* made = &l->graphs[number];
  GTCO_CUDA_TRY(message, cuGraphCreate, (&made->graph, 0), "making the model's graph");
  for (int s = first; s < first + count; ++s) {
    const gtco_node_params what = node_params(l, s);
    GTCO_CUDA_TRY(message, cuGraphAddKernelNode, (&l->nodes[s], made->graph, NULL, 0, &what),
                  "adding step %d (%s) to the model's graph", s - first, kernel_name(s));
    if (s > first)
      GTCO_CUDA_TRY(message, cuGraphAddDependencies, (made->graph, &l->nodes[s - 1], &l->nodes[s], &to_next, 1),
                    "putting step %d (%s) behind the one before", s - first, kernel_name(s));
  }
  GTCO_CUDA_TRY(message, cuGraphInstantiate, (&made->executable, made->graph, 0), "making the model's graph of %d steps",
                count);
  remember(l, variant);
  return GTCO_OK;
}

gtco_status gtco_graphs_build(gtco_launches* l, char* message) {
  gtco_status status = GTCO_OK;
  for (int v = 0; v < plan->num_variants && status == GTCO_OK; ++v) status = build(l, v, message);
  return status;
}

static int changed(const gtco_launches* l, int first_ref, int count) {
  return memcmp(l->built + first_ref, l->arguments + first_ref, (size_t)count * sizeof *l->built) != 0;
}

static gtco_status update(gtco_launches* l, int number, char* message) {
  const gtco_variant* variant = &plan->variants[number];
  if (!changed(l, variant->first_ref, variant->num_refs)) return GTCO_OK;
  for (int s = variant->first_step; s < variant->first_step + variant->num_steps; ++s) {
    const gtco_launch* step = &cuda_plan->launches[s];
    if (!changed(l, step->first_ref, step->num_refs)) continue;
    const gtco_node_params what = node_params(l, s);
    GTCO_CUDA_TRY(message, cuGraphExecKernelNodeSetParams, (l->graphs[number].executable, l->nodes[s], &what),
                  "giving step %d (%s) the pointers of this run", s - variant->first_step, kernel_name(s));
  }
  remember(l, variant);
  return GTCO_OK;
}

gtco_status gtco_graph_launch(gtco_launches* l, int variant, CUstream stream, char* message) {
  const gtco_status status = update(l, variant, message);
  if (status != GTCO_OK) {
    /* Some nodes have the new pointers and some the old ones; the next run sets all of them. */
    const gtco_variant* own = &plan->variants[variant];
    memset(l->built + own->first_ref, 0xff, (size_t)own->num_refs * sizeof *l->built);
    return status;
  }
  GTCO_CUDA_TRY(message, cuGraphLaunch, (l->graphs[variant].executable, stream), "launching the model's graph");
  return GTCO_OK;
}

void gtco_graphs_destroy(gtco_launches* l) {
  for (int v = 0; l->graphs && v < plan->num_variants; ++v) {
    if (l->graphs[v].executable) gtco_cuda()->cuGraphExecDestroy(l->graphs[v].executable);
    if (l->graphs[v].graph) gtco_cuda()->cuGraphDestroy(l->graphs[v].graph);
  }
}
