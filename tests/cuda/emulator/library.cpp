// Kernels of a whole model in one shared object, by symbol, for a driver without a GPU: such as
//   void SYMBOL(void** arguments, const unsigned* grid, unsigned threads, unsigned shared)
// which emulate.py makes of each kernel, with what it knows of its arguments.
#include <cstdio>
#include <cstring>

#include "machine.h"

using gtco_emulator::Buffer;
using gtco_emulator::Job;

extern "C" void gtco_emulate(Job* job);

static char faults[1 << 16];
static uint32_t launches;

extern "C" __attribute__((visibility("default"))) const char* gtco_faults() { return faults; }
extern "C" __attribute__((visibility("default"))) uint32_t gtco_launches() { return launches; }

// `bytes` of each of `count` arguments, of which the last is the output.
extern "C" void gtco_launch(const char* name, void* kernel, int count, const uint64_t* bytes,
                            void** arguments, const unsigned* grid, unsigned threads,
                            unsigned shared) {
  static Job job;
  Buffer buffer[24];
  for (int i = 0; i < count; ++i) {
    buffer[i] = {static_cast<uint8_t*>(arguments[i]), bytes[i], i + 1 == count,
                 static_cast<uint32_t>(i)};
  }
  memset(&job, 0, sizeof job);
  job.kernel = kernel, job.threads = threads, job.shared = shared, job.buffer = buffer;
  job.buffers = static_cast<uint32_t>(count), job.seed = ++launches;
  memcpy(job.grid, grid, sizeof job.grid);
  memset(buffer[count - 1].data, 0xff, buffer[count - 1].bytes);
  gtco_emulate(&job);
  if (!job.fault[0]) return;
  const size_t used = strlen(faults);
  snprintf(faults + used, sizeof faults - used, "%s: %s [%lx %lx]\n", name, job.fault,
           job.fault_pcs[0], job.fault_pcs[1]);
}
