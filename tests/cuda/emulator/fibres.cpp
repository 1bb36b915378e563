// Threads of a block as fibres: they run until a collective, and whoever is ready runs next, drawn
// by the seed. Blocks run one after another in an order drawn by the seed too.
#include <sys/mman.h>

#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "machine.h"

extern "C" {
void gtco_swap(void** save, void* load);
extern char __ehdr_start __attribute__((visibility("hidden")));
}

asm(R"(
.text
.globl gtco_swap
.hidden gtco_swap
.type gtco_swap, @function
gtco_swap:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

namespace gtco_emulator {

static Machine one;
Machine* machine = &one;
Position position;

uint64_t place(const void* return_address) {
  return static_cast<const char*>(return_address) - &__ehdr_start - 1;  // within the call
}

uint32_t draw(uint32_t below) {
  uint64_t& x = machine->random;
  x ^= x << 13, x ^= x >> 7, x ^= x << 17;
  return static_cast<uint32_t>((x >> 32) * below >> 32);
}

const char* who() {
  static char text[96];
  const uint3 b = position.block;
  snprintf(text, sizeof text, "block (%u, %u, %u), thread %d", b.x, b.y, b.z,
           machine->running ? machine->running->thread : -1);
  return text;
}

const char* name_of(int collective) {
  static const char* const names[] = {"sync",          "sync_warp",     "shuffle",
                                      "shuffle_xor",   "shuffle_down",  "ldmatrix",
                                      "ldmatrix_trans", "mma_m16n8k16<half>",
                                      "mma_m16n8k16<bf16>", "mma_m16n8k8<half>",
                                      "the barrier of all blocks",
                                      "wgmma<half>", "wgmma<bf16>", "wgmma_fence",
                                      "wgmma_commit", "wgmma_wait", "mbarrier_wait", "setmaxnreg"};
  return collective < 0 ? "nothing" : names[collective];
}

[[noreturn]] static void leave() {
  void* nowhere;
  gtco_swap(&nowhere, machine->main_sp);
  __builtin_unreachable();
}

void fault(uint64_t pc, uint64_t other, const char* format, ...) {
  Job& job = *machine->job;
  int used = snprintf(job.fault, sizeof job.fault, "%s: ", who());
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(job.fault + used, sizeof job.fault - used, format, arguments);
  va_end(arguments);
  job.fault_pcs[0] = pc, job.fault_pcs[1] = other;
  leave();
}

void make_ready(Fibre& fibre) {
  fibre.waits = -1;
  machine->ready[machine->n_ready++] = fibre.thread;
}

// Nobody can run and not all are done: say who waits for what.
[[noreturn]] static void stuck() {
  Fibre* first = nullptr;
  Fibre* other = nullptr;
  int done = 0, threads = static_cast<int>(machine->job->threads);
  for (int t = 0; t < threads; ++t) {
    Fibre& f = machine->fibre[t];
    if (f.done) {
      ++done;
    } else if (!first) {
      first = &f;
    } else if (!other && (f.waits != first->waits || f.pc != first->pc)) {
      other = &f;
    }
  }
  machine->running = first;
  if (other) {
    fault(first->pc, other->pc, "divergent: waits in %s, thread %d waits in %s",
          name_of(first->waits), other->thread, name_of(other->waits));
  }
  fault(first->pc, 0, "divergent: waits in %s, but %d of %d threads have ended",
        name_of(first->waits), done, threads);
}

void meet_at(const Warp& warp, uint64_t pc) {
  if (warp.pc == pc) return;  // else the compiler made two of one call, or the source has two
  Job& job = *machine->job;
  for (uint32_t i = 0; i < job.met; ++i) {
    if (job.met_pcs[i][0] == warp.pc && job.met_pcs[i][1] == pc) return;
  }
  if (job.met == MET_MOST) fault(pc, warp.pc, "divergent: threads meet in too many ways");
  job.met_pcs[job.met][0] = warp.pc, job.met_pcs[job.met++][1] = pc;
}

// Null: all that have not ended wait for other blocks.
static Fibre* next() {
  if (!machine->n_ready) {
    for (uint32_t t = 0; t < machine->job->threads; ++t) {
      if (machine->fibre[t].waits == GRID_BARRIER) return nullptr;
    }
    stuck();
  }
  const int chosen = static_cast<int>(draw(machine->n_ready));
  const int thread = machine->ready[chosen];
  machine->ready[chosen] = machine->ready[--machine->n_ready];
  machine->running = &machine->fibre[thread];
  position.thread.x = static_cast<unsigned>(thread);
  return machine->running;
}

void suspend() {
  Fibre& self = *machine->running;
  const uint8_t* here = static_cast<const uint8_t*>(__builtin_frame_address(0));
  if (here < machine->stacks + self.thread * STACK + STACK / 8) {
    fault(self.pc, 0, "has more than %zu bytes of local variables", STACK - STACK / 8);
  }
  Fibre* other = next();
  if (other != &self) gtco_swap(&self.sp, other ? other->sp : machine->main_sp);
}

static void call() {
  if (machine->job->parameters) return call_cooperative();
  // Arguments that a function does not have do no harm in this calling convention.
  typedef void Kernel(void*, void*, void*, void*, void*, void*, void*, void*, void*, void*, void*,
                      void*, void*, void*, void*, void*, void*, void*, void*, void*, void*, void*,
                      void*, void*);
  void* p[24] = {};
  for (uint32_t i = 0; i < machine->job->buffers; ++i) p[i] = machine->job->buffer[i].data;
  reinterpret_cast<Kernel*>(machine->job->kernel)(
      p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7], p[8], p[9], p[10], p[11], p[12], p[13], p[14],
      p[15], p[16], p[17], p[18], p[19], p[20], p[21], p[22], p[23]);
}

static void life() {
  call();
  Fibre& self = *machine->running;
  if (!self.products.empty()) {
    fault(self.sums.front().pc, 0, "ends with products that it has not waited for");
  }
  self.done = true;
  if (++machine->finished == static_cast<int>(machine->job->threads)) leave();
  suspend();
  __builtin_unreachable();
}

void begin_block(uint32_t block) {
  const int threads = static_cast<int>(machine->job->threads);
  machine->block = block;
  machine->finished = machine->n_ready = 0;
  for (int& arrived : machine->arrived) arrived = 0;
  machine->arrivals.clear(), machine->passages.clear();
  for (int t = 0; t < threads; ++t) {
    Fibre& f = machine->fibre[t];
    f.thread = t, f.warp = t / WARP, f.lane = t % WARP, f.done = false, f.groups = 0;
    f.copies.clear();
    f.products.clear(), f.sums.clear();
    f.product_groups = 0, f.fenced = false;
    f.fences.clear(), f.known.clear(), f.tick = 1;
    // Six registers, the entry, and a return address that nothing returns to.
    void** top = reinterpret_cast<void**>(machine->stacks + (t + 1) * STACK - 64);
    top[6] = reinterpret_cast<void*>(life), top[7] = nullptr;
    f.sp = top;
    make_ready(f);
  }
  for (int w = 0; w * WARP < threads; ++w) {
    const int left = threads - w * WARP;
    machine->warp[w].lanes = left < WARP ? left : WARP;
    machine->warp[w].arrived = machine->warp[w].in_barrier = machine->warp[w].group_arrived = 0;
  }
  machine->block_epoch = machine->full_epoch = ++machine->epoch;
  machine->first_threads = 0, machine->clocked = false;
  machine->mbarriers.clear();
  begin_block_memory();
}

void run_block() {
  const uint32_t* grid = machine->job->grid;
  const uint32_t b = machine->block;
  position.block = {b % grid[0], b / grid[0] % grid[1], b / grid[0] / grid[1]};
  if (Fibre* first = next()) gtco_swap(&machine->main_sp, first->sp);
  machine->running = nullptr;
}

bool begin_machine(Job* job) {
  machine->job = job;
  if (!machine->stacks) {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    const size_t all = STACK * THREADS_MOST + 2 * SHARED_MOST;
    void* got = mmap(nullptr, all, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (got == MAP_FAILED) {
      snprintf(job->fault, sizeof job->fault, "no memory for the stacks of a block's threads");
      return false;
    }
    machine->stacks = static_cast<uint8_t*>(got);
    machine->shared = machine->stacks + STACK * THREADS_MOST + SHARED_MOST;  // a gap before it
  }
  machine->shadow.assign(job->shared, Shadow{});
  machine->state.assign(job->shared, 0);
  machine->epoch = 0;
  for (Warp& warp : machine->warp) warp.epoch = 0;
  return true;
}

}  // namespace gtco_emulator

extern "C" __attribute__((visibility("default"))) void gtco_emulate(gtco_emulator::Job* job) {
  using namespace gtco_emulator;
  machine = &one;
  position.grid = {job->grid[0], job->grid[1], job->grid[2]};
  position.threads = {job->threads, 1, 1};
  position.thread = {0, 0, 0};
  machine->random = 0x9e3779b97f4a7c15ull * (job->seed + 1ull);
  if (job->parameters) return run_grid(job);
  if (!begin_machine(job)) return;
  begin_memory();
  begin_figures();
  const uint32_t blocks = job->grid[0] * job->grid[1] * job->grid[2];
  std::vector<uint32_t> order(blocks);
  for (uint32_t i = 0; i < blocks; ++i) {
    const uint32_t j = job->seed ? draw(i + 1) : i;
    order[i] = order[j], order[j] = i;
  }
  for (uint32_t i = 0; i < blocks && !job->fault[0]; ++i) {
    begin_block(order[i]);
    run_block();
  }
  if (!job->fault[0]) end_memory();
  end_figures();
}
