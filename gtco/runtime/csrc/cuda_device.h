/* What all handles of this model on one device share: the primary context, the loaded kernels, the weights. */
#ifndef GTCO_CUDA_DEVICE_H
#define GTCO_CUDA_DEVICE_H

#include "cuda_driver.h"
#include "cuda_images.h"

typedef struct gtco_device {
  int ordinal, users;
  CUdevice device;
  CUcontext context;
  char name[64];
  int major, minor;
  gtco_kernels kernels;
  CUdeviceptr weights; /* uploaded once, when the first handle opens */
  struct gtco_device* next;
} gtco_device;

/* The device, made ready by its first user; released by its last. */
gtco_status gtco_device_acquire(int ordinal, gtco_device** device, char* message);
void gtco_device_release(gtco_device* device);

/* Makes the device's context current until gtco_device_leave, which gives the caller its own back. */
gtco_status gtco_device_enter(const gtco_device* device, char* message);
void gtco_device_leave(void);

/* Device memory, or GTCO_ERROR_MEMORY with what is free; the device's context is current. `what`: it is for. */
gtco_status gtco_device_allocate(const gtco_device* device, size_t bytes, const char* what, CUdeviceptr* memory,
                                 char* message);

/* Was this process forked while a handle was open? The driver's state does not survive that, and gtco_forked says so. */
int gtco_in_forked_child(void);
gtco_status gtco_forked(char* message);

#endif /* GTCO_CUDA_DEVICE_H */
