#include "cuda/images.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "error.h"

#define LOG_BYTES 240             /* of the driver's compiler: as much as a message has room for */
#define SHARED_UNASKED (48 << 10) /* a launch gets so much dynamic shared memory without asking the driver */

static const gtco_cuda_plan* const plan = &gtco_the_cuda_plan;

static int runs(const gtco_image* image, int major, int minor) {
  switch (image->code) {
    case GTCO_CODE_FAMILY: return image->major == major && image->minor <= minor;
    case GTCO_CODE_EXACT: return image->major == major && image->minor == minor;
    default: return image->major < major || (image->major == major && image->minor <= minor);
  }
}

/* The better of two images that run: machine code before PTX, the newer before the older, an exact match first. */
static int better(const gtco_image* image, const gtco_image* other) {
  const int ptx = image->code == GTCO_CODE_PTX;
  if (ptx != (other->code == GTCO_CODE_PTX)) return !ptx;
  if (image->major != other->major) return image->major > other->major;
  return image->minor > other->minor || (image->minor == other->minor && image->code == GTCO_CODE_EXACT);
}

const gtco_image* gtco_pick_image(const gtco_cuda_plan* from, int major, int minor) {
  const gtco_image* best = NULL;
  for (int i = 0; i < from->num_images; ++i) {
    const gtco_image* image = &from->images[i];
    if (runs(image, major, minor) && (!best || better(image, best))) best = image;
  }
  return best;
}

/* The target to compile for, for such a GPU: an architecture of gtco/machine/gpu.py, or the reason why there is none. */
static const char* advice(int major, int minor) {
  if (major == 9 && minor == 0) return "compile it with --target cuda:sm_90a";
  if (major == 8 && minor == 6) /* runs the image for sm_80, with no more shared memory than sm_89 has */
    return "compile it with --target cuda:sm_80,sm_89";
  if (major == 8) return minor < 9 ? "compile it with --target cuda:sm_80" : "compile it with --target cuda:sm_89";
  if (major == 7 && minor >= 5) return "compile it with --target cuda:sm_75";
  if (major < 8) return "CUDA 13 ended GPUs older than sm_75 (Turing): run the model on another one";
  return "GPUs newer than sm_90a (Hopper) run PTX, which sm_90a alone and --no-ptx leave out: compile it with --target "
         "cuda:sm_89 for them";
}

static gtco_status no_image(int major, int minor, const char* name, char* message) {
  char known[256] = "";
  size_t used = 0;
  for (int i = 0; i < plan->num_images && used < sizeof known; ++i) {
    const int n = snprintf(known + used, sizeof known - used, "%s%s", i ? ", " : "", plan->images[i].name);
    if (n > 0) used += (size_t)n;
  }
  return gtco_fail(message, GTCO_ERROR_IMAGE,
                   "model '%s' has code for %s, which this GPU (%s, sm_%d%d) does not run; %s",
                   gtco_the_plan.name, known, name, major, minor, advice(major, minor));
}

/* Says why the driver refuses the image of a kernel. `log`: its compiler's message. */
static gtco_status not_loaded(CUresult result, const gtco_image* image, const char* name, const gtco_cubin* cubin,
                              const char* log, const char* device, char* message) {
  const int driver = gtco_driver_version();
  gtco_status status;
  if (image->code != GTCO_CODE_PTX) {
    status = gtco_driver_fail(
        message, result, "cuModuleLoadDataEx",
        "loading kernel %s (%s) on %s; the driver serves CUDA %d.%d, and one older than what compiled the model cannot "
        "read its machine code: update it then",
        name, image->name, device, driver / 1000, driver % 1000 / 10);
  } else if (result == CUDA_ERROR_UNSUPPORTED_PTX_VERSION) {
    const char* version = (const char*)gtco_the_images + cubin->offset + strlen(".version "); /* the begin of PTX */
    status = gtco_driver_fail(
        message, result, "cuModuleLoadDataEx",
        "compiling kernel %s (%s) for %s; its PTX is of version %.*s, and the driver, which serves CUDA %d.%d, knows none so "
        "new: update it",
        name, image->name, device, (int)strcspn(version, "\n"), version, driver / 1000, driver % 1000 / 10);
  } else {
    status = gtco_driver_fail(message, result, "cuModuleLoadDataEx", "compiling kernel %s (%s) for %s; the driver says: %s",
                              name, image->name, device, log[0] ? log : "nothing");
  }
  switch (result) {
    case CUDA_ERROR_INVALID_IMAGE:
    case CUDA_ERROR_NO_BINARY_FOR_GPU:
    case CUDA_ERROR_INVALID_PTX:
    case CUDA_ERROR_JIT_COMPILER_NOT_FOUND:
    case CUDA_ERROR_UNSUPPORTED_PTX_VERSION:
    case CUDA_ERROR_JIT_COMPILATION_DISABLED: return GTCO_ERROR_IMAGE;
    default: return status;
  }
}

