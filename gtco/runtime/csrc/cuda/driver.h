/* The used part of the NVIDIA driver's interface. libcuda.so.1 is opened together with a model, so a machine without it
 * gets an error and not a failure of the loader. The declarations are our own, so no CUDA header is needed to build. */
#ifndef GTCO_CUDA_DRIVER_H
#define GTCO_CUDA_DRIVER_H

#include <stddef.h>
#include <stdint.h>

#include "gtco_api.h"

typedef int CUresult;
typedef int CUdevice;
typedef int CUcapture_mode;
typedef unsigned long long CUdeviceptr;
typedef struct CUctx_st* CUcontext;
typedef struct CUmod_st* CUmodule;
typedef struct CUfunc_st* CUfunction;
typedef struct CUstream_st* CUstream;
typedef struct CUevent_st* CUevent;
typedef struct CUgraph_st* CUgraph;
typedef struct CUgraphNode_st* CUgraphNode;
typedef struct CUgraphExec_st* CUgraphExec;

/* CUDA_KERNEL_NODE_PARAMS_v2 */
typedef struct {
  CUfunction function;
  unsigned grid[3], block[3];
  unsigned shared;
  void** params;
  void** extra;
  void* kernel;
  CUcontext context;
} gtco_node_params;

/* CUgraphEdgeData: where an edge leaves its first node and enters its second one, and how they depend */
typedef struct {
  unsigned char from_port, to_port, type, reserved[5];
} gtco_edge;

enum {
  CUDA_SUCCESS = 0,
  CUDA_ERROR_INVALID_VALUE = 1,
  CUDA_ERROR_OUT_OF_MEMORY = 2,
  CUDA_ERROR_NOT_INITIALIZED = 3,
  CUDA_ERROR_INVALID_IMAGE = 200,
  CUDA_ERROR_NO_BINARY_FOR_GPU = 209,
  CUDA_ERROR_INVALID_PTX = 218,
  CUDA_ERROR_JIT_COMPILER_NOT_FOUND = 221,
  CUDA_ERROR_UNSUPPORTED_PTX_VERSION = 222,
  CUDA_ERROR_JIT_COMPILATION_DISABLED = 223,

  CU_JIT_ERROR_LOG_BUFFER = 5,
  CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES = 6,
  CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16,
  CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH = 95,
  CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75,
  CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76,
  CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8,
  CU_POINTER_ATTRIBUTE_CONTEXT = 1,
  CU_POINTER_ATTRIBUTE_MEMORY_TYPE = 2,
  CU_POINTER_ATTRIBUTE_DEVICE_POINTER = 3,
  CU_POINTER_ATTRIBUTE_IS_MANAGED = 8,
  CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9,
  CU_MEMORYTYPE_DEVICE = 2,
  CU_EVENT_DEFAULT = 0,
  CU_EVENT_DISABLE_TIMING = 2,
  CU_STREAM_DEFAULT = 0,
  CU_STREAM_NON_BLOCKING = 1,
  CU_STREAM_CAPTURE_MODE_GLOBAL = 0,
  CU_STREAM_CAPTURE_MODE_RELAXED = 2,
  CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC = 1,
};

#define GTCO_PORT_PROGRAMMATIC 1 /* CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC, which is a macro too */
#define GTCO_OLDEST_CUDA 12030 /* the CUDA version of a driver that has all of these functions */

