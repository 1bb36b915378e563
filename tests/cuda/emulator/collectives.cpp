// Operations of several threads: the last of a warp (or block) to arrive does the work for all.
#include <cstring>

#include "machine.h"

namespace gtco_emulator {

#define HERE place(__builtin_return_address(0))

unsigned char* shared_memory() { return machine->shared; }

// `all`: all threads of the block take part; otherwise the others do not.
static void barrier(int which, int threads, bool all, uint64_t pc) {
  Fibre& self = *machine->running;
  self.pc = pc, self.waits = BARRIER, self.barrier = which;
  if (threads > static_cast<int>(machine->job->threads) ||
      (all && threads != static_cast<int>(machine->job->threads)) || self.thread >= threads) {
    fault(self.pc, 0, "sync of %d threads in a block of %u", threads, machine->job->threads);
  }
  if (machine->arrived[which] && machine->expected[which] != threads) {
    fault(self.pc, 0, "divergent: sync of %d threads while others wait in one of %d", threads,
          machine->expected[which]);
  }
  machine->expected[which] = threads;
  if (machine->warp[self.warp].arrived) {
    fault(self.pc, 0, "divergent: comes to sync while others of its warp wait in %s",
          name_of(machine->warp[self.warp].kind));
  }
  Warp& warp = machine->warp[self.warp];
  if (!warp.in_barrier++) warp.pc = self.pc;
  meet_at(warp, self.pc);
  if (++machine->arrived[which] < threads) return suspend();
  machine->arrived[which] = 0;
  ++machine->epoch;
  if (all || machine->job->parameters) {  // a persistent kernel's others wait for the next step
    machine->full_epoch = machine->epoch;
  } else {
    machine->first_threads = static_cast<uint32_t>(threads);
  }
  meet_clocks(0, threads);
  ++machine->job->collectives;
  for (int w = 0; w * WARP < threads; ++w) {
    machine->warp[w].in_barrier = 0;
    flush_warp(w);
  }
  for (int t = 0; t < threads; ++t) make_ready(machine->fibre[t]);
  suspend();
}

void barrier(int which, int threads) {
  // the persistent kernel's stages may have fewer than all
  barrier(which, threads, !machine->job->parameters, HERE);
}

void barrier_of_first(int threads) {
  const uint64_t pc = HERE;
  const uint32_t before = machine->first_threads;
  if (before && before != static_cast<uint32_t>(threads) && machine->epoch > machine->full_epoch) {
    fault(pc, 0, "a barrier of the first %d threads behind one of the first %u", threads, before);
  }
  barrier(1, threads, false, pc);
}

bool meet(Collective kind, uint64_t pc, void* operands) {
  Fibre& self = *machine->running;
  Warp& warp = machine->warp[self.warp];
  self.pc = pc, self.waits = kind, self.operands = operands;
  if (warp.lanes != WARP) fault(pc, 0, "%s in a warp of %d threads", name_of(kind), warp.lanes);
  if (warp.in_barrier) {
    fault(pc, warp.pc, "divergent: comes to %s while others of its warp wait in sync",
          name_of(kind));
  }
  if (!warp.arrived) {
    warp.kind = kind, warp.pc = pc;
  } else if (warp.kind != kind) {
    fault(pc, 0, "divergent: comes to %s while others of its warp wait in %s", name_of(kind),
          name_of(warp.kind));
  }
  meet_at(warp, pc);
  if (++warp.arrived < WARP) {
    suspend();
    return false;
  }
  warp.arrived = 0;
  ++machine->job->collectives;
  return true;
}

static Fibre* lanes() { return &machine->fibre[machine->running->warp * WARP]; }

void release() {
  flush_warp(machine->running->warp);
  Fibre* of = lanes();
  for (int i = 0; i < WARP; ++i) make_ready(of[i]);
  suspend();
}

void warp_barrier() {
  if (!meet(WARP_BARRIER, HERE, nullptr)) return;
  const int warp = machine->running->warp;
  ++machine->warp[warp].epoch;
  meet_clocks(warp * WARP, (warp + 1) * WARP);
  release();
}

struct Shuffled {
  uint64_t given, taken;
  int operand;
};

uint64_t shuffle(Collective kind, uint64_t bits, int operand) {
  Shuffled mine{bits, 0, operand};
  const uint64_t pc = HERE;
  if (!meet(kind, pc, &mine)) return mine.taken;
  Fibre* of = lanes();
  auto at = [&](int i) { return static_cast<Shuffled*>(of[i].operands); };
  for (int i = 0; i < WARP; ++i) {
    const int by = at(i)->operand;
    int from = by;
    if (kind == SHUFFLE_XOR) from = i ^ by;
    if (kind == SHUFFLE_DOWN) from = i + by < WARP ? i + by : i;
    if (from < 0 || from >= WARP) fault(pc, 0, "%s of lane %d", name_of(kind), from);
    at(i)->taken = at(from)->given;
  }
  release();
  return mine.taken;
}

struct MatrixRow {
  uint32_t* into;
  int matrices;
  uint32_t at;
};

void ldmatrix(Collective kind, uint32_t* into, int matrices, const void* row) {
  const uint64_t pc = HERE;
  Fibre& self = *machine->running;
  MatrixRow mine{into, matrices, 0};
  if (self.lane < 8 * matrices) {
    mine.at = shared_offset(row, 16, pc, "ldmatrix");
    if (mine.at % 16) fault(pc, 0, "ldmatrix of a row at %u, not a multiple of 16", mine.at);
    read_shared(mine.at, 16, static_cast<uint32_t>(pc));
    note(MATRIX_READ, mine.at, 16, pc);
  }
  if (!meet(kind, pc, &mine)) return;
  Fibre* of = lanes();
  auto at = [&](int i) { return static_cast<MatrixRow*>(of[i].operands); };
  auto element = [&](int matrix, int row, int column) {
    uint16_t bits;
    memcpy(&bits, machine->shared + at(8 * matrix + row)->at + 2 * column, 2);
    return static_cast<uint32_t>(bits);
  };
  for (int j = 0; j < matrices; ++j) {
    for (int i = 0; i < WARP; ++i) {
      if (at(i)->matrices != matrices) fault(pc, 0, "divergent: ldmatrix x2 and x4 in one warp");
      const int row = i / 4, column = 2 * (i % 4);
      at(i)->into[j] = kind == LDMATRIX
                           ? element(j, row, column) | element(j, row, column + 1) << 16
                           : element(j, column, row) | element(j, column + 1, row) << 16;
    }
  }
  release();
}

struct Fragments {
  float* d;
  const uint32_t* a;
  const uint32_t* b;
};

// The layouts of PTX ISA, "Matrix Fragments for mma.m16n8k8" and "m16n8k16": with group = lane / 4
// and pair = lane % 4, a register holds two neighbours along k (of a and b) or n (of d).
void mma(Collective kind, float* d, const uint32_t* a, const uint32_t* b) {
  Fragments mine{d, a, b};
  if (!meet(kind, HERE, &mine)) return;
  Fibre* of = lanes();
  const int depth = kind == MMA_HALF_8 ? 8 : 16;
  const bool is_bf16 = kind == MMA_BF16_16;
  auto widen = [&](uint32_t bits) {
    const uint16_t narrow = static_cast<uint16_t>(bits);
    return is_bf16 ? gtco::to_float(bf16{narrow}) : gtco::to_float(half{narrow});
  };
  float left[16][16], right[16][8];
  for (int i = 0; i < WARP; ++i) {
    const Fragments& f = *static_cast<Fragments*>(of[i].operands);
    const int group = i / 4, pair = 2 * (i % 4);
    for (int r = 0; r < depth / 4; ++r) {  // rows +8 at odd registers, k +8 from the third on
      for (int h = 0; h < 2; ++h) {
        left[group + 8 * (r % 2)][pair + h + 8 * (r / 2)] = widen(f.a[r] >> (16 * h));
      }
    }
    for (int r = 0; r < depth / 8; ++r) {
      for (int h = 0; h < 2; ++h) right[pair + h + 8 * r][group] = widen(f.b[r] >> (16 * h));
    }
  }
  for (int i = 0; i < WARP; ++i) {
    const Fragments& f = *static_cast<Fragments*>(of[i].operands);
    for (int r = 0; r < 4; ++r) {
      const int m = i / 4 + 8 * (r / 2), n = 2 * (i % 4) + r % 2;
      float sum = f.d[r];
      for (int k = 0; k < depth; ++k) sum += left[m][k] * right[k][n];
      f.d[r] = sum;
    }
  }
  release();
}

void copy(void* shared, const void* global, int bytes, bool valid) {
  const uint64_t pc = HERE;
  const uint32_t at = shared_offset(shared, bytes, pc, "asynchronous copy");
  if (at % bytes) fault(pc, 0, "copy of %d bytes to shared memory at %u", bytes, at);
  if (valid) {
    if (reinterpret_cast<uintptr_t>(global) % bytes) {
      fault(pc, 0, "copy of %d bytes from %p, which is not aligned", bytes, global);
    }
    read_global(global, bytes, pc);
    note(GLOBAL_READ, reinterpret_cast<uint64_t>(global), bytes, pc);
  }
  copy_begins(at, bytes, static_cast<uint32_t>(pc));
  note(SHARED_WRITE, at, bytes, pc);
  Fibre& self = *machine->running;
  self.copies.push_back({at, static_cast<uint32_t>(bytes), valid ? global : nullptr, self.groups,
                         static_cast<uint32_t>(pc)});
}

void copy_commit() { ++machine->running->groups; }

void copy_wait(int groups) {
  Fibre& self = *machine->running;
  size_t kept = 0;
  for (const Copy& c : self.copies) {
    if (c.group + groups >= self.groups) {  // among the latest, or not committed
      self.copies[kept++] = c;
      continue;
    }
    copy_ends(c.at, c.bytes, c.pc);
    if (c.from) {
      memcpy(machine->shared + c.at, c.from, c.bytes);
    } else {
      memset(machine->shared + c.at, 0, c.bytes);
    }
  }
  self.copies.resize(kept);
}

void atomic_add(float* where, float value) {
  const uint64_t pc = HERE;
  write_global(where, 4, pc, true);
  *where += value;
}

}  // namespace gtco_emulator
