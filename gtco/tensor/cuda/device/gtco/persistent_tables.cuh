// What the runtime tells the persistent kernel: the tables that it walks. csrc/cuda/plan.h has the
// same types for C; a test holds them against each other.
#pragma once
#include "gtco/device.cuh"

namespace gtco {

constexpr int MOST_TENSORS = 64;   // inputs and outputs of a model
constexpr int MOST_POINTERS = 24;  // buffers of a step

// One step: tasks [0, tasks) of a kernel on the buffers pointers[first_ref + i].
struct Step {
  int32_t kernel;  // its number in the persistent kernel
  int32_t tasks;   // blocks of its own launch
  int32_t first_ref, num_refs;
  uint32_t prefetch_ref, prefetch_bytes;  // weights of this step, which the step before it fetches
};

// Where the model's inputs lie in this run, and then its outputs.
struct Tensors {
  void* at[MOST_TENSORS];
};

// A buffer: its address, a multiple of 16; or, where the lowest bit is set, 2 * i + 1 for the i-th
// of the tensors.
using Pointer = uint64_t;

// Of one handle, zero before its first run; each run leaves it as the next one needs it.
struct Barrier {
  uint32_t word;
};

}  // namespace gtco
