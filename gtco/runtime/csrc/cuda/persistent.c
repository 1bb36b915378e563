#include "cuda/persistent.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "error.h"

#define SPACING 256 /* the tables begin at multiples of so many bytes */

static const gtco_plan* const plan = &gtco_the_plan;
static const gtco_cuda_plan* const cuda_plan = &gtco_the_cuda_plan;

static size_t spaced(size_t bytes) { return (bytes + SPACING - 1) / SPACING * SPACING; }
static size_t step_bytes(void) { return spaced((size_t)plan->num_steps * sizeof(gtco_device_step)); }
static size_t pointer_bytes(void) { return spaced((size_t)plan->num_refs * sizeof(CUdeviceptr)); }

size_t gtco_persistent_bytes(void) { return step_bytes() + pointer_bytes() + SPACING; }

/* How many blocks of the kernel are on the device at once, or 0 with the reason in `why`. */
static gtco_status room(const gtco_device* device, unsigned* blocks, char* why, char* message) {
  const gtco_persistent* kernel = cuda_plan->persistent;
  int cooperative = 0, each = 0;
  *blocks = 0;
  if (!kernel) {
    snprintf(why, GTCO_REASON_BYTES, "the library was compiled without the persistent kernel");
    return GTCO_OK;
  }
  if (device->kernels.image->code == GTCO_CODE_PTX) {
    snprintf(why, GTCO_REASON_BYTES, "the persistent kernel has no PTX, and this GPU runs none of the library's machine code");
    return GTCO_OK;
  }
  const gtco_image* image = device->kernels.image;
  if (!kernel->cubins[image - cuda_plan->images].bytes) {
    snprintf(why, GTCO_REASON_BYTES, "the persistent kernel would spill registers on %s, and was left out of its image",
             image->name);
    return GTCO_OK;
  }
  if (!device->kernels.persistent) { /* it needs more than the device has */
    snprintf(why, GTCO_REASON_BYTES, "the persistent kernel takes %u bytes of shared memory, more than this GPU gives a block",
             kernel->shared);
    return GTCO_OK;
  }
  GTCO_CUDA_TRY(message, cuDeviceGetAttribute,
                (&cooperative, CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH, device->device),
                "asking device %d whether it launches cooperative kernels", device->ordinal);
  if (!cooperative) {
    snprintf(why, GTCO_REASON_BYTES, "this GPU launches no cooperative kernels");
    return GTCO_OK;
  }
  GTCO_CUDA_TRY(message, cuOccupancyMaxActiveBlocksPerMultiprocessor,
                (&each, device->kernels.persistent, (int)kernel->threads, kernel->shared),
                "asking how many blocks of kernel %s a multiprocessor holds", kernel->name);
  if (!each) snprintf(why, GTCO_REASON_BYTES, "no multiprocessor of this GPU holds a block of the persistent kernel");
  *blocks = (unsigned)each * (unsigned)device->multiprocessors;
  return GTCO_OK;
}

/* More blocks would find nothing to do in any step, and the others would wait for them at each barrier. */
static unsigned most_tasks(void) {
  int32_t most = 1;
  for (int s = 0; s < plan->num_steps; ++s)
    if (cuda_plan->persistent->steps[s].tasks > most) most = cuda_plan->persistent->steps[s].tasks;
  return (unsigned)most;
}

gtco_status gtco_persistent_choose(const gtco_device* device, int wanted, gtco_persistent_state* state, char* message) {
  unsigned blocks = 0;
  state->blocks = 0;
  state->why[0] = '\0';
  if (wanted < GTCO_LAUNCHES_AS_COMPILED || wanted > GTCO_LAUNCHES_PERSISTENT)
    return gtco_fail(message, GTCO_ERROR_ARGUMENT, "options.launches is %d; 0 (as compiled), 1 (graph) and 2 (persistent) are known",
                     wanted);
  if (wanted == GTCO_LAUNCHES_GRAPH || (wanted == GTCO_LAUNCHES_AS_COMPILED && !cuda_plan->persistent)) return GTCO_OK;
  gtco_status status = room(device, &blocks, state->why, message);
  if (status != GTCO_OK) return status;
  if (blocks) {
    const unsigned most = most_tasks();
    state->blocks = blocks < most ? blocks : most;
    return GTCO_OK;
  }
  if (wanted == GTCO_LAUNCHES_AS_COMPILED) return GTCO_OK;
  return gtco_fail(message, GTCO_ERROR_ARGUMENT, "the persistent kernel was asked for (options.launches), and %s (device %d, %s)",
                   state->why, device->ordinal, device->name);
}

gtco_status gtco_persistent_upload(const gtco_device* device, CUdeviceptr memory, const CUdeviceptr* arguments,
                                   const int* tensors, gtco_persistent_state* state, char* message) {
  const size_t bytes = gtco_persistent_bytes();
  unsigned char* tables = calloc(1, bytes);
  if (!tables) return gtco_fail(message, GTCO_ERROR_MEMORY, "out of memory");
  memcpy(tables, cuda_plan->persistent->steps, (size_t)plan->num_steps * sizeof(gtco_device_step));
  for (int r = 0; r < plan->num_refs; ++r) {
    const CUdeviceptr pointer = tensors[r] >= 0 ? 2 * (CUdeviceptr)tensors[r] + 1 : arguments[r];
    memcpy(tables + step_bytes() + (size_t)r * sizeof pointer, &pointer, sizeof pointer);
  }
  gtco_status status = gtco_device_upload(device, memory, tables, bytes, "tables", message);
  free(tables);
  state->steps = memory;
  state->pointers = memory + step_bytes();
  state->barrier = memory + step_bytes() + pointer_bytes(); /* zero; only the kernel changes it afterwards */
  return status;
}

gtco_status gtco_persistent_launch(const gtco_device* device, const gtco_persistent_state* state, CUstream stream,
                                   char* message) {
  const gtco_persistent* kernel = cuda_plan->persistent;
  gtco_persistent_state given = *state;
  int32_t count = plan->num_steps;
  void* params[] = {&given.steps, &count, &given.pointers, &given.tensors, &given.barrier};
  GTCO_CUDA_TRY(message, cuLaunchCooperativeKernel,
                (device->kernels.persistent, given.blocks, 1, 1, kernel->threads, 1, 1, kernel->shared, stream, params),
                "launching the model's persistent kernel %s as %u blocks of %u threads", kernel->name, given.blocks,
                kernel->threads);
  return GTCO_OK;
}
