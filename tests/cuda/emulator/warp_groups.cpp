// Products of warp groups (wgmma.cuh). They are computed when the group's last thread comes to
// them. Until a thread waits for them, their sums stay with the machine and NaNs take their places;
// until then no thread may write the shared memory that they read.
#include <cstring>

#include "machine.h"

namespace gtco_emulator {

#define HERE place(__builtin_return_address(0))

constexpr int ROWS = 64, DEPTH = 16;
constexpr uint32_t WINDOW = 1024;  // where a Hopper's dynamic shared memory begins
constexpr uint32_t POISON = 0xffbadbad;

uint32_t shared_address(const void* pointer) {
  return WINDOW + shared_offset(pointer, 0, HERE, "address");
}

// Products after a barrier see the writes that a thread made before this and before the barrier.
void fence_proxy() { machine->running->fences.push_back(now()); }

void wgmma_fence() {
  if (meet(WGMMA_FENCE, HERE, nullptr)) release();
  machine->running->fenced = true;
}

void wgmma_commit() {
  if (meet(WGMMA_COMMIT, HERE, nullptr)) release();
  ++machine->running->product_groups;
}

static bool poisoned(const Sums& sums) {
  for (size_t i = 0; i < sums.values.size(); ++i) {
    uint32_t bits;
    memcpy(&bits, sums.d + i, 4);
    if (bits != POISON) return false;
  }
  return true;
}

static void check_untouched(const Sums& sums, uint64_t pc) {
  if (!poisoned(sums)) {
    fault(pc, sums.pc, "sums of a product that has not been waited for were written");
  }
}

void wgmma_wait(int groups) {
  const uint64_t pc = HERE;
  if (meet(WGMMA_WAIT, pc, nullptr)) release();
  Fibre& self = *machine->running;
  self.fenced = false;
  size_t kept = 0;
  for (const Pending& p : self.products) {
    if (p.group + groups >= self.product_groups) {  // among the latest, or not committed
      self.products[kept++] = p;
      continue;
    }
    Product& product = machine->products[p.product];
    product.waited[self.thread - product.first] = now();
  }
  self.products.resize(kept);
  size_t left = 0;
  for (Sums& sums : self.sums) {
    bool under_way = false;
    for (const Pending& p : self.products) under_way |= p.d == sums.d;
    check_untouched(sums, pc);
    if (under_way) {
      if (&self.sums[left] != &sums) self.sums[left] = std::move(sums);
      ++left;
    } else {
      memcpy(sums.d, sums.values.data(), 4 * sums.values.size());
    }
  }
  self.sums.resize(left);
}

struct Given {
  int columns;
  float* d;
  uint64_t a, b;  // descriptors
};

// The places of an operand's 16-bit elements by the manual's descriptor: rows of 128 bytes,
// eight of them together, with pieces of 16 bytes exchanged by XOR with three bits of the address.
struct Described {
  uint32_t start, stride;

