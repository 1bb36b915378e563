/* gtco_open, gtco_run and the rest of gtco_api.h for a model that runs on a GPU: a handle's device memory and stream,
 * and the passing of user pointers, of the host or the device, to the kernels. */
#define _GNU_SOURCE
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/device.h"
#include "cuda/graph.h"
#include "cuda/persistent.h"
#include "error.h"
#include "sizes.h"
#include "tensors.h"
#include "variants.h"

#define EXPORT __attribute__((visibility("default")))
#define SPACING 256 /* parts of a handle's memory begin at multiples of so many bytes */
#define MODE_BYTES (64 + GTCO_REASON_BYTES)

typedef enum { NOWHERE, ON_HOST, ON_DEVICE } place;

struct gtco_model {
  gtco_device* device;
  CUdeviceptr memory;   /* arena | staging of every input and output | tables of the persistent kernel */
  CUdeviceptr* staging; /* place of a tensor of the host, or of one that is not aligned, in a run; inputs first */
  place* places;        /* of this run's pointers, inputs first */
  const void** pointers; /* of this part of a run, inputs first: the caller's tensors, at the part's samples */
  int* patches;         /* a ref's tensor, -1 where its pointer is always the same */
  CUstream stream;      /* of gtco_run and gtco_profile */
  CUevent finished;     /* behind the last run */
  int under_way;        /* 1 if a run on a caller's stream may still be under way */
  int captured;         /* 1 if a run has become part of a caller's graph */
  gtco_sizes sizes;     /* of the next run */
  gtco_launches launches;
  gtco_persistent_state persistent;
  char mode[MODE_BYTES]; /* in words */
  _Atomic int busy;
  char error[GTCO_MESSAGE_BYTES];
};

static const gtco_plan* const plan = &gtco_the_plan;

/* ---- opening ---- */

static gtco_status allocate_lists(gtco_model* m, char* message) {
  const size_t tensors = (size_t)gtco_num_tensors() + 1, refs = (size_t)plan->num_refs + 1;
  gtco_launches* l = &m->launches;
  m->staging = calloc(tensors, sizeof *m->staging);
  m->places = calloc(tensors, sizeof *m->places);
  m->pointers = calloc(tensors, sizeof *m->pointers);
  m->patches = calloc(refs, sizeof *m->patches);
  l->arguments = calloc(refs, sizeof *l->arguments);
  l->built = calloc(refs, sizeof *l->built);
  l->params = calloc(refs, sizeof *l->params);
  l->nodes = calloc((size_t)plan->num_steps + 1, sizeof *l->nodes);
  l->graphs = calloc((size_t)plan->num_variants, sizeof *l->graphs);
  if (m->staging && m->places && m->pointers && m->patches && l->arguments && l->built && l->params && l->nodes &&
      l->graphs)
    return GTCO_OK;
  return gtco_fail(message, GTCO_ERROR_MEMORY, "out of memory");
}

static size_t counter_bytes(void) { return (size_t)gtco_the_cuda_plan.counter_bytes; }
static CUdeviceptr counters(const gtco_model* m) {
  return m->memory + (CUdeviceptr)plan->arena_bytes - counter_bytes();
}

static gtco_status clear_counters(const gtco_model* m, char* message) {
  if (!counter_bytes()) return GTCO_OK;
  void* zeros = calloc(1, counter_bytes());
  if (!zeros) return gtco_fail(message, GTCO_ERROR_MEMORY, "out of memory");
  gtco_status status = gtco_device_upload(m->device, counters(m), zeros, counter_bytes(), "counters", message);
  free(zeros);
  return status;
}

