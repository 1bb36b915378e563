/* A model for GPUs has these tables beside its gtco_plan (whose steps are NULL, and whose num_steps is the number of
 * launches): launches and the machine code of their kernels. gtco/runtime/gpu/table.py writes it. */
#ifndef GTCO_CUDA_PLAN_H
#define GTCO_CUDA_PLAN_H

#include "../plan.h"

#define GTCO_DEVICE_ALIGNMENT 16 /* of every buffer that a kernel sees: its widest load */

/* kernel(*buffers), pointers to device memory. */
typedef struct {
  int32_t function;            /* its number in functions */
  int32_t first_ref, num_refs; /* its buffers are refs[first_ref], refs[first_ref + 1], ... */
  uint32_t grid[3];            /* in blocks */
  uint32_t threads, shared;    /* of a block: threads along x, dynamic shared memory in bytes */
} gtco_launch;

typedef struct {
  const char* name;
  uint32_t shared; /* the most that a launch of it asks for */
} gtco_function;

typedef struct {
  int64_t offset, bytes; /* in gtco_the_images */
} gtco_cubin;

enum {
  GTCO_CODE_FAMILY, /* sm_80: runs on 8.0 and on a later minor version */
  GTCO_CODE_EXACT,  /* sm_90a: runs on 9.0 alone */
  GTCO_CODE_PTX     /* compute_80: the driver compiles it for 8.0 and everything newer */
};

/* The kernels for one architecture. */
typedef struct {
  const char* name; /* "sm_80" */
  int32_t major, minor;
  int32_t code;             /* GTCO_CODE_... */
  const gtco_cubin* cubins; /* one a function */
} gtco_image;

/* The persistent kernel reads the types below, down to gtco_device_tensors:
 * gtco/tensor/cuda/device/gtco/persistent_tables.cuh. Its pointers are CUdeviceptr, a ref's address or 2 * i + 1 for
 * the i-th of the tensors. */
typedef struct {
  int32_t kernel; /* its number in the persistent kernel */
  int32_t tasks;  /* blocks of the step here; its own launch may have another number */
  int32_t first_ref, num_refs;
  uint32_t prefetch_ref, prefetch_bytes; /* weights of this step, fetched during the one before */
} gtco_device_step;

#define GTCO_MOST_TENSORS 64

typedef struct {
  unsigned long long at[GTCO_MOST_TENSORS]; /* inputs, then outputs */
} gtco_device_tensors;

/* One kernel for all steps: kernel(steps, num_steps, pointers, tensors, barrier), launched cooperatively. */
typedef struct {
  const char* name;
  const gtco_device_step* steps;
  const gtco_cubin* cubins; /* one for each image of the plan; empty for PTX, and if registers would spill */
  uint32_t threads, shared; /* of a block */
} gtco_persistent;

typedef struct {
  const gtco_launch* launches;
  const gtco_function* functions;
  const gtco_image* images;
  const gtco_persistent* persistent; /* the model is launched so if the device can; NULL: as a graph of launches */
  int64_t counter_bytes; /* at the arena's end: zeros before the first run, and every step leaves them as zeros */
  int32_t num_functions, num_images;
} gtco_cuda_plan;

extern const gtco_cuda_plan gtco_the_cuda_plan;
extern const unsigned char gtco_the_images[];

#endif /* GTCO_CUDA_PLAN_H */
