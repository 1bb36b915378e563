// One kernel for a whole model: its blocks, all alive at once, walk the table of steps.
//
//   for step:                                         // all blocks
//     for task = block, block + blocks, ...: kernels[step.kernel](task)
//     come to the barrier of all blocks
//     the next step's weights -> L2, its buffers -> shared memory   // while others are still at work
//     wait for them
#pragma once
#ifndef GTCO_PERSISTENT
#error "a kernel that walks the steps begins with #define GTCO_PERSISTENT"
#endif
#include "gtco/persistent_tables.cuh"

namespace gtco {

// A block keeps the addresses of the step's buffers ahead of the stages' shared memory, and behind
// them the step to come.
constexpr int STEP_WORDS = sizeof(Step) / sizeof(uint32_t);
static_assert(MOST_POINTERS * sizeof(Pointer) + sizeof(Step) <= GTCO_RESERVED, "they have room");
__device__ __forceinline__ Pointer* step_buffers() {
  GTCO_SHARED(shared);
  return reinterpret_cast<Pointer*>(shared - GTCO_RESERVED);
}

__device__ __forceinline__ Step* next_step() {
  return reinterpret_cast<Step*>(step_buffers() + MOST_POINTERS);
}

// The step's i-th buffer.
template <class T>
__device__ __forceinline__ T* buffer(int i) {
  return in_global(reinterpret_cast<T*>(step_buffers()[i]));
}

// A stage whose blocks have THREADS threads: run(block) for those of its blocks that are ours.
template <int THREADS, class Run>
__device__ __forceinline__ void each_block(int blocks, const Run& run) {
  const bool ours = int(threadIdx.x) < THREADS;
  if (!(THREADS % 32 == 0 ? whole_warp(ours) : ours)) return;
  for (int block = int(blockIdx.x); block < blocks; block += int(gridDim.x)) {
    run(block);
    copy_wait<0>();
    if constexpr (THREADS > 1) {  // the next one has the same shared memory
      if (block + int(gridDim.x) < blocks) rejoin<THREADS>();
    }
  }
}

// Each block its share.
__device__ __forceinline__ void prefetch_all(const unsigned char* weights, uint32_t bytes) {
  constexpr uint32_t LINE = 128;
  const uint32_t first = blockIdx.x * blockDim.x + threadIdx.x, all = gridDim.x * blockDim.x;
  for (uint32_t i = first; i < (bytes + LINE - 1) / LINE; i += all) prefetch(weights + i * LINE);
}

// kernels(kernel, blocks) does a step. All that is alive beside it is the step's number: what a stage
// does not get of the registers, it spills. So stages write each variable on every way to where it
// is read: one that only a condition writes has, for ptxas, its value from before the condition too,
// hence from before the stage, and keeps its register from the first step to the last.
template <class Kernels>
__device__ __forceinline__ void walk(const Step* steps, int count, const Pointer* pointers,
                                     const Tensors& tensors, Barrier* barrier,
                                     const Kernels& kernels) {
  for (int s = 0; s < count; ++s) {
    const int mine = int(threadIdx.x);
    const Step step = s > 0 ? *next_step() : steps[0];
    Pointer own = mine < step.num_refs ? pointers[step.first_ref + mine] : 0;
    const Pointer weights = s > 0 && step.prefetch_bytes ? pointers[step.prefetch_ref] : 0;
    const bool copies = s + 1 < count && mine < STEP_WORDS;
    const uint32_t word = copies ? reinterpret_cast<const uint32_t*>(steps + s + 1)[mine] : 0;
    uint32_t ticket = 0;
    if (s > 0) {
      sync_all();  // the block has done the step before, and read where its buffers are
      if (mine == 0) ticket = grid_arrive(&barrier->word);
    }
    if (own & 1) own = reinterpret_cast<Pointer>(tensors.at[own >> 1]);
    if (mine < step.num_refs) step_buffers()[mine] = own;
    if (s > 0) {
      prefetch_all(reinterpret_cast<const unsigned char*>(weights), step.prefetch_bytes);
      if (whole_warp(mine < 32)) grid_wait(&barrier->word, ticket);
    }
    if (copies) reinterpret_cast<uint32_t*>(next_step())[mine] = word;
    sync_all();  // its buffers are there, and what other blocks wrote
    kernels(step.kernel, step.tasks);
  }
}

}  // namespace gtco
