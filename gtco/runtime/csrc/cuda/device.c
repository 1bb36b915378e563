#define _GNU_SOURCE
#include "cuda/device.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "error.h"
#include "weights.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static gtco_device* devices;
static int opened_before_fork;

static void before_fork(void) { pthread_mutex_lock(&lock); }
static void after_fork_parent(void) { pthread_mutex_unlock(&lock); }
/* The child has the lists but not the driver behind them, so it must not call the driver. */
static void after_fork_child(void) {
  opened_before_fork |= devices != NULL;
  devices = NULL;
  pthread_mutex_unlock(&lock);
}

__attribute__((constructor)) static void register_fork_handlers(void) {
  pthread_atfork(before_fork, after_fork_parent, after_fork_child);
}

int gtco_in_forked_child(void) { return opened_before_fork; }

gtco_status gtco_forked(char* message) {
  return gtco_fail(message, GTCO_ERROR_DEVICE,
                   "this process was forked after the model was opened on a GPU, and CUDA does not survive a fork; open "
                   "models after the fork alone, or start processes anew (spawn)");
}

gtco_status gtco_device_enter(const gtco_device* device, CUcapture_mode* before, char* message) {
  GTCO_CUDA_TRY(message, cuCtxPushCurrent, (device->context), "making device %d current", device->ordinal);
  /* If this fails, captures of other threads may disturb the calls below, and these then report it. */
  CUcapture_mode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
  CUresult result = gtco_cuda()->cuThreadExchangeStreamCaptureMode(&mode);
  *before = result == CUDA_SUCCESS ? mode : CU_STREAM_CAPTURE_MODE_GLOBAL;
  return GTCO_OK;
}

void gtco_device_leave(CUcapture_mode before) {
  CUcontext context;
  gtco_cuda()->cuThreadExchangeStreamCaptureMode(&before);
  gtco_cuda()->cuCtxPopCurrent(&context);
}

gtco_status gtco_device_allocate(const gtco_device* device, size_t bytes, const char* what, CUdeviceptr* memory,
                                 char* message) {
  size_t available = 0, total = 0;
  *memory = 0;
  CUresult result = gtco_cuda()->cuMemAlloc(memory, bytes);
  if (result == CUDA_SUCCESS) return GTCO_OK;
  *memory = 0;
  gtco_cuda()->cuMemGetInfo(&available, &total);
  return gtco_driver_fail(message, result, "cuMemAlloc",
                          "model '%s' needs %lld bytes for its %s on device %d (%s), which has %lld of %lld bytes free",
                          gtco_the_plan.name, (long long)bytes, what, device->ordinal, device->name,
                          (long long)available, (long long)total);
}

/* It is over when this returns. It uses a stream of its own: work in the legacy default stream would become part of
 * another thread's capture of a stream that waits for it, and would break that capture. */
gtco_status gtco_device_upload(const gtco_device* device, CUdeviceptr to, const void* data, size_t bytes, const char* what,
                               char* message) {
  CUstream stream = NULL;
  GTCO_CUDA_TRY(message, cuStreamCreate, (&stream, CU_STREAM_NON_BLOCKING), "making a stream");
  const char* call = data ? "cuMemcpyHtoDAsync" : "cuMemsetD8Async";
  CUresult result = data ? gtco_cuda()->cuMemcpyHtoDAsync(to, data, bytes, stream)
                         : gtco_cuda()->cuMemsetD8Async(to, 0, bytes, stream);
  if (result == CUDA_SUCCESS) {
    call = "cuStreamSynchronize";
    result = gtco_cuda()->cuStreamSynchronize(stream);
  }
  gtco_cuda()->cuStreamDestroy(stream);
  if (result == CUDA_SUCCESS) return GTCO_OK;
  return gtco_driver_fail(message, result, call, "copying %lld bytes of %s to device %d", (long long)bytes, what,
                          device->ordinal);
}

static gtco_status upload_weights(gtco_device* device, char* message) {
  const gtco_plan* plan = &gtco_the_plan;
  gtco_weights weights;
  if (plan->weights_bytes == 0) return GTCO_OK;
  gtco_status status = gtco_weights_open(plan, &weights, message);
  if (status != GTCO_OK) return status;
  status = gtco_device_allocate(device, (size_t)plan->weights_bytes, "weights", &device->weights, message);
  if (status == GTCO_OK)
    status = gtco_device_upload(device, device->weights, weights.data, (size_t)plan->weights_bytes, "weights", message);
  gtco_weights_close(&weights);
  return status;
}