/* FUNCTION(name, name that the driver exports, parameters) */
#define GTCO_DRIVER_FUNCTIONS(FUNCTION)                                                                               \
  FUNCTION(cuInit, cuInit, (unsigned flags))                                                                          \
  FUNCTION(cuDriverGetVersion, cuDriverGetVersion, (int* version))                                                    \
  FUNCTION(cuGetErrorName, cuGetErrorName, (CUresult error, const char** name))                                       \
  FUNCTION(cuGetErrorString, cuGetErrorString, (CUresult error, const char** text))                                   \
  FUNCTION(cuDeviceGetCount, cuDeviceGetCount, (int* count))                                                          \
  FUNCTION(cuDeviceGet, cuDeviceGet, (CUdevice * device, int ordinal))                                                \
  FUNCTION(cuDeviceGetName, cuDeviceGetName, (char* name, int bytes, CUdevice device))                                \
  FUNCTION(cuDeviceGetAttribute, cuDeviceGetAttribute, (int* value, int attribute, CUdevice device))                  \
  FUNCTION(cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain, (CUcontext * context, CUdevice device))                \
  FUNCTION(cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2, (CUdevice device))                                \
  FUNCTION(cuCtxPushCurrent, cuCtxPushCurrent_v2, (CUcontext context))                                                \
  FUNCTION(cuCtxPopCurrent, cuCtxPopCurrent_v2, (CUcontext * context))                                                \
  FUNCTION(cuThreadExchangeStreamCaptureMode, cuThreadExchangeStreamCaptureMode, (CUcapture_mode * mode))              \
  FUNCTION(cuMemGetInfo, cuMemGetInfo_v2, (size_t * available, size_t * total))                                       \
  FUNCTION(cuMemAlloc, cuMemAlloc_v2, (CUdeviceptr * pointer, size_t bytes))                                          \
  FUNCTION(cuMemFree, cuMemFree_v2, (CUdeviceptr pointer))                                                            \
  FUNCTION(cuMemcpyHtoDAsync, cuMemcpyHtoDAsync_v2, (CUdeviceptr to, const void* from, size_t bytes, CUstream stream)) \
  FUNCTION(cuMemcpyDtoHAsync, cuMemcpyDtoHAsync_v2, (void* to, CUdeviceptr from, size_t bytes, CUstream stream))      \
  FUNCTION(cuMemcpyDtoDAsync, cuMemcpyDtoDAsync_v2, (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream)) \
  FUNCTION(cuMemsetD8Async, cuMemsetD8Async,                                                                          \
           (CUdeviceptr to, unsigned char value, size_t bytes, CUstream stream))                                      \
  FUNCTION(cuPointerGetAttributes, cuPointerGetAttributes,                                                            \
           (unsigned count, int* attributes, void** values, CUdeviceptr pointer))                                     \
  FUNCTION(cuModuleLoadDataEx, cuModuleLoadDataEx,                                                                    \
           (CUmodule * module, const void* image, unsigned count, int* options, void** values))                      \
  FUNCTION(cuModuleUnload, cuModuleUnload, (CUmodule module))                                                         \
  FUNCTION(cuModuleGetFunction, cuModuleGetFunction, (CUfunction * function, CUmodule module, const char* name))      \
  FUNCTION(cuFuncSetAttribute, cuFuncSetAttribute, (CUfunction function, int attribute, int value))                   \
  FUNCTION(cuStreamCreate, cuStreamCreate, (CUstream * stream, unsigned flags))                                       \
  FUNCTION(cuStreamDestroy, cuStreamDestroy_v2, (CUstream stream))                                                    \
  FUNCTION(cuStreamSynchronize, cuStreamSynchronize, (CUstream stream))                                               \
  FUNCTION(cuStreamGetCtx, cuStreamGetCtx, (CUstream stream, CUcontext * context))                                    \
  FUNCTION(cuStreamIsCapturing, cuStreamIsCapturing, (CUstream stream, int* status))                                  \
  FUNCTION(cuStreamWaitEvent, cuStreamWaitEvent, (CUstream stream, CUevent event, unsigned flags))                    \
  FUNCTION(cuEventCreate, cuEventCreate, (CUevent * event, unsigned flags))                                           \
  FUNCTION(cuEventDestroy, cuEventDestroy_v2, (CUevent event))                                                        \
  FUNCTION(cuEventRecord, cuEventRecord, (CUevent event, CUstream stream))                                            \
  FUNCTION(cuEventSynchronize, cuEventSynchronize, (CUevent event))                                                   \
  FUNCTION(cuEventElapsedTime, cuEventElapsedTime, (float* milliseconds, CUevent start, CUevent end))                 \
  FUNCTION(cuLaunchKernel, cuLaunchKernel,                                                                            \
           (CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,                 \
            unsigned block_y, unsigned block_z, unsigned shared, CUstream stream, void** params, void** extra))       \
  FUNCTION(cuLaunchHostFunc, cuLaunchHostFunc, (CUstream stream, void (*function)(void*), void* data))                \
  FUNCTION(cuOccupancyMaxActiveBlocksPerMultiprocessor, cuOccupancyMaxActiveBlocksPerMultiprocessor,                  \
           (int* blocks, CUfunction function, int threads, size_t shared))                                            \
  FUNCTION(cuLaunchCooperativeKernel, cuLaunchCooperativeKernel,                                                      \
           (CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,                 \
            unsigned block_y, unsigned block_z, unsigned shared, CUstream stream, void** params))                     \
  FUNCTION(cuGraphCreate, cuGraphCreate, (CUgraph * graph, unsigned flags))                                           \
  FUNCTION(cuGraphDestroy, cuGraphDestroy, (CUgraph graph))                                                           \
  FUNCTION(cuGraphAddKernelNode, cuGraphAddKernelNode_v2,                                                             \
           (CUgraphNode * node, CUgraph graph, const CUgraphNode* before, size_t count, const gtco_node_params* what)) \
  FUNCTION(cuGraphAddDependencies, cuGraphAddDependencies_v2,                                                         \
           (CUgraph graph, const CUgraphNode* from, const CUgraphNode* to, const gtco_edge* edges, size_t count))     \
  FUNCTION(cuGraphInstantiate, cuGraphInstantiateWithFlags,                                                           \
           (CUgraphExec * executable, CUgraph graph, unsigned long long flags))                                       \
  FUNCTION(cuGraphExecDestroy, cuGraphExecDestroy, (CUgraphExec executable))                                          \
  FUNCTION(cuGraphExecKernelNodeSetParams, cuGraphExecKernelNodeSetParams_v2,                                         \
           (CUgraphExec executable, CUgraphNode node, const gtco_node_params* what))                                  \
  FUNCTION(cuGraphLaunch, cuGraphLaunch, (CUgraphExec executable, CUstream stream))

