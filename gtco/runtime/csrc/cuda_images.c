#include "cuda_images.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "error.h"

#define SHARED_UNASKED (48 << 10) /* a launch may have so much dynamic shared memory without being asked for */

static const gtco_cuda_plan* const plan = &gtco_the_cuda_plan;

const gtco_image* gtco_pick_image(const gtco_cuda_plan* from, int major, int minor) {
  const gtco_image* best = NULL;
  for (int i = 0; i < from->num_images; ++i) {
    const gtco_image* image = &from->images[i];
    if (image->major != major || (image->exact ? image->minor != minor : image->minor > minor)) continue;
    if (!best || image->minor > best->minor || (image->minor == best->minor && image->exact)) best = image;
  }
  return best;
}

static gtco_status no_image(int major, int minor, const char* name, char* message) {
  char known[256] = "";
  size_t used = 0;
  for (int i = 0; i < plan->num_images && used < sizeof known; ++i) {
    const int n = snprintf(known + used, sizeof known - used, "%s%s", i ? ", " : "", plan->images[i].name);
    if (n > 0) used += (size_t)n;
  }
  return gtco_fail(message, GTCO_ERROR_IMAGE,
                   "model '%s' has machine code for %s, which this GPU (%s, sm_%d%d) does not run; compile it with "
                   "--target cuda:sm_%d%d%s",
                   gtco_the_plan.name, known, name, major, minor, major, minor, major == 9 ? "a" : "");
}

static gtco_status load_one(int number, const char* device, gtco_kernels* kernels, char* message) {
  const gtco_function* function = &plan->functions[number];
  const gtco_cubin* cubin = &kernels->image->cubins[number];
  CUresult result = gtco_cuda()->cuModuleLoadData(&kernels->modules[number], gtco_the_images + cubin->offset);
  if (result != CUDA_SUCCESS) {
    kernels->modules[number] = NULL;
    const int version = gtco_driver_version();
    gtco_status status = gtco_driver_fail(
        message, result, "cuModuleLoadData",
        "loading kernel %s (%s) on %s; the driver serves CUDA %d.%d, and one older than what compiled the model cannot "
        "read its machine code: update it then",
        function->name, kernels->image->name, device, version / 1000, version % 1000 / 10);
    const int unread = result == CUDA_ERROR_INVALID_IMAGE || result == CUDA_ERROR_NO_BINARY_FOR_GPU ||
                       result == CUDA_ERROR_UNSUPPORTED_PTX_VERSION;
    return unread ? GTCO_ERROR_IMAGE : status;
  }
  GTCO_CUDA_TRY(message, cuModuleGetFunction, (&kernels->functions[number], kernels->modules[number], function->name),
                "looking for kernel %s in its image for %s", function->name, kernels->image->name);
  if (function->shared <= SHARED_UNASKED) return GTCO_OK;
  result = gtco_cuda()->cuFuncSetAttribute(kernels->functions[number], CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                           (int)function->shared);
  if (result == CUDA_SUCCESS) return GTCO_OK;
  gtco_status status = gtco_driver_fail(message, result, "cuFuncSetAttribute",
                                        "asking %s for %u bytes of shared memory for kernel %s; a later minor version may "
                                        "give a block less than %s does: compile for both then (--target cuda:sm_80,sm_89)",
                                        device, function->shared, function->name, kernels->image->name);
  return result == CUDA_ERROR_INVALID_VALUE ? GTCO_ERROR_IMAGE : status;
}

gtco_status gtco_kernels_load(int major, int minor, const char* name, gtco_kernels* kernels, char* message) {
  const size_t count = (size_t)plan->num_functions + 1;
  memset(kernels, 0, sizeof *kernels);
  kernels->image = gtco_pick_image(plan, major, minor);
  if (!kernels->image) return no_image(major, minor, name, message);
  kernels->modules = calloc(count, sizeof *kernels->modules);
  kernels->functions = calloc(count, sizeof *kernels->functions);
  gtco_status status = kernels->modules && kernels->functions
                           ? GTCO_OK
                           : gtco_fail(message, GTCO_ERROR_MEMORY, "out of memory");
  for (int f = 0; f < plan->num_functions && status == GTCO_OK; ++f) status = load_one(f, name, kernels, message);
  if (status != GTCO_OK) gtco_kernels_unload(kernels);
  return status;
}

void gtco_kernels_unload(gtco_kernels* kernels) {
  for (int f = 0; kernels->modules && f < plan->num_functions; ++f)
    if (kernels->modules[f]) gtco_cuda()->cuModuleUnload(kernels->modules[f]);
  free(kernels->modules);
  free(kernels->functions);
  memset(kernels, 0, sizeof *kernels);
}
