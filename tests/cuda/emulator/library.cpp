// Kernels of a whole model in one shared object, by symbol, for a driver without a GPU: such as
// which emulate.py makes of each kernel, with what it knows of its arguments. The memory of a
// persistent kernel is all memory that the fake driver has allocated.
#include <dlfcn.h>

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

static void failed(const char* name, const char* what, uint64_t pc, uint64_t other) {
  const size_t used = strlen(faults);
  snprintf(faults + used, sizeof faults - used, "%s: %s [%lx %lx]\n", name, what, pc, other);
}

static void run(const char* name, Job* job) {
  gtco_emulate(job);
  if (job->fault[0]) failed(name, job->fault, job->fault_pcs[0], job->fault_pcs[1]);
}

// The `bytes` of each of `count` arguments, and what the kernel may do with each (Access).
extern "C" void gtco_launch(const char* name, void* kernel, int count, const uint64_t* bytes,
                            const uint32_t* access, void** arguments, const unsigned* grid,
                            unsigned threads, unsigned shared) {
  static Job job;
  Buffer buffer[24];
  for (int i = 0; i < count; ++i) {
    buffer[i] = {static_cast<uint8_t*>(arguments[i]), bytes[i], access[i],
                 static_cast<uint32_t>(i)};
    if (access[i] != gtco_emulator::CONSTANT && access[i] != gtco_emulator::COUNTERS) {
      memset(buffer[i].data, 0xff, buffer[i].bytes);
    }
  }
  memset(&job, 0, sizeof job);
  job.kernel = kernel, job.threads = threads, job.shared = shared, job.buffer = buffer;
  job.buffers = static_cast<uint32_t>(count), job.seed = ++launches;
  memcpy(job.grid, grid, sizeof job.grid);
  run(name, &job);
}

extern "C" void gtco_launch_all(const char* name, void* kernel, void** parameters,
                                const unsigned* grid, unsigned threads, unsigned shared) {
  constexpr int MOST = 64;
  static Job job;
  static Buffer buffer[MOST];
  void* begin[MOST];
  size_t bytes[MOST];
  void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  typedef int Regions(void**, size_t*, int);
  const auto regions = driver ? reinterpret_cast<Regions*>(dlsym(driver, "fake_regions")) : nullptr;
  const int count = regions ? regions(begin, bytes, MOST) : MOST + 1;
  memset(&job, 0, sizeof job);
  job.kernel = kernel, job.parameters = parameters, job.threads = threads, job.shared = shared;
  job.seed = ++launches;
  memcpy(job.grid, grid, sizeof job.grid);
  for (int i = 0; i < count && count <= MOST; ++i) {
    buffer[i] = {static_cast<uint8_t*>(begin[i]), bytes[i], gtco_emulator::ANY,
                 static_cast<uint32_t>(i)};
  }
  job.buffer = buffer, job.buffers = static_cast<uint32_t>(count);
  if (count > MOST) {
    return failed(name, "the fake driver does not say which memory there is", 0, 0);
  }
  run(name, &job);
}
