/* The kernels of a device: the image that it runs, and the loaded functions. */
#ifndef GTCO_CUDA_IMAGES_H
#define GTCO_CUDA_IMAGES_H

#include "cuda/driver.h"
#include "cuda/plan.h"

typedef struct {
  const gtco_image* image;
  CUmodule* modules;     /* one a function of the plan */
  CUfunction* functions; /* the plan's, in its order */
  CUmodule persistent_module;
  CUfunction persistent; /* NULL if the library or its image has none, or the device has too little shared memory */
} gtco_kernels;

/* The image that a device of compute capability major.minor runs: sm_90a only on 9.0, sm_80 also on 8.6 and 8.9. If no
 * image fits, the newest PTX that is not newer than the device; NULL if there is none. */
const gtco_image* gtco_pick_image(const gtco_cuda_plan* plan, int major, int minor);

/* Loads the kernels of the image for this device into the current context. The driver compiles PTX the first time on
 * this machine, and keeps the result in ~/.nv/ComputeCache. On failure nothing stays loaded. `name`: the device's. */
gtco_status gtco_kernels_load(int major, int minor, const char* name, gtco_kernels* kernels, char* message);

/* Unloads them. The context they were loaded into is current. */
void gtco_kernels_unload(gtco_kernels* kernels);

#endif /* GTCO_CUDA_IMAGES_H */
