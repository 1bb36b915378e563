/* gtco_run and the rest of gtco_api.h for a model that runs on a GPU: the passing of user pointers, of the host or the
 * device, to the kernels. */
#define _GNU_SOURCE
#include <stdlib.h>

#include "cuda/model.h"
#include "tensors.h"
#include "variants.h"

#define EXPORT __attribute__((visibility("default")))

static const gtco_plan* const plan = &gtco_the_plan;

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
                     "the pointer of %s '%s' is of device %d, and this handle runs on device %d (%s); open a "
                     "handle for that device, or copy the tensor",
                     kind, info->name, ordinal, m->device->ordinal, m->device->name);
  /* Both conditions are needed: memory of a pool or of a virtual mapping has no context, and memory of a green context
   * can be reached. */
  if (m->places[t] == ON_DEVICE && !reached && context && context != m->device->context)
    return gtco_fail(m->error, GTCO_ERROR_ARGUMENT,
                     "the memory of %s '%s' is of another context than the primary one of device %d (%s), which "
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

/* Notes where the tensors of this part are. Kernels use memory of the device that is aligned and has all samples of the
 * variant. */
static void use_part(gtco_model* m, const gtco_part* part, const void* const* inputs, void* const* outputs) {
  for (int t = 0; t < gtco_num_tensors(); ++t) {
    const void* pointer = gtco_part_pointer(&m->sizes, part, gtco_pointer(inputs, outputs, t), t);
    const int whole = gtco_part_bytes(&m->sizes, part, t) == gtco_tensor(&plan->variants[part->variant], t)->nbytes;
    m->pointers[t] = pointer;
    m->in_place[t] = m->places[t] == ON_DEVICE && whole && ((uintptr_t)pointer & (GTCO_DEVICE_ALIGNMENT - 1)) == 0;
  }
}

static gtco_status copy_in(gtco_model* m, const gtco_part* part, CUstream stream) {
  for (int t = 0; t < plan->num_inputs; ++t) {
    const void* pointer = m->pointers[t];
    const char* name = plan->inputs[t].name;
    const size_t bytes = (size_t)gtco_part_bytes(&m->sizes, part, t);
    if (m->places[t] == ON_HOST)
      GTCO_CUDA_TRY(m->error, cuMemcpyHtoDAsync, (m->staging[t], pointer, bytes, stream),
                    "copying input '%s' to device %d", name, m->device->ordinal);
    else if (m->places[t] == ON_DEVICE && !m->in_place[t])
      GTCO_CUDA_TRY(m->error, cuMemcpyDtoDAsync, (m->staging[t], (CUdeviceptr)(uintptr_t)pointer, bytes, stream),
                    "copying input '%s', which kernels do not read in place", name);
  }
  return GTCO_OK;
}

static gtco_status copy_out(gtco_model* m, const gtco_part* part, CUstream stream) {
  for (int t = plan->num_inputs; t < gtco_num_tensors(); ++t) {
    void* pointer = (void*)m->pointers[t];
    const char* name = plan->outputs[t - plan->num_inputs].name;
    const size_t bytes = (size_t)gtco_part_bytes(&m->sizes, part, t);
    if (m->places[t] == ON_HOST)
      GTCO_CUDA_TRY(m->error, cuMemcpyDtoHAsync, (pointer, m->staging[t], bytes, stream),
                    "copying output '%s' from device %d", name, m->device->ordinal);
    else if (m->places[t] == ON_DEVICE && !m->in_place[t])
      GTCO_CUDA_TRY(m->error, cuMemcpyDtoDAsync, ((CUdeviceptr)(uintptr_t)pointer, m->staging[t], bytes, stream),
                    "copying output '%s', which kernels do not write in place", name);
  }
  return GTCO_OK;
}

/* The address at which the kernels find a tensor in this part of a run. */
static CUdeviceptr address(const gtco_model* m, int t) {
  return m->in_place[t] ? (CUdeviceptr)(uintptr_t)m->pointers[t] : m->staging[t];
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
  if (gtco_counter_bytes())
    GTCO_CUDA_TRY(m->error, cuMemsetD8Async, (gtco_counters(m), 0, gtco_counter_bytes(), stream), "clearing the counters");
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
    use_part(m, &part, inputs, outputs);
    status = copy_in(m, &part, stream);
    if (status == GTCO_OK) status = launch(m, part.variant, stream, events, captured);
    if (status == GTCO_OK) status = copy_out(m, &part, stream);
    if (events) events += plan->variants[part.variant].num_steps + 1;
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
  if (gtco_in_forked_child()) return gtco_forked(model->error);
  if (atomic_exchange(&model->busy, 1)) return GTCO_ERROR_BUSY;
  model->error[0] = '\0';
  const gtco_status status = gtco_sizes_set(&model->sizes, shapes, model->error);
  atomic_store(&model->busy, 0);
  return status;
}

EXPORT const char* gtco_launch_mode(const gtco_model* model) { return model ? model->mode : NULL; }
EXPORT int gtco_num_threads(const gtco_model* model) { return model ? 1 : 0; }
EXPORT const char* gtco_last_error(const gtco_model* model) { return model ? model->error : gtco_thread_error(); }
