// Blocks that are alive at once, of a cooperative kernel: each runs until it waits for the others.
// The accesses of one block are checked against those of others by the barriers between them. A
// thread that comes to a barrier releases its own accesses, and those of its block before the block
// last met. A thread that leaves it acquires, for itself, and for its block once that has met
// again.
#include <cstdio>
#include <cstring>
#include <memory>

#include "machine.h"

#include "gtco/persistent_tables.cuh"

namespace gtco_emulator {

// The last write of a byte, and the last reads.
struct Did {
  uint32_t block, epoch, warp_epoch, pc;  // block + 1; 0: nobody
  uint32_t arrivals;                      // of that block until then
  uint16_t thread;
  bool others;  // also threads of other blocks, as late as this one
  uint32_t taken;  // tickets of that block until then
};
struct Byte {
  Did write, read;
};
constexpr uint64_t PAGE = 4096;
typedef std::unique_ptr<Byte[]> Page;

static std::vector<std::unique_ptr<Machine>> machines;
static std::vector<std::vector<Page>> pages;  // by buffer
static const Buffer* buffers;

static Byte& byte_of(const Buffer& buffer, uint64_t at) {
  Page& page = pages[&buffer - buffers][at / PAGE];
  if (!page) page = Page(new Byte[PAGE]());
  return page[at % PAGE];
}

// The first of the grid's barriers that released it; if none has yet, the number of barriers that
// there will be.
static size_t released(const Did& did) {
  const Machine& of = *machines[did.block - 1];
  const size_t next = did.arrivals;
  if (next >= of.arrivals.size()) return SIZE_MAX;
  return did.thread == 0 || did.epoch < of.arrivals[next] ? next : next + 1;
}

// The number of barriers whose releases the running thread knows.
static size_t known() {
  const auto& passages = machine->passages;
  const bool last = machine->running->thread == 0 || passages.empty() ||
                    machine->epoch > passages.back();
  return passages.size() - (last ? 0 : 1);
}

// True if the access comes before those of the running thread.
static bool before(const Did& did) {
  const Fibre& self = *machine->running;
  if (!did.block) return true;
  if (did.block - 1 != machine->block || did.others) {
    if (released(did) < known()) return true;
    return !did.others && told(did.block - 1, did.thread, did.epoch, did.taken);
  }
  return did.epoch != machine->epoch || did.thread == self.thread ||
         (did.thread / WARP == self.warp && did.warp_epoch != machine->warp[self.warp].epoch);
}

static void check(const Did& did, const char* what, const char* how, const Buffer& buffer,
                  uint64_t at, uint64_t pc) {
  if (before(did)) return;
  const bool same = did.block - 1 == machine->block && !did.others;
  fault(pc, did.pc, "race: %s byte %zu of memory %u that thread %u of block %u %s, no barrier %s",
        what, at, buffer.number, did.thread, did.block - 1, how,
        same ? "between" : "of all blocks between");
}

static Did done(uint64_t pc) {
  const Fibre& self = *machine->running;
  return {machine->block + 1,
          machine->epoch,
          machine->warp[self.warp].epoch,
          static_cast<uint32_t>(pc),
          static_cast<uint32_t>(machine->arrivals.size()),
          static_cast<uint16_t>(self.thread),
          false,
          tickets_taken()};
}

void read_grid(const Buffer& buffer, const void* p, uint32_t bytes, uint64_t pc) {
  if (buffer.writable == CONSTANT) return;
  const uint64_t first = static_cast<const uint8_t*>(p) - buffer.data;
  for (uint64_t at = first; at < first + bytes; ++at) {
    Byte& byte = byte_of(buffer, at);
    if (!byte.write.block && buffer.writable != ANY) {
      fault(pc, 0, "reads byte %zu of memory %u, which was never written", at, buffer.number);
    }
    check(byte.write, "reads", "wrote", buffer, at, pc);
    const Did now = done(pc);
    // If two blocks read, a write must come after the later one, and at best after both.
    const bool others = byte.read.block && byte.read.arrivals == now.arrivals &&
                        (byte.read.others || byte.read.block != now.block);
    byte.read = now;
    byte.read.others = others;
  }
}

void write_grid(const Buffer& buffer, const void* p, uint32_t bytes, uint64_t pc) {
  if (buffer.writable == CONSTANT || buffer.writable == COUNTERS) {
    fault(pc, 0, "writes to memory %u, which is constant", buffer.number);
  }
  const uint64_t first = static_cast<const uint8_t*>(p) - buffer.data;
  for (uint64_t at = first; at < first + bytes; ++at) {
    Byte& byte = byte_of(buffer, at);
    check(byte.write, "writes", "wrote", buffer, at, pc);
    check(byte.read, "writes", "read", buffer, at, pc);
    byte = {done(pc), {}};
  }
}

#define HERE place(__builtin_return_address(0))

static void of_grid(const void* word, uint64_t pc, const char* what) {
  machine->running->pc = pc;
  if (machine->running->thread != 0) fault(pc, 0, "%s is for a block's first thread", what);
  buffer_of(word, 4, pc, what);
}

uint32_t grid_arrive(const void* word) {
  of_grid(word, HERE, "coming to the barrier of all blocks");
  machine->arrivals.push_back(machine->epoch);
  return static_cast<uint32_t>(machine->arrivals.size());
}

void grid_wait(const void* word, uint32_t ticket) {
  of_grid(word, HERE, "waiting for all blocks");
  if (ticket != machine->arrivals.size() || ticket != machine->passages.size() + 1) {
    fault(HERE, 0, "waits for barrier %u, having come to %zu", ticket, machine->arrivals.size());
  }
  machine->running->waits = GRID_BARRIER;
  suspend();
  machine->passages.push_back(machine->epoch);
}

void prefetch(const void* global) { buffer_of(global, 1, HERE, "prefetches"); }

void call_cooperative() {
  typedef void Kernel(const gtco::Step*, int, const gtco::Pointer*, gtco::Tensors, gtco::Barrier*);
  void** p = machine->job->parameters;
  reinterpret_cast<Kernel*>(machine->job->kernel)(
      *static_cast<const gtco::Step**>(p[0]), *static_cast<int*>(p[1]),
      *static_cast<const gtco::Pointer**>(p[2]), *static_cast<gtco::Tensors*>(p[3]),
      *static_cast<gtco::Barrier**>(p[4]));
}

// All of each output is written.
static void end_grid(Job* job) {
  for (uint32_t i = 0; i < job->buffers; ++i) {
    const Buffer& buffer = job->buffer[i];
    for (uint64_t at = 0; buffer.writable == OUTPUT && at < buffer.bytes; ++at) {
      if (byte_of(buffer, at).write.block) continue;
      snprintf(job->fault, sizeof job->fault, "byte %lu of %lu of memory %u was not written", at,
               buffer.bytes, buffer.number);
      return;
    }
  }
}

void run_grid(Job* job) {
  const uint32_t blocks = job->grid[0];
  Machine* const before = machine;
  buffers = job->buffer;
  pages.clear(), pages.resize(job->buffers);
  for (uint32_t i = 0; i < job->buffers; ++i) pages[i].resize(job->buffer[i].bytes / PAGE + 1);
  while (machines.size() < blocks) machines.push_back(std::make_unique<Machine>());
  for (uint32_t b = 0; b < blocks; ++b) {
    machine = machines[b].get();
    machine->random = 0x9e3779b97f4a7c15ull * (job->seed + b + 1ull);
    if (!begin_machine(job)) break;
    if (!b) begin_memory();
    if (!b) begin_figures();
    begin_block(b);
  }
  uint32_t ended = 0;
  const auto has_ended = [&](uint32_t b) {
    return machines[b]->finished == static_cast<int>(job->threads);
  };
  std::vector<uint32_t> able(blocks);
  for (uint32_t b = 0; b < blocks; ++b) able[b] = b;
  while (!able.empty() && !job->fault[0]) {
    while (!able.empty() && !job->fault[0]) {
      const size_t i = job->seed ? draw(static_cast<uint32_t>(able.size())) : 0;
      machine = machines[able[i]].get();
      able.erase(able.begin() + static_cast<long>(i));
      run_block();
    }
    ended = 0;
    for (uint32_t b = 0; b < blocks; ++b) ended += has_ended(b);
    if (job->fault[0] || ended == blocks) break;
    for (uint32_t b = 0; b < blocks; ++b) {  // a block that has not ended waits for all the others
      machine = machines[b].get();
      machine->running = &machine->fibre[0];
      if (has_ended(b) || machine->arrivals.size() != machines[0]->arrivals.size()) {
        snprintf(job->fault, sizeof job->fault,
                 "divergent: block %u has come to %zu barriers of all blocks, block 0 to %zu", b,
                 machine->arrivals.size(), machines[0]->arrivals.size());
        break;
      }
      make_ready(machine->fibre[0]);
      able.push_back(b);
    }
  }
  if (!job->fault[0]) end_grid(job);
  end_figures();
  machine = before;
}

}  // namespace gtco_emulator
