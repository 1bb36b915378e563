/* gtco_open and gtco_close for a model that runs on a GPU: a handle's device memory, streams and graphs. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/model.h"
#include "tensors.h"

#define EXPORT __attribute__((visibility("default")))
#define SPACING 256 /* parts of a handle's memory begin at multiples of so many bytes */

static const gtco_plan* const plan = &gtco_the_plan;

static gtco_status allocate_lists(gtco_model* m, char* message) {
  const size_t tensors = (size_t)gtco_num_tensors() + 1, refs = (size_t)plan->num_refs + 1;
  gtco_launches* l = &m->launches;
  m->staging = calloc(tensors, sizeof *m->staging);
  m->places = calloc(tensors, sizeof *m->places);
  m->pointers = calloc(tensors, sizeof *m->pointers);
  m->in_place = calloc(tensors, sizeof *m->in_place);
  m->patches = calloc(refs, sizeof *m->patches);
  l->arguments = calloc(refs, sizeof *l->arguments);
  l->built = calloc(refs, sizeof *l->built);
  l->params = calloc(refs, sizeof *l->params);
  l->nodes = calloc((size_t)plan->num_steps + 1, sizeof *l->nodes);
  l->graphs = calloc((size_t)plan->num_variants, sizeof *l->graphs);
  if (m->staging && m->places && m->pointers && m->in_place && m->patches && l->arguments && l->built && l->params && l->nodes &&
      l->graphs)
    return GTCO_OK;
  return gtco_fail(message, GTCO_ERROR_MEMORY, "out of memory");
}

size_t gtco_counter_bytes(void) { return (size_t)gtco_the_cuda_plan.counter_bytes; }
CUdeviceptr gtco_counters(const gtco_model* m) {
  return m->memory + (CUdeviceptr)plan->arena_bytes - gtco_counter_bytes();
}

static gtco_status lay_out(gtco_model* m, char* message) {
  const size_t staging = gtco_round_up((size_t)plan->arena_bytes, SPACING);
  size_t total = staging;
  for (int t = 0; t < gtco_num_tensors(); ++t) {
    m->staging[t] = total; /* from the start of the memory, which is not known yet */
    total += gtco_round_up(gtco_most_bytes(t), SPACING);
  }
  const size_t tables = total;
  if (m->persistent.blocks) total += gtco_persistent_bytes();
  gtco_status status =
      gtco_device_allocate(m->device, total ? total : SPACING, "intermediate tensors", &m->memory, message);
  if (status == GTCO_OK && gtco_counter_bytes())
    status = gtco_device_upload(m->device, gtco_counters(m), NULL, gtco_counter_bytes(), "counters", message);
  /* A part of a range may compute samples that nobody asked for, from what is there. */
  if (status == GTCO_OK && plan->range && tables > staging)
    status = gtco_device_upload(m->device, m->memory + staging, NULL, tables - staging, "tensors", message);
  if (status != GTCO_OK) return status;
  for (int t = 0; t < gtco_num_tensors(); ++t) m->staging[t] += m->memory;
  for (int r = 0; r < plan->num_refs; ++r) {
    const gtco_ref* ref = &plan->refs[r];
    CUdeviceptr* argument = &m->launches.arguments[r];
    m->launches.params[r] = argument;
    m->patches[r] = -1;
    switch (ref->kind) {
      case GTCO_REF_ARENA: *argument = m->memory + (CUdeviceptr)ref->offset; break;
      case GTCO_REF_WEIGHT: *argument = m->device->weights + (CUdeviceptr)ref->offset; break;
      case GTCO_REF_INPUT: m->patches[r] = ref->tensor; break;
      case GTCO_REF_OUTPUT: m->patches[r] = plan->num_inputs + ref->tensor; break;
    }
    if (m->patches[r] >= 0) *argument = m->staging[m->patches[r]];
  }
  if (!m->persistent.blocks) return GTCO_OK;
  return gtco_persistent_upload(m->device, m->memory + tables, m->launches.arguments, m->patches, &m->persistent, message);
}