static gtco_status lay_out(gtco_model* m, char* message) {
  size_t total = gtco_round_up((size_t)plan->arena_bytes, SPACING);
  for (int t = 0; t < gtco_num_tensors(); ++t) {
    m->staging[t] = total; /* from the start of the memory, which is not known yet */
    total += gtco_round_up(gtco_most_bytes(t), SPACING);
  }
  const size_t tables = total;
  if (m->persistent.blocks) total += gtco_persistent_bytes();
  gtco_status status =
      gtco_device_allocate(m->device, total ? total : SPACING, "intermediate tensors", &m->memory, message);
  if (status == GTCO_OK) status = clear_counters(m, message);
  if (status != GTCO_OK) return status;
  for (int t = 0; t < gtco_num_tensors(); ++t) m->staging[t] += m->memory;
  for (int r = 0; r < plan->num_refs; ++r) {
    const gtco_ref* ref = &plan->refs[r];
    CUdeviceptr* argument = &m->launches.arguments[r];
    m->launches.params[r] = argument;
    m->patches[r] = -1;
    switch (ref->kind) {
      case GTCO_REF_ARENA: *argument = m->memory + (CUdeviceptr)ref->index; break;
      case GTCO_REF_WEIGHT: *argument = m->device->weights + (CUdeviceptr)ref->index; break;
      case GTCO_REF_INPUT: m->patches[r] = (int)ref->index; break;
      case GTCO_REF_OUTPUT: m->patches[r] = plan->num_inputs + (int)ref->index; break;
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

/* ---- running ---- */

/* Finds where a pointer lies. Memory of another device is an error, and so is the host's memory if `device_only`. */
static gtco_status find_place(gtco_model* m, int t, const void* pointer, int device_only) {
  const gtco_tensor_info* info = gtco_tensor(m->sizes.variant, t);
  const char* kind = gtco_is_output(t) ? "output" : "input";
  unsigned type = 0, managed = 0;
  int ordinal = -1;
  CUcontext context = NULL;
  CUdeviceptr reached = 0; /* the pointer as kernels of this context may use it */
  int attributes[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_IS_MANAGED,
                      CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, CU_POINTER_ATTRIBUTE_CONTEXT,
                      CU_POINTER_ATTRIBUTE_DEVICE_POINTER};
  void* values[] = {&type, &managed, &ordinal, &context, &reached};
  if (info->nbytes == 0) {
    m->places[t] = NOWHERE;
    return GTCO_OK;
  }
  GTCO_CUDA_TRY(m->error, cuPointerGetAttributes, (5, attributes, values, (CUdeviceptr)(uintptr_t)pointer),
                "asking where the pointer of %s '%s' lies", kind, info->name);
  m->places[t] = type == CU_MEMORYTYPE_DEVICE || managed ? ON_DEVICE : ON_HOST;
  if (m->places[t] == ON_HOST && device_only)
    return gtco_fail(m->error, GTCO_ERROR_ARGUMENT,
                     "gtco_run_on: the pointer of %s '%s' is of the host's memory; copy it to device %d, or call gtco_run, "
                     "which takes both",
                     kind, info->name, m->device->ordinal);
  if (m->places[t] == ON_DEVICE && !managed && ordinal != m->device->ordinal)
    return gtco_fail(m->error, GTCO_ERROR_ARGUMENT,
                     "gtco_run: the pointer of %s '%s' is of device %d, and this handle runs on device %d (%s); open a "
                     "handle for that device, or copy the tensor",
                     kind, info->name, ordinal, m->device->ordinal, m->device->name);
  /* Both conditions are needed: memory of a pool or of a virtual mapping has no context, and memory of a green context
   * can be reached. */
  if (m->places[t] == ON_DEVICE && !reached && context && context != m->device->context)
    return gtco_fail(m->error, GTCO_ERROR_ARGUMENT,
                     "gtco_run: the memory of %s '%s' is of another context than the primary one of device %d (%s), which "
                     "this handle runs in and which cannot reach it; allocate it with the primary context current "
                     "(cuDevicePrimaryCtxRetain), as the CUDA runtime does",
                     kind, info->name, m->device->ordinal, m->device->name);
  return GTCO_OK;
}

static gtco_status find_places(gtco_model* m, const void* const* inputs, void* const* outputs, int device_only) {
  gtco_status status = gtco_sizes_ready(&m->sizes, m->error);
  if (status == GTCO_OK) status = gtco_check_pointers(m->sizes.variant, inputs, outputs, m->error);
  for (int t = 0; t < gtco_num_tensors() && status == GTCO_OK; ++t)
    status = find_place(m, t, gtco_pointer(inputs, outputs, t), device_only);
  return status;
}

static int in_place(const gtco_model* m, int t) {
  return m->places[t] == ON_DEVICE && ((uintptr_t)m->pointers[t] & (GTCO_DEVICE_ALIGNMENT - 1)) == 0;
}

static gtco_status copy_in(gtco_model* m, const gtco_variant* variant, CUstream stream) {
  for (int t = 0; t < plan->num_inputs; ++t) {
    const void* pointer = m->pointers[t];
    const gtco_tensor_info* info = gtco_tensor(variant, t);
    const size_t bytes = (size_t)info->nbytes;
    if (m->places[t] == ON_HOST)
      GTCO_CUDA_TRY(m->error, cuMemcpyHtoDAsync, (m->staging[t], pointer, bytes, stream),
                    "copying input '%s' to device %d", info->name, m->device->ordinal);
    else if (m->places[t] == ON_DEVICE && !in_place(m, t))
      GTCO_CUDA_TRY(m->error, cuMemcpyDtoDAsync, (m->staging[t], (CUdeviceptr)(uintptr_t)pointer, bytes, stream),
                    "copying input '%s', which is not aligned to %d bytes", info->name,
                    GTCO_DEVICE_ALIGNMENT);
  }
  return GTCO_OK;
}

static gtco_status copy_out(gtco_model* m, const gtco_variant* variant, CUstream stream) {
  for (int t = plan->num_inputs; t < gtco_num_tensors(); ++t) {
    void* pointer = (void*)m->pointers[t];
    const gtco_tensor_info* info = gtco_tensor(variant, t);
    const size_t bytes = (size_t)info->nbytes;
    if (m->places[t] == ON_HOST)
      GTCO_CUDA_TRY(m->error, cuMemcpyDtoHAsync, (pointer, m->staging[t], bytes, stream),
                    "copying output '%s' from device %d", info->name, m->device->ordinal);
    else if (m->places[t] == ON_DEVICE && !in_place(m, t))
      GTCO_CUDA_TRY(m->error, cuMemcpyDtoDAsync, ((CUdeviceptr)(uintptr_t)pointer, m->staging[t], bytes, stream),
                    "copying output '%s', which is not aligned to %d bytes", info->name,
                    GTCO_DEVICE_ALIGNMENT);
  }
  return GTCO_OK;
}

/* The address at which the kernels find a tensor in this part of a run. */
static CUdeviceptr address(const gtco_model* m, int t) {
  return in_place(m, t) ? (CUdeviceptr)(uintptr_t)m->pointers[t] : m->staging[t];
}

static void set_arguments(gtco_model* m, const gtco_variant* variant) {
  for (int r = variant->first_ref; r < variant->first_ref + variant->num_refs; ++r)
    if (m->patches[r] >= 0) m->launches.arguments[r] = address(m, m->patches[r]);
}

static gtco_status launch(gtco_model* m, int variant, CUstream stream, CUevent* events, int captured) {
  if (m->persistent.blocks && !events) {
    for (int t = 0; t < gtco_num_tensors(); ++t) m->persistent.tensors.at[t] = address(m, t);
    return gtco_persistent_launch(m->device, &m->persistent, stream, m->error);
  }
  set_arguments(m, &plan->variants[variant]);
  if (events || captured) return gtco_launch_all(&m->launches, variant, stream, events, m->error);
  return gtco_graph_launch(&m->launches, variant, stream, m->error);
}

/* Clears the blocks' counters for a run. A run leaves zeros behind, but two runs that overlap may not, and nothing
 * orders the replays of a captured run against other runs. If a count stayed, all later runs would be wrong. */
static gtco_status clear_counts(gtco_model* m, CUstream stream) {
  if (counter_bytes())
    GTCO_CUDA_TRY(m->error, cuMemsetD8Async, (counters(m), 0, counter_bytes(), stream), "clearing the counters");
  if (m->persistent.blocks)
    GTCO_CUDA_TRY(m->error, cuMemsetD8Async, (m->persistent.barrier, 0, GTCO_BARRIER_BYTES, stream),
                  "clearing the persistent kernel's barrier");
  return GTCO_OK;
}

/* Puts a whole run into the stream, in the way that the handle launches it. The steps are launched one by one if
 * `events` are to time them, and instead of a graph if the stream is `captured`. */
static gtco_status enqueue(gtco_model* m, const void* const* inputs, void* const* outputs, CUstream stream,
                           CUevent* events, int captured) {
  /* All runs use the same arena, so a run waits for the one before it, which may be on another stream. A stream that is
   * captured must not wait for work outside of its graph. */
  if (m->under_way && !captured)
    GTCO_CUDA_TRY(m->error, cuStreamWaitEvent, (stream, m->finished, 0), "waiting for the run before this one");
  if (captured) m->captured = 1;
  gtco_status status = m->captured ? clear_counts(m, stream) : GTCO_OK;
  gtco_part part = {0};
  while (status == GTCO_OK && gtco_next_part(&m->sizes, &part)) {
    const gtco_variant* variant = &plan->variants[part.variant];
    for (int t = 0; t < gtco_num_tensors(); ++t)
      m->pointers[t] = gtco_part_pointer(&m->sizes, &part, gtco_pointer(inputs, outputs, t), t);
    status = copy_in(m, variant, stream);
    if (status == GTCO_OK) status = launch(m, part.variant, stream, events, captured);
    if (status == GTCO_OK) status = copy_out(m, variant, stream);
    if (events) events += variant->num_steps + 1;
  }
  return status;
}

static gtco_status wait_for(gtco_model* m) {
  GTCO_CUDA_TRY(m->error, cuStreamSynchronize, (m->stream), "running model '%s' on device %d (%s)", plan->name,
                m->device->ordinal, m->device->name);
  m->under_way = 0;
  return GTCO_OK;
}

/* Of a run: before each step and behind the last one of each part. */
static int64_t count_events(const gtco_model* m) { return m->sizes.variant->num_steps + gtco_count_parts(&m->sizes); }

static gtco_status make_events(CUevent* events, int64_t count, char* message) {
  for (int64_t e = 0; e < count; ++e) {
    CUresult result = gtco_cuda()->cuEventCreate(&events[e], CU_EVENT_DEFAULT);
    if (result == CUDA_SUCCESS) continue;
    events[e] = NULL;
    return gtco_driver_fail(message, result, "cuEventCreate", "making %lld events to time steps", (long long)count);
  }
  return GTCO_OK;
}

static gtco_status read_events(const gtco_model* m, CUevent* events, double* seconds, char* message) {
  gtco_part part = {0};
  while (gtco_next_part(&m->sizes, &part)) {
    for (int s = 0; s < plan->variants[part.variant].num_steps; ++s, ++events) {
      float milliseconds = 0;
      GTCO_CUDA_TRY(message, cuEventElapsedTime, (&milliseconds, events[0], events[1]), "reading the time of step %d", s);
      *seconds++ = milliseconds * 1e-3;
    }
    ++events;
  }
  return GTCO_OK;
}

/* A run that is over when this returns, even with an error. The device's context is current. */
static gtco_status run_and_wait(gtco_model* m, const void* const* inputs, void* const* outputs, CUevent* events) {
  gtco_status status = enqueue(m, inputs, outputs, m->stream, events, 0);
  if (status == GTCO_OK) return wait_for(m);
  gtco_cuda()->cuStreamSynchronize(m->stream); /* nothing may write to the caller's memory after this */
  return status;
}

static gtco_status run(gtco_model* m, const void* const* inputs, void* const* outputs, double* seconds) {
  gtco_status status = find_places(m, inputs, outputs, 0);
  if (status != GTCO_OK || !seconds) return status == GTCO_OK ? run_and_wait(m, inputs, outputs, NULL) : status;
  const int64_t count = count_events(m);
  CUevent* events = calloc((size_t)count, sizeof *events);
  if (!events) return gtco_fail(m->error, GTCO_ERROR_MEMORY, "out of memory");
  status = make_events(events, count, m->error);
  if (status == GTCO_OK) status = run_and_wait(m, inputs, outputs, events);
  if (status == GTCO_OK) status = read_events(m, events, seconds, m->error);
  for (int64_t e = 0; e < count; ++e)
    if (events[e]) gtco_cuda()->cuEventDestroy(events[e]);
  free(events);
  return status;
}

static gtco_status check_stream(gtco_model* m, CUstream stream, int* captured) {
  CUcontext context = NULL;
  *captured = 0;
  /* NULL, 1 and 2 are the default streams of whatever context is current. */
  if ((uintptr_t)stream > 2) {
    GTCO_CUDA_TRY(m->error, cuStreamGetCtx, (stream, &context), "asking which device the stream is of");
    if (context != m->device->context)
      return gtco_fail(m->error, GTCO_ERROR_ARGUMENT,
                       "gtco_run_on: the stream is not of the primary context of device %d (%s), which this handle runs "
                       "on, but of another device, context or green context; pass one that was made for it",
                       m->device->ordinal, m->device->name);
  }
  GTCO_CUDA_TRY(m->error, cuStreamIsCapturing, (stream, captured), "asking whether the stream is captured");
  return GTCO_OK;
}

static gtco_status run_on(gtco_model* m, const void* const* inputs, void* const* outputs, CUstream stream) {
  int captured;
  gtco_status status = check_stream(m, stream, &captured);
  if (status == GTCO_OK) status = find_places(m, inputs, outputs, 1);
  if (status != GTCO_OK) return status;
  status = enqueue(m, inputs, outputs, stream, NULL, captured);
  if (captured) return status;
  /* Also after a part of a run: the next one uses the same memory. */
  CUresult result = gtco_cuda()->cuEventRecord(m->finished, stream);
  if (result == CUDA_SUCCESS) {
    m->under_way = 1;
  } else {
    gtco_cuda()->cuStreamSynchronize(stream);
    if (status == GTCO_OK) status = gtco_driver_fail(m->error, result, "cuEventRecord", "marking the end of the run");
  }
  return status;
}

static gtco_status wait_for_runs(gtco_model* m) {
  if (!m->under_way) return GTCO_OK;
  GTCO_CUDA_TRY(m->error, cuEventSynchronize, (m->finished), "running model '%s' on device %d (%s)", plan->name,
                m->device->ordinal, m->device->name);
  m->under_way = 0;
  return GTCO_OK;
}

typedef enum { RUN, RUN_SHAPES, RUN_ON, WAIT } way;

const gtco_variant* gtco_variant_of(const gtco_model* model) { return model->sizes.variant; }

static gtco_status call(gtco_model* m, way how, const int64_t* const* shapes, const void* const* inputs,
                        void* const* outputs, CUstream stream, double* seconds) {
  if (!m) return GTCO_ERROR_ARGUMENT;
  if (gtco_in_forked_child()) return gtco_forked(m->error); /* before `busy`, which may have been set at the fork */
  if (atomic_exchange(&m->busy, 1)) return GTCO_ERROR_BUSY; /* the message belongs to the run under way */
  m->error[0] = '\0';
  CUcapture_mode before;
  gtco_status status = gtco_device_enter(m->device, &before, m->error);
  if (status == GTCO_OK) {
    switch (how) {
      case RUN_SHAPES:
        status = gtco_sizes_set(&m->sizes, shapes, m->error);
        if (status != GTCO_OK) break;
        /* fall through */
      case RUN: status = run(m, inputs, outputs, seconds); break;
      case RUN_ON: status = run_on(m, inputs, outputs, stream); break;
      case WAIT: status = wait_for_runs(m); break;
    }
    gtco_device_leave(before);
  }
  atomic_store(&m->busy, 0);
  return status;
}

EXPORT gtco_status gtco_run(gtco_model* model, const void* const* inputs, void* const* outputs) {
  return call(model, RUN, NULL, inputs, outputs, NULL, NULL);
}

EXPORT gtco_status gtco_run_shapes(gtco_model* model, const int64_t* const* shapes, const void* const* inputs,
                                   void* const* outputs) {
  return call(model, RUN_SHAPES, shapes, inputs, outputs, NULL, NULL);
}

EXPORT gtco_status gtco_run_on(gtco_model* model, const void* const* inputs, void* const* outputs, void* stream) {
  return call(model, RUN_ON, NULL, inputs, outputs, (CUstream)stream, NULL);
}

EXPORT gtco_status gtco_wait(gtco_model* model) { return call(model, WAIT, NULL, NULL, NULL, NULL, NULL); }

EXPORT gtco_status gtco_profile(gtco_model* model, const void* const* inputs, void* const* outputs, double* seconds) {
  return call(model, RUN, NULL, inputs, outputs, NULL, seconds);
}

/* It touches nothing of the device. */
EXPORT gtco_status gtco_set_shapes(gtco_model* model, const int64_t* const* shapes) {
  if (!model) return GTCO_ERROR_ARGUMENT;
  if (atomic_exchange(&model->busy, 1)) return GTCO_ERROR_BUSY;
  model->error[0] = '\0';
  const gtco_status status = gtco_sizes_set(&model->sizes, shapes, model->error);
  atomic_store(&model->busy, 0);
  return status;
}

EXPORT const char* gtco_launch_mode(const gtco_model* model) { return model ? model->mode : NULL; }
EXPORT int gtco_num_threads(const gtco_model* model) { return model ? 1 : 0; }
EXPORT const char* gtco_last_error(const gtco_model* model) { return model ? model->error : gtco_thread_error(); }
