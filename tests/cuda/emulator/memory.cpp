// Every access of a kernel: the compiler puts a call before each (-fsanitize=thread), and these are
// the functions that it calls. They check bounds, alignment, reads of bytes that were not written,
// and races: two threads access the same byte, at least one writes, and no barrier is between.
#include <cstdio>
#include <cstring>

#include "machine.h"

extern "C" {
extern char __ehdr_start __attribute__((visibility("hidden")));
extern char _end __attribute__((visibility("hidden")));
}

namespace gtco_emulator {

enum State : uint8_t { UNWRITTEN, WRITTEN, IN_FLIGHT, OF_BARRIER };

struct OutShadow {  // of one byte of the output
  uint32_t block, epoch, warp_epoch, pc;  // block + 1; 0: not written
  uint16_t thread;
  bool atomic;
  uint32_t taken;  // tickets of the block until then
};

static std::vector<std::vector<OutShadow>> out_shadows;  // by argument
static uintptr_t module_begin, module_size;

void begin_memory() {
  module_begin = reinterpret_cast<uintptr_t>(&__ehdr_start);
  module_size = static_cast<size_t>(&_end - &__ehdr_start);
  out_shadows.clear(), out_shadows.resize(machine->job->buffers);
  for (uint32_t i = 0; i < machine->job->buffers; ++i) {
    const Buffer& buffer = machine->job->buffer[i];
    if (buffer.writable != CONSTANT && buffer.writable != COUNTERS) {
      out_shadows[i].resize(buffer.bytes);
    }
  }
  begin_tickets();
}

void begin_block_memory() {
  memset(machine->state.data(), UNWRITTEN, machine->job->shared);
  memset(machine->shared, 0xff, machine->job->shared);
  machine->products.clear();
  machine->readers.resize(machine->job->shared / 16 + 1);
  for (auto& of : machine->readers) of.clear();
}

static void end_counters(const Buffer& buffer) {
  for (uint64_t i = 0; i < buffer.bytes; ++i) {
    if (!buffer.data[i]) continue;
    snprintf(machine->job->fault, sizeof machine->job->fault,
             "counter %zu is not zero behind the run", static_cast<size_t>(i / 4));
  }
}

static void end_output(const std::vector<OutShadow>& out_shadow) {
  size_t missing = 0, first = 0;
  for (size_t i = 0; i < out_shadow.size(); ++i) {
    if (!out_shadow[i].block && !missing++) first = i;
  }
  if (missing) {
    snprintf(machine->job->fault, sizeof machine->job->fault,
             "%zu of %zu bytes of the output were not written, the first at %zu", missing,
             out_shadow.size(), first);
  }
}

void end_memory() {
  for (uint32_t i = 0; i < machine->job->buffers; ++i) {
    const Buffer& buffer = machine->job->buffer[i];
    if (buffer.writable == OUTPUT) end_output(out_shadows[i]);
    if (buffer.writable == COUNTERS) end_counters(buffer);
  }
}

// ---- shared memory

uint32_t shared_offset(const void* p, uint32_t bytes, uint64_t pc, const char* what) {
  const intptr_t at = static_cast<const uint8_t*>(p) - machine->shared;
  const intptr_t most = SHARED_MOST;
  if (at < -most || at >= most) fault(pc, 0, "%s of %p, which is not in shared memory", what, p);
  if (at < 0 || at + bytes > machine->job->shared) {
    fault(pc, 0, "out of bounds: %s of %u bytes at %zd of %u bytes of shared memory", what, bytes,
          at, machine->job->shared);
  }
  return static_cast<uint32_t>(at);
}

static const char* race = "race: %s byte %u of shared memory that thread %u %s, no barrier between";

void check_writer(const Fibre& by, uint32_t at, uint32_t pc, const char* what) {
  const Shadow& s = machine->shadow[at];
  if (before(by, s.writer, {s.write_epoch, s.write_tick})) return;
  if (s.writer / WARP == by.warp && s.write_warp_epoch != machine->warp[by.warp].epoch) return;
  fault(pc, s.write_pc, race, what, at, s.writer, "wrote");
}

static void check_written(uint32_t at, uint32_t pc) {
  const Shadow& s = machine->shadow[at];
  switch (machine->state[at]) {
    case WRITTEN:
      return;
    case IN_FLIGHT:
      fault(pc, s.write_pc, "reads byte %u of shared memory, a copy of thread %u to which has not "
            "been waited for", at, s.writer);
    case OF_BARRIER:
      fault(pc, s.write_pc, "reads byte %u of shared memory, which is an mbarrier's", at);
    default:
      fault(pc, 0, "reads byte %u of shared memory, which was never written", at);
  }
}

// True if a fence_proxy of the writing thread comes between its write and the products of `by`.
static bool seen_by_products(const Fibre& by, const Shadow& s) {
  const std::vector<Time>& fences = machine->fibre[s.writer].fences;
  return s.write_fences < fences.size() && before(by, s.writer, fences[s.write_fences]);
}

void read_by_product(uint32_t at, uint32_t pc, int first) {
  const Shadow* last = nullptr;
  for (uint32_t i = at; i < at + 16; ++i) {
    const Shadow& s = machine->shadow[i];
    check_written(i, pc);
    const bool alike = last && s.writer == last->writer && s.write_epoch == last->write_epoch &&
                       s.write_tick == last->write_tick && s.write_fences == last->write_fences &&
                       s.write_warp_epoch == last->write_warp_epoch;
    last = &s;
    if (alike) continue;
    // barriers are the same for all threads, so the first and the last represent them
    for (int t = 0; t < GROUP_WARPS * WARP; t += machine->clocked ? 1 : GROUP_WARPS * WARP - 1) {
      const Fibre& by = machine->fibre[first + t];
      check_writer(by, i, pc, "reads");
      if (!seen_by_products(by, s)) {
        fault(pc, s.write_pc, "a product reads byte %u of shared memory that thread %u wrote, "
              "with no fence_proxy between that and the barrier", i, s.writer);
      }
    }
  }
}

// The products that read these 16 bytes are done for all that wrote nothing since.
static void check_products(uint32_t piece, uint32_t at, uint32_t pc) {
  const Fibre& self = *machine->running;
  for (uint32_t number : machine->readers[piece]) {
    const Product& product = machine->products[number];
    for (int w = 0; w < GROUP_WARPS; ++w) {  // warps wait as one: any lane's word counts
      bool waited = false, known = false;
      for (int l = w * WARP; l < (w + 1) * WARP && !known; ++l) {
        if (!product.waited[l].tick) continue;
        waited = true;
        known = before(self, static_cast<uint32_t>(product.first + l), product.waited[l]);
      }
      if (!waited) {
        fault(pc, product.pc, "writes byte %u of shared memory, which a product that has not been "
              "waited for reads", at);
      }
      if (!known) {
        fault(pc, product.pc, "race: writes byte %u of shared memory, which a product of warp %d "
              "read, no barrier between", at, product.first / WARP + w);
      }
    }
  }
  machine->readers[piece].clear();
}

void read_shared(uint32_t at, uint32_t bytes, uint32_t pc) {
  const Fibre& self = *machine->running;
  const uint32_t warp_epoch = machine->warp[self.warp].epoch;
  for (uint32_t i = at; i < at + bytes; ++i) {
    Shadow& s = machine->shadow[i];
    check_written(i, pc);
    check_writer(self, i, pc, "reads");
    if (machine->clocked) {
      note_reading(i, pc);
    } else if (s.read_epoch != machine->epoch) {
      s.read_epoch = machine->epoch, s.read_warp_epoch = warp_epoch, s.read_pc = pc;
      s.reader = static_cast<uint16_t>(self.thread);
      s.read_by_lanes = s.read_by_warps = false;
    } else if (s.reader / WARP != self.warp) {
      s.read_by_warps = true;
    } else if (s.read_warp_epoch != warp_epoch) {
      s.read_warp_epoch = warp_epoch, s.read_pc = pc, s.read_by_lanes = false;
      s.reader = static_cast<uint16_t>(self.thread);
    } else if (s.reader != self.thread) {
      s.read_by_lanes = true;
    }
  }
}

static void write(uint32_t at, uint32_t bytes, uint32_t pc, State now) {
  const Fibre& self = *machine->running;
  const uint32_t warp_epoch = machine->warp[self.warp].epoch;
  for (uint32_t i = at; i < at + bytes; ++i) {
    Shadow& s = machine->shadow[i];
    if (machine->state[i] == IN_FLIGHT) {
      fault(pc, s.write_pc, "writes byte %u of shared memory, to which a copy of thread %u is under "
            "way", i, s.writer);
    }
    if (machine->state[i] == OF_BARRIER) {
      fault(pc, s.write_pc, "writes byte %u of shared memory, which is an mbarrier's", i);
    }
    check_writer(self, i, pc, "writes");
    check_products(i / 16, i, pc);
    if (machine->clocked) check_readings(i, pc);
    if (s.read_epoch == machine->epoch) {
      const bool same_warp = s.reader / WARP == self.warp;
      const bool same_time = s.read_warp_epoch == warp_epoch;
      if (s.read_by_warps || !same_warp ||
          (same_time && (s.read_by_lanes || s.reader != self.thread))) {
        fault(pc, s.read_pc, race, "writes", i, s.reader, s.read_by_warps || s.read_by_lanes
              ? "and others read" : "read");
      }
    }
    s.write_epoch = machine->epoch, s.write_warp_epoch = warp_epoch, s.write_pc = pc;
    s.writer = static_cast<uint16_t>(self.thread);
    s.write_tick = self.tick, s.write_fences = static_cast<uint32_t>(self.fences.size());
    machine->state[i] = now;
  }
}

void write_shared(uint32_t at, uint32_t bytes, uint32_t pc) { write(at, bytes, pc, WRITTEN); }

void make_barrier(uint32_t at, uint32_t bytes, uint32_t pc) { write(at, bytes, pc, OF_BARRIER); }

void copy_begins(uint32_t at, uint32_t bytes, uint32_t pc) {
  write(at, bytes, pc, IN_FLIGHT);
  memset(machine->shared + at, 0xff, bytes);
}

void copy_ends(uint32_t at, uint32_t bytes, uint32_t pc) {
  memset(machine->state.data() + at, WRITTEN, bytes);
  write(at, bytes, pc, WRITTEN);
}

// ---- global memory

const Buffer& buffer_of(const void* p, uint32_t bytes, uint64_t pc, const char* what) {
  static const Buffer* last = nullptr;
  const uint8_t* const address = static_cast<const uint8_t*>(p);
  const Job& job = *machine->job;
  auto inside = [&](const Buffer& b) {
    return address >= b.data && address + bytes <= b.data + b.bytes;
  };
  if (last >= job.buffer && last < job.buffer + job.buffers && inside(*last)) return *last;
  const Buffer* nearest = nullptr;
  intptr_t least = 0;
  for (uint32_t i = 0; i < job.buffers; ++i) {
    const Buffer& b = job.buffer[i];
    if (inside(b)) return *(last = &b);
    const intptr_t before = b.data - address, behind = address + bytes - (b.data + b.bytes);
    const intptr_t far = before > behind ? before : behind;
    if (!nearest || far < least) nearest = &b, least = far;
  }
  if (!nearest || least > (1 << 28)) fault(pc, 0, "out of bounds: %s %p, no memory of its", what, p);
  fault(pc, 0, "out of bounds: %s %u bytes at %zd of %s%u, which has %zu", what, bytes,
        address - nearest->data, nearest->writable ? "the output, argument " : "argument ",
        nearest->number, static_cast<size_t>(nearest->bytes));
}

static void check_out(const Buffer& b, const void* p, uint32_t bytes, uint64_t pc, bool writes,
                      bool atomic) {
  const Fibre& self = *machine->running;
  const uint32_t warp_epoch = machine->warp[self.warp].epoch;
  const size_t at = static_cast<const uint8_t*>(p) - b.data;
  const char* const what = b.writable == OUTPUT ? "the output" : "the scratch";
  auto& out_shadow = out_shadows[&b - machine->job->buffer];
  for (size_t i = at; i < at + bytes; ++i) {
    OutShadow& s = out_shadow[i];
    if (!s.block && (!writes || atomic) && b.writable != ANY) {
      fault(pc, 0, "reads byte %zu of %s, which was never written", i, what);
    }
    if (s.block && !(atomic && s.atomic)) {
      const bool other = s.block != machine->block + 1;
      if (other && !told(s.block - 1, s.thread, s.epoch, s.taken)) {
        fault(pc, s.pc, "race: %s byte %zu of %s that block %u wrote", writes ? "writes" : "reads",
              i, what, s.block - 1);
      }
      const bool ordered = other || s.epoch != machine->epoch || s.thread == self.thread ||
                           (s.thread / WARP == self.warp && s.warp_epoch != warp_epoch);
      if (!ordered) {
        fault(pc, s.pc, "race: %s byte %zu of %s that thread %u wrote, no barrier between",
              writes ? "writes" : "reads", i, what, s.thread);
      }
    }
    if (writes) {
      s = {machine->block + 1, machine->epoch, warp_epoch, static_cast<uint32_t>(pc),
           static_cast<uint16_t>(self.thread), atomic, tickets_taken()};
    }
  }
}

void read_global(const void* p, uint32_t bytes, uint64_t pc) {
  const Buffer& b = buffer_of(p, bytes, pc, "reads");
  if (machine->job->parameters) return read_grid(b, p, bytes, pc);
  if (b.writable == COUNTERS) fault(pc, 0, "reads a counter, which is for tickets");
  if (b.writable) check_out(b, p, bytes, pc, false, false);
}

void write_global(void* p, uint32_t bytes, uint64_t pc, bool atomic) {
  const Buffer& b = buffer_of(p, bytes, pc, "writes");
  if (machine->job->parameters) return write_grid(b, p, bytes, pc);
  if (!b.writable) fault(pc, 0, "writes to argument %u, which is an input", b.number);
  if (b.writable == COUNTERS) fault(pc, 0, "writes to a counter, which is for tickets");
  check_out(b, p, bytes, pc, true, atomic);
}

// ---- functions that the compiler calls

static void access(void* p, uint32_t bytes, const void* from, bool writes, bool aligned) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(p);
  const uintptr_t in_stacks = address - reinterpret_cast<uintptr_t>(machine->stacks);
  if (in_stacks < STACK * THREADS_MOST) {
    if (in_stacks / STACK == static_cast<size_t>(machine->running->thread)) return;
    fault(place(from), 0, "%s a local variable of thread %zu", writes ? "writes" : "reads",
          in_stacks / STACK);
  }
  if (address - module_begin < module_size) return;  // constants, and the thread's position
  const uint64_t pc = place(from);
  if (aligned && address % bytes) {
    fault(pc, 0, "%s of %u bytes at %p, which is not aligned", writes ? "write" : "read", bytes, p);
  }
  if (in_stacks < STACK * THREADS_MOST + 2 * SHARED_MOST) {
    const uint32_t at = shared_offset(p, bytes, pc, writes ? "write" : "read");
    if (writes) {
      write_shared(at, bytes, static_cast<uint32_t>(pc));
    } else {
      read_shared(at, bytes, static_cast<uint32_t>(pc));
    }
    note(writes ? SHARED_WRITE : SHARED_READ, at, bytes, pc);
    return;
  }
  if (writes) {
    write_global(p, bytes, pc, false);
  } else {
    read_global(p, bytes, pc);
  }
  note(writes ? GLOBAL_WRITE : GLOBAL_READ, address, bytes, pc);
}

}  // namespace gtco_emulator