/* In the device's context: what handles share of it. */
static gtco_status fill(gtco_device* device, char* message) {
  CUcapture_mode before;
  gtco_status status = gtco_device_enter(device, &before, message);
  if (status != GTCO_OK) return status;
  status = gtco_kernels_load(device->major, device->minor, device->name, &device->kernels, message);
  if (status == GTCO_OK) status = upload_weights(device, message);
  gtco_device_leave(before);
  return status;
}

static void let_go(gtco_device* device) {
  char ignored[GTCO_MESSAGE_BYTES];
  CUcapture_mode before;
  if (device->context) {
    if (gtco_device_enter(device, &before, ignored) == GTCO_OK) {
      if (device->weights) gtco_cuda()->cuMemFree(device->weights);
      gtco_kernels_unload(&device->kernels);
      gtco_device_leave(before);
    }
    gtco_cuda()->cuDevicePrimaryCtxRelease(device->device);
  }
  free(device->kernels.modules);
  free(device->kernels.functions);
  free(device);
}

static gtco_status look_up(gtco_device* device, char* message) {
  int count = 0;
  GTCO_CUDA_TRY(message, cuDeviceGetCount, (&count), "counting GPUs");
  if (device->ordinal < 0 || device->ordinal >= count)
    return gtco_fail(message, count ? GTCO_ERROR_ARGUMENT : GTCO_ERROR_DEVICE,
                     "there is no device %d: this process sees %d GPUs%s", device->ordinal, count,
                     count ? ", numbered from 0" : "; CUDA_VISIBLE_DEVICES may hide them");
  const int ordinal = device->ordinal;
  GTCO_CUDA_TRY(message, cuDeviceGet, (&device->device, ordinal), "looking for device %d", ordinal);
  GTCO_CUDA_TRY(message, cuDeviceGetName, (device->name, (int)sizeof device->name, device->device),
                "asking for the name of device %d", ordinal);
  GTCO_CUDA_TRY(message, cuDeviceGetAttribute,
                (&device->major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device->device),
                "asking for the architecture of device %d", ordinal);
  GTCO_CUDA_TRY(message, cuDeviceGetAttribute,
                (&device->minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device->device),
                "asking for the architecture of device %d", ordinal);
  GTCO_CUDA_TRY(message, cuDeviceGetAttribute,
                (&device->multiprocessors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device->device),
                "asking for the size of device %d", ordinal);
  CUresult result = gtco_cuda()->cuDevicePrimaryCtxRetain(&device->context, device->device);
  if (result != CUDA_SUCCESS) {
    device->context = NULL;
    return gtco_driver_fail(message, result, "cuDevicePrimaryCtxRetain", "taking device %d (%s)", ordinal,
                            device->name);
  }
  return GTCO_OK;
}

static gtco_status make(int ordinal, gtco_device** made, char* message) {
  gtco_device* device = calloc(1, sizeof *device);
  if (!device) return gtco_fail(message, GTCO_ERROR_MEMORY, "out of memory");
  device->ordinal = ordinal;
  gtco_status status = look_up(device, message);
  if (status == GTCO_OK) status = fill(device, message);
  if (status != GTCO_OK) {
    let_go(device);
    return status;
  }
  device->next = devices;
  devices = *made = device;
  return GTCO_OK;
}

gtco_status gtco_device_acquire(int ordinal, gtco_device** device, char* message) {
  if (opened_before_fork) return gtco_forked(message);
  gtco_status status = gtco_driver_open(message);
  if (status != GTCO_OK) return status;
  pthread_mutex_lock(&lock);
  gtco_device* found = devices;
  while (found && found->ordinal != ordinal) found = found->next;
  if (!found) status = make(ordinal, &found, message);
  if (status == GTCO_OK) {
    ++found->users;
    *device = found;
  }
  pthread_mutex_unlock(&lock);
  return status;
}

void gtco_device_release(gtco_device* device) {
  if (opened_before_fork) return; /* they are the parent's */
  pthread_mutex_lock(&lock);
  if (--device->users == 0) {
    gtco_device** at = &devices;
    while (*at != device) at = &(*at)->next;
    *at = device->next;
    let_go(device);
  }
  pthread_mutex_unlock(&lock);
}