static void say_how(gtco_model* m) {
  const gtco_persistent_state* p = &m->persistent;
  if (p->blocks)
    snprintf(m->mode, sizeof m->mode, "persistent: %u blocks of %u threads", p->blocks,
             gtco_the_cuda_plan.persistent->threads);
  else if (plan->num_variants > 1)
    snprintf(m->mode, sizeof m->mode, "graph: %d kernels in %d graphs, one for each of the model's plans", plan->num_steps,
             plan->num_variants);
  else
    snprintf(m->mode, sizeof m->mode, "graph: %d kernels%s%s", plan->num_steps, *p->why ? "; " : "", p->why);
}

/* With the device's context current. */
static gtco_status set_up_on_device(gtco_model* m, int launches, char* message) {
  gtco_status status = gtco_persistent_choose(m->device, launches, &m->persistent, message);
  if (status == GTCO_OK) status = lay_out(m, message);
  if (status != GTCO_OK) return status;
  say_how(m);
  m->launches.kernels = &m->device->kernels;
  GTCO_CUDA_TRY(message, cuStreamCreate, (&m->stream, CU_STREAM_DEFAULT), "making a stream");
  GTCO_CUDA_TRY(message, cuEventCreate, (&m->finished, CU_EVENT_DISABLE_TIMING), "making an event");
  return m->persistent.blocks ? GTCO_OK : gtco_graphs_build(&m->launches, message);
}

static gtco_status set_up(const gtco_options* options, gtco_model* m, char* message) {
  gtco_status status = gtco_device_acquire(options ? options->device : 0, &m->device, message);
  if (status == GTCO_OK) status = allocate_lists(m, message);
  if (status == GTCO_OK) status = gtco_sizes_open(&m->sizes, message);
  CUcapture_mode before;
  if (status == GTCO_OK) status = gtco_device_enter(m->device, &before, message);
  if (status != GTCO_OK) return status;
  status = set_up_on_device(m, options ? options->launches : GTCO_LAUNCHES_AS_COMPILED, message);
  gtco_device_leave(before);
  return status;
}

/* In a forked child the driver's objects belong to the parent, so they are not released. */
static void release(gtco_model* m) {
  char ignored[GTCO_MESSAGE_BYTES];
  gtco_launches* l = &m->launches;
  if (m->device && !gtco_in_forked_child()) {
    CUcapture_mode before;
    if (gtco_device_enter(m->device, &before, ignored) == GTCO_OK) {
      if (m->under_way) gtco_cuda()->cuEventSynchronize(m->finished);
      gtco_graphs_destroy(l);
      if (m->finished) gtco_cuda()->cuEventDestroy(m->finished);
      if (m->stream) gtco_cuda()->cuStreamDestroy(m->stream);
      if (m->memory) gtco_cuda()->cuMemFree(m->memory);
      gtco_device_leave(before);
    }
    gtco_device_release(m->device);
  }
  free(m->staging);
  free(m->places);
  free(m->pointers);
  free(m->in_place);
  free(m->patches);
  free(l->arguments);
  free(l->built);
  free(l->params);
  free(l->nodes);
  free(l->graphs);
  gtco_sizes_close(&m->sizes);
  free(m);
}

EXPORT gtco_status gtco_open(const gtco_options* options, gtco_model** model) {
  char message[GTCO_MESSAGE_BYTES] = "";
  gtco_status status;
  gtco_model* m = NULL;
  if (!model) {
    status = gtco_fail(message, GTCO_ERROR_ARGUMENT, "gtco_open: the place for the handle is NULL");
  } else {
    *model = NULL;
    m = calloc(1, sizeof *m);
    status = m ? set_up(options, m, message) : gtco_fail(message, GTCO_ERROR_MEMORY, "out of memory");
  }
  gtco_set_thread_error(message);
  if (status != GTCO_OK) {
    if (m) release(m);
    return status;
  }
  *model = m;
  return GTCO_OK;
}

EXPORT void gtco_close(gtco_model* model) {
  if (model) release(model);
}