using gtco_emulator::access;
#define FROM __builtin_return_address(0)
#define HOOKS(bytes)                                                                         \
  void __tsan_read##bytes(void* p) { access(p, bytes, FROM, false, true); }                  \
  void __tsan_write##bytes(void* p) { access(p, bytes, FROM, true, true); }                  \
  void __tsan_unaligned_read##bytes(void* p) { access(p, bytes, FROM, false, false); }       \
  void __tsan_unaligned_write##bytes(void* p) { access(p, bytes, FROM, true, false); }       \
  void __tsan_volatile_read##bytes(void* p) { access(p, bytes, FROM, false, true); }         \
  void __tsan_volatile_write##bytes(void* p) { access(p, bytes, FROM, true, true); }

extern "C" {
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_read_range(void* p, size_t n) { access(p, n, FROM, false, false); }
void __tsan_write_range(void* p, size_t n) { access(p, n, FROM, true, false); }

// emulated_objects.py makes kernels call these in place of memcpy and the like.
void* gtco_memcpy(void* to, const void* from, size_t n) {
  access(const_cast<void*>(from), n, FROM, false, false);
  access(to, n, FROM, true, false);
  return memcpy(to, from, n);
}
void* gtco_memmove(void* to, const void* from, size_t n) {
  access(const_cast<void*>(from), n, FROM, false, false);
  access(to, n, FROM, true, false);
  return memmove(to, from, n);
}
void* gtco_memset(void* to, int value, size_t n) {
  access(to, n, FROM, true, false);
  return memset(to, value, n);
}
}