typedef struct {
#define FUNCTION(name, exported, parameters) CUresult(*name) parameters;
  GTCO_DRIVER_FUNCTIONS(FUNCTION)
#undef FUNCTION
} gtco_driver;

/* Opens the driver and calls cuInit; only the first call does this. GTCO_ERROR_DRIVER if there is no driver or it lacks
 * a function, GTCO_ERROR_DEVICE if it cannot start, for example without a GPU. */
gtco_status gtco_driver_open(char* message);

/* The functions; to be called after gtco_driver_open has given GTCO_OK. */
const gtco_driver* gtco_cuda(void);

/* "WHAT WAS BEING DONE: CALL failed with CUDA_ERROR_... (text)". The status is GTCO_ERROR_MEMORY if the device's memory
 * is full, else GTCO_ERROR_DEVICE. */
gtco_status gtco_driver_fail(char* message, CUresult result, const char* call, const char* doing, ...)
    __attribute__((format(printf, 4, 5)));

/* Calls a function of the driver. If that fails, returns the error from the calling function. */
#define GTCO_CUDA_TRY(message, name, arguments, ...)                                             \
  do {                                                                                           \
    CUresult gtco_result = gtco_cuda()->name arguments;                                          \
    if (gtco_result != CUDA_SUCCESS) return gtco_driver_fail(message, gtco_result, #name, __VA_ARGS__); \
  } while (0)

/* The CUDA version that the driver serves, such as 13000; 0 if it is unknown. */
int gtco_driver_version(void);

#endif /* GTCO_CUDA_DRIVER_H */
