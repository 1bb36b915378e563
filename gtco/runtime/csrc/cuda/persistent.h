/* The model as one kernel, which goes through the steps on the device: its tables in device memory, and its launch. */
#ifndef GTCO_CUDA_PERSISTENT_H
#define GTCO_CUDA_PERSISTENT_H

#include "cuda/device.h"

#define GTCO_REASON_BYTES 128

/* Of one handle. */
typedef struct {
  unsigned blocks;                /* of its one launch; 0 if the model is launched as a graph */
  CUdeviceptr steps, pointers, barrier;
  gtco_device_tensors tensors;    /* addresses of inputs and outputs in the next run */
  char why[GTCO_REASON_BYTES];    /* why the graph is launched although the library has the kernel; else "" */
} gtco_persistent_state;

#define GTCO_BARRIER_BYTES 4 /* of the counter that all blocks use between two steps */

/* Bytes of device memory that a handle's tables take. */
size_t gtco_persistent_bytes(void);

/* Decides how a handle launches: `wanted` is a gtco_launches_option. GTCO_ERROR_ARGUMENT if the caller asks for the
 * kernel and there is none, or the device does not launch it. If only the compile chose it, `why` says what prevents
 * it. */
gtco_status gtco_persistent_choose(const gtco_device* device, int wanted, gtco_persistent_state* state, char* message);

/* Writes the tables to `memory`. `arguments` has the address of each ref, `tensors` the number of the tensor that it is,
 * -1 where its address is always the same. */
gtco_status gtco_persistent_upload(const gtco_device* device, CUdeviceptr memory, const CUdeviceptr* arguments,
                                   const int* tensors, gtco_persistent_state* state, char* message);

/* One run on the stream, with the tensors as they are in `state`. */
gtco_status gtco_persistent_launch(const gtco_device* device, const gtco_persistent_state* state, CUstream stream,
                                   char* message);

#endif /* GTCO_CUDA_PERSISTENT_H */
