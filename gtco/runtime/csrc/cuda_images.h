/* The kernels of a device: which image it runs, and its functions once loaded. */
#ifndef GTCO_CUDA_IMAGES_H
#define GTCO_CUDA_IMAGES_H

#include "cuda_driver.h"
#include "cuda_plan.h"

typedef struct {
  const gtco_image* image;
  CUmodule* modules;     /* one a function of the plan */
  CUfunction* functions; /* the plan's, in its order */
  CUmodule persistent_module;
  CUfunction persistent; /* NULL where the library or its image has none, or the device too little shared memory for it */
} gtco_kernels;

/* The image that a device of compute capability major.minor runs: sm_90a on 9.0 alone, sm_80 also on 8.6 and 8.9, and
 * where none of these does the newest PTX that is not newer than the device; NULL where there is none. */
const gtco_image* gtco_pick_image(const gtco_cuda_plan* plan, int major, int minor);

/* Loads the kernels of the image for this device into the current context: what is PTX the driver compiles, the first time
 * on this machine, and keeps (in ~/.nv/ComputeCache). On failure nothing stays loaded. `name`: the
 * device's. */
gtco_status gtco_kernels_load(int major, int minor, const char* name, gtco_kernels* kernels, char* message);

/* Unloads them; the context they were loaded into is current. */
void gtco_kernels_unload(gtco_kernels* kernels);

#endif /* GTCO_CUDA_IMAGES_H */
