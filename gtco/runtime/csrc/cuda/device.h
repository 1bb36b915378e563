/* The parts that all handles of this model on one device share: the primary context, the loaded kernels, the weights. */
#ifndef GTCO_CUDA_DEVICE_H
#define GTCO_CUDA_DEVICE_H

#include "cuda/driver.h"
#include "cuda/images.h"

typedef struct gtco_device {
  int ordinal, users;
  CUdevice device;
  CUcontext context;
  char name[64];
  int major, minor, multiprocessors;
  gtco_kernels kernels;
  CUdeviceptr weights; /* uploaded once, when the first handle opens */
  struct gtco_device* next;
} gtco_device;

/* The device. Its first user makes it ready, its last user releases it. */
gtco_status gtco_device_acquire(int ordinal, gtco_device** device, char* message);
void gtco_device_release(gtco_device* device);

/* Makes the device's context current until gtco_device_leave, which gives the caller its own back. Until then the
 * calling thread's calls neither break captures of other threads nor are refused because of them
 * (CU_STREAM_CAPTURE_MODE_RELAXED): only the work that a run puts into a captured stream is meant to become part of a
 * graph. `before`: the thread's mode, for gtco_device_leave. */
gtco_status gtco_device_enter(const gtco_device* device, CUcapture_mode* before, char* message);
void gtco_device_leave(CUcapture_mode before);

/* Allocates device memory, or gives GTCO_ERROR_MEMORY with the free bytes. The device's context is current. `what` says
 * what the memory is for. */
gtco_status gtco_device_allocate(const gtco_device* device, size_t bytes, const char* what, CUdeviceptr* memory,
                                 char* message);

/* Copies bytes of the host, or zeros if `data` is NULL, to the device, whose context is current. The copy is over when
 * this returns. `what` names the bytes. */
gtco_status gtco_device_upload(const gtco_device* device, CUdeviceptr to, const void* data, size_t bytes, const char* what,
                               char* message);

/* 1 if this process was forked while a handle was open. The driver's state does not survive that, and gtco_forked says
 * so. */
int gtco_in_forked_child(void);
gtco_status gtco_forked(char* message);

#endif /* GTCO_CUDA_DEVICE_H */