/* Loads the image into a module; the driver compiles PTX. */
static gtco_status load_module(const gtco_image* image, const char* name, const gtco_cubin* cubin, const char* device,
                               CUmodule* module, char* message) {
  char log[LOG_BYTES] = "";
  int options[] = {CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES};
  void* values[] = {log, (void*)(uintptr_t)(sizeof log - 1)}; /* the driver replaces this size */
  CUresult result = gtco_cuda()->cuModuleLoadDataEx(module, gtco_the_images + cubin->offset, 2, options, values);
  if (result == CUDA_SUCCESS) return GTCO_OK;
  *module = NULL;
  log[sizeof log - 1] = '\0';
  for (size_t i = strlen(log); i-- > 0;)
    if (log[i] == '\n') log[i] = log[i + 1] ? ' ' : '\0';
  return not_loaded(result, image, name, cubin, log, device, message);
}

/* Loads one kernel of `image`: its module and function. Asks the device for the shared memory of its blocks. */
static gtco_status load_one(const gtco_image* image, const char* name, const gtco_cubin* cubin, uint32_t shared,
                            const char* device, CUmodule* module, CUfunction* function, int* fits, char* message) {
  *fits = 1;
  gtco_status status = load_module(image, name, cubin, device, module, message);
  if (status != GTCO_OK) return status;
  GTCO_CUDA_TRY(message, cuModuleGetFunction, (function, *module, name), "looking for kernel %s in its image for %s", name,
                image->name);
  if (shared <= SHARED_UNASKED) return GTCO_OK;
  CUresult result = gtco_cuda()->cuFuncSetAttribute(*function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, (int)shared);
  if (result == CUDA_SUCCESS) return GTCO_OK;
  *fits = result != CUDA_ERROR_INVALID_VALUE;
  return gtco_driver_fail(message, result, "cuFuncSetAttribute",
                          "asking %s for %u bytes of shared memory for kernel %s; a later version may give a block less "
                          "than %s does: compile for both then (--target cuda:sm_80,sm_89)",
                          device, shared, name, image->name);
}

static gtco_status load_function(int number, const char* device, gtco_kernels* kernels, char* message) {
  const gtco_function* function = &plan->functions[number];
  int fits;
  gtco_status status = load_one(kernels->image, function->name, &kernels->image->cubins[number], function->shared, device,
                                &kernels->modules[number], &kernels->functions[number], &fits, message);
  return fits ? status : GTCO_ERROR_IMAGE;
}

/* If the image has no persistent kernel, or it needs more shared memory than the device has, the model runs without it. */
static gtco_status load_persistent(const char* device, gtco_kernels* kernels, char* message) {
  const gtco_persistent* kernel = plan->persistent;
  const gtco_cubin* cubin = &kernel->cubins[kernels->image - plan->images];
  int fits;
  if (!cubin->bytes) return GTCO_OK;
  gtco_status status = load_one(kernels->image, kernel->name, cubin, kernel->shared, device, &kernels->persistent_module,
                                &kernels->persistent, &fits, message);
  if (fits) return status;
  kernels->persistent = NULL;
  message[0] = '\0';
  return GTCO_OK;
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
  for (int f = 0; f < plan->num_functions && status == GTCO_OK; ++f) status = load_function(f, name, kernels, message);
  if (status == GTCO_OK && plan->persistent) status = load_persistent(name, kernels, message);
  if (status != GTCO_OK) gtco_kernels_unload(kernels);
  return status;
}

void gtco_kernels_unload(gtco_kernels* kernels) {
  for (int f = 0; kernels->modules && f < plan->num_functions; ++f)
    if (kernels->modules[f]) gtco_cuda()->cuModuleUnload(kernels->modules[f]);
  if (kernels->persistent_module) gtco_cuda()->cuModuleUnload(kernels->persistent_module);
  free(kernels->modules);
  free(kernels->functions);
  memset(kernels, 0, sizeof *kernels);
}