  Described(uint64_t bits, uint64_t pc, const char* operand) {
    start = (bits & 0x3fff) << 4, stride = (bits >> 32 & 0x3fff) << 4;
    const uint64_t reserved = 0x3ff1c000c000c000ull;
    if (bits & reserved) fault(pc, 0, "descriptor of %s has reserved bits: %016lx", operand, bits);
    if (bits >> 62 != 1) fault(pc, 0, "descriptor of %s: mode %d is not emulated", operand,
                               static_cast<int>(bits >> 62));
    if (bits >> 49 & 7) fault(pc, 0, "descriptor of %s: base offsets are not emulated", operand);
    if (start % 128 > 128 - 2 * DEPTH) {
      fault(pc, 0, "descriptor of %s: 16 steps from byte %u of a row on", operand, start % 128);
    }
  }
  uint32_t address(int row, int k) const {
    const uint32_t at = start + row / 8 * stride + row % 8 * 128 + 2 * k;
    return at ^ (at >> 7 & 7) << 4;
  }
};

// Reads an operand's rows, and notes that they must not change.
static void read(const Described& from, int rows, bool is_bf16, float (*into)[DEPTH],
                 uint32_t product, uint64_t pc, const char* operand) {
  for (int row = 0; row < rows; ++row) {
    for (int k = 0; k < DEPTH; k += 8) {
      const uint32_t address = from.address(row, k), at = address - WINDOW;
      if (address < WINDOW || at + 16 > machine->job->shared) {
        fault(pc, 0, "out of bounds: row %d of %s lies at %ld of %u bytes of shared memory", row,
              operand, static_cast<long>(address) - WINDOW, machine->job->shared);
      }
      read_by_product(at, static_cast<uint32_t>(pc), machine->products[product].first);
      machine->readers[at / 16].push_back(product);
      for (int e = 0; e < 8; ++e) {
        uint16_t bits;
        memcpy(&bits, machine->shared + at + 2 * e, 2);
        into[row][k + e] = is_bf16 ? gtco::to_float(bf16{bits}) : gtco::to_float(half{bits});
      }
    }
  }
}

// As meet, of all threads of a warp group.
bool meet_group(Collective kind, uint64_t pc, void* operands) {
  const int first = machine->running->warp / GROUP_WARPS * GROUP_WARPS;
  if (static_cast<uint32_t>(first + GROUP_WARPS) * WARP > machine->job->threads) {
    fault(pc, 0, "%s in a warp group of fewer than four warps", name_of(kind));
  }
  if (!meet(kind, pc, operands)) return false;
  if (++machine->warp[first].group_arrived < GROUP_WARPS) {
    suspend();
    return false;
  }
  machine->warp[first].group_arrived = 0;
  return true;
}

void wgmma(Collective kind, int columns, float* d, uint64_t a, uint64_t b) {
  const uint64_t pc = HERE;
  Fibre& self = *machine->running;
  if (!self.fenced) fault(pc, 0, "%s without a wgmma_fence since the last wait", name_of(kind));
  Sums* mine = nullptr;
  for (Sums& sums : self.sums) {
    if (sums.d == d) mine = &sums;
  }
  if (!mine) {
    self.sums.push_back({d, std::vector<float>(d, d + columns / 2), pc});
    mine = &self.sums.back();
    for (int i = 0; i < columns / 2; ++i) memcpy(d + i, &POISON, 4);
  }
  check_untouched(*mine, pc);
  Given given{columns, d, a, b};
  if (!meet_group(kind, pc, &given)) return;
  Fibre* const of = &machine->fibre[self.warp / GROUP_WARPS * GROUP_WARPS * WARP];
  auto at = [&](int i) { return static_cast<Given*>(of[i].operands); };
  const int threads = GROUP_WARPS * WARP;
  const bool is_bf16 = kind == WGMMA_BF16;
  for (int i = 0; i < threads; ++i) {
    const Given& other = *at(i);
    if (of[i].waits != kind || other.columns != columns || other.a != a || other.b != b) {
      fault(pc, of[i].pc, "divergent: another product than thread %d of its warp group", i);
    }
  }
  static float left[ROWS][DEPTH], right[256][DEPTH];
  const uint32_t number = static_cast<uint32_t>(machine->products.size());
  machine->products.push_back({of->thread, static_cast<uint32_t>(pc), {}});
  read(Described(b, pc, "B"), columns, is_bf16, right, number, pc, "B");
  read(Described(a, pc, "A"), ROWS, is_bf16, left, number, pc, "A");
  // PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk16": d[4j + r] of a thread lies in the
  // row 16 (warp % 4) + lane / 4 + 8 (r / 2) and the column 8j + 2 (lane % 4) + r % 2.
  for (int i = 0; i < threads; ++i) {
    of[i].products.push_back({number, of[i].product_groups, at(i)->d});
    for (Sums& sums : of[i].sums) {
      if (sums.d != at(i)->d) continue;
      for (int r = 0; r < columns / 2; ++r) {
        const int m = i / WARP * 16 + i % WARP / 4 + 8 * (r / 2 % 2);
        const int n = r / 4 * 8 + 2 * (i % 4) + r % 2;
        float sum = sums.values[r];
        for (int k = 0; k < DEPTH; ++k) sum += left[m][k] * right[n][k];
        sums.values[r] = sum;
      }
    }
  }
  for (int i = 0; i < threads; i += WARP) flush_warp(of[i].warp);
  for (int i = 0; i < threads; ++i) make_ready(of[i]);
  suspend();
}

}  // namespace gtco_emulator
