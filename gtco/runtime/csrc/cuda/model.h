/* A handle of a model for GPUs: its memory, its stream, and what a run needs. cuda/open.c makes it, cuda/api.c runs it. */
#ifndef GTCO_CUDA_MODEL_H
#define GTCO_CUDA_MODEL_H

#include <stdatomic.h>

#include "cuda/device.h"
#include "cuda/graph.h"
#include "cuda/persistent.h"
#include "error.h"
#include "sizes.h"

#define GTCO_MODE_BYTES (64 + GTCO_REASON_BYTES)

typedef enum { NOWHERE, ON_HOST, ON_DEVICE } gtco_place;

struct gtco_model {
  gtco_device* device;
  CUdeviceptr memory;    /* arena | staging of every input and output | tables of the persistent kernel */
  CUdeviceptr* staging;  /* place of a tensor of the host, or of one that is not aligned, in a run; inputs first */
  gtco_place* places;    /* of this run's pointers, inputs first */
  const void** pointers; /* of this part of a run, inputs first: the caller's tensors, at the part's samples */
  int* in_place;         /* which of these the kernels use */
  int* patches;          /* a ref's tensor, -1 where its pointer is always the same */
  CUstream stream;       /* of gtco_run and gtco_profile */
  CUevent finished;      /* behind the last run */
  int under_way;         /* 1 if a run on a caller's stream may still be under way */
  int captured;          /* 1 if a run has become part of a caller's graph */
  gtco_sizes sizes;      /* of the next run */
  gtco_launches launches;
  gtco_persistent_state persistent;
  char mode[GTCO_MODE_BYTES]; /* in words */
  _Atomic int busy;
  char error[GTCO_MESSAGE_BYTES];
};

/* The blocks' counters, which are zero between two runs. */
size_t gtco_counter_bytes(void);
CUdeviceptr gtco_counters(const gtco_model* model);

#endif /* GTCO_CUDA_MODEL_H */
