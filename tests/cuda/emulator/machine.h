// The emulated multiprocessor: one block at a time, its threads as fibres. fibres.cpp runs them,
// collectives.cpp, warp_groups.cpp and mbarriers.cpp have their common operations, memory.cpp
// checks their accesses by clocks.cpp, and figures.cpp counts the cost on a GPU. The blocks of a
// cooperative kernel are all alive at once, each with a Machine: grid.cpp has the order between
// them.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "emulator.h"
#include "gtco/device.cuh"

namespace gtco_emulator {

// ---- structures that Python passes (emulate.py has the same ones)

struct Buffer {
  uint8_t* data;
  uint64_t bytes;
  uint32_t writable;  // see Access
  uint32_t number;
};

struct SiteFigures {  // an instruction that touches memory
  uint64_t pc;        // its place in the library
  uint32_t kind;      // see Kind
  uint32_t bytes;     // one thread's
  uint64_t requests;  // of whole warps
  uint64_t passes;    // shared: wavefronts; global: sectors of 32 bytes
  uint64_t least;     // the fewest that these bytes need
};

constexpr int MET_MOST = 64;

// OUTPUT: starts unwritten, and all of it is written in the end; SCRATCH: starts unwritten;
// ANY: unknown; COUNTERS: of tickets.
enum Access : uint32_t { CONSTANT, OUTPUT, SCRATCH, ANY, COUNTERS };

struct Job {
  void* kernel;
  void** parameters;  // of a cooperative kernel; null for others, whose parameters are the buffers
  uint32_t grid[3];
  uint32_t threads, shared, buffers, seed, sample;
  Buffer* buffer;
  // answers
  char fault[2048];
  uint64_t fault_pcs[2];
  // Pairs of instructions at which threads of one warp met: one of the source, or a fault.
  uint32_t met;
  uint64_t met_pcs[MET_MOST][2];
  uint32_t sites_room, sites;
  SiteFigures* site;
  uint64_t collectives;
};

// ---- threads

constexpr int WARP = 32;
constexpr size_t STACK = 128 << 10;
constexpr size_t SHARED_MOST = 256 << 10;
constexpr int THREADS_MOST = 1024;

struct Copy {
  uint32_t at, bytes;
  const void* from;  // null: zeros
  uint32_t group;
  uint32_t pc;
};

constexpr int GROUP_WARPS = 4;  // of a warp group

struct Time {  // of what a thread does
  uint32_t epoch, tick;
};

// Of warp groups: a product reads shared memory until all warps of the group have waited for it.
struct Product {
  int first;  // the group's first thread
  uint32_t pc;
  Time waited[GROUP_WARPS * WARP];  // when each of its threads had, tick 0 before that
};
struct Pending {  // a thread's share in one
  uint32_t product, group;
  const float* d;
};
struct Sums {  // what `d` will be
  float* d;
  std::vector<float> values;
  uint64_t pc;
};

struct Fibre {
  void* sp;
  int thread, warp, lane;
  bool done;
  int waits;          // the collective that it waits in, -1 where it runs
  uint64_t pc;        // of that collective
  void* operands;
  uint32_t groups;    // of copies that it has committed
  std::vector<Copy> copies;  // under way
  int barrier;               // which of the block's it waits in
  uint32_t product_groups;   // of products that it has committed
  std::vector<Pending> products;
  std::vector<Sums> sums;
  bool fenced;  // by wgmma_fence
  std::vector<Time> fences;  // of fence_proxy
  uint32_t tick;                // counts what it has told others by mbarriers
  std::vector<uint32_t> known;  // up to which tick what each thread did lies before
};

struct Warp {
  int lanes, arrived;
  int in_barrier;  // how many of it wait for the block
  Collective kind;
  uint64_t pc;  // where its first came to the collective
  uint32_t epoch;  // warp barriers so far, in all blocks
  int group_arrived;  // of a group's first warp: how many of its warps have come to a product
};

struct Shadow {  // of one byte of shared memory, valid in the epoch that it names
  uint32_t write_epoch, write_warp_epoch, write_pc;
  uint32_t read_epoch, read_warp_epoch, read_pc;
  uint32_t write_tick;
  uint32_t write_fences;  // that the writer had passed
  uint16_t writer, reader;
  bool read_by_lanes, read_by_warps;  // besides `reader`: others of its warp, and of other warps
};

struct Reading {  // of a byte, in a block with mbarriers
  uint16_t thread;
  uint32_t pc, warp_epoch;
  Time then;
};

struct Mbarrier {
  uint32_t arrivals, pending, phases;  // of a phase, still to come, passed
  std::vector<uint32_t> told, released;  // in this phase, and in the one before
};

constexpr int BARRIERS = 2;  // of a block: for all of its threads, and for its first ones

struct Machine {
  Job* job;
  Fibre fibre[THREADS_MOST];
  Warp warp[THREADS_MOST / WARP];
  Fibre* running;
  int ready[THREADS_MOST], n_ready;
  int arrived[BARRIERS], expected[BARRIERS], finished;
  uint32_t epoch;  // block barriers so far, and blocks
  uint32_t block_epoch;  // the epoch that this block began with
  uint32_t full_epoch;   // and that begun by the latest barrier of all threads
  uint32_t first_threads;  // that had the barriers since
  uint32_t block;
  uint64_t random;
  void* main_sp;
  uint8_t* stacks;
  uint8_t* shared;
  std::vector<Shadow> shadow;
  std::vector<uint8_t> state;
  std::vector<Product> products;  // of this block
  std::vector<std::vector<uint32_t>> readers;  // of each 16 bytes: products, since it was written
  bool clocked;  // this block has mbarriers
  std::map<uint32_t, Mbarrier> mbarriers;  // by place
  std::vector<std::vector<Reading>> readings;  // of each byte since it was written, where clocked
  // Of the grid's barriers: the epoch of the block when its first thread came to each, and when it
  // knew that all had come.
  std::vector<uint32_t> arrivals, passages;
};
extern Machine* machine;  // of the block that runs

bool begin_machine(Job* job);  // false: no memory
void begin_block(uint32_t block);
void run_block();  // until all of its threads have ended, or wait for other blocks
uint32_t draw(uint32_t below);
// Ends the run: says what happened, at which instruction, and which other instruction is involved.
[[noreturn]] void fault(uint64_t pc, uint64_t other, const char* format, ...)
    __attribute__((format(printf, 3, 4)));
// True for the last thread of the warp: it does the work of all, and `release` lets them go.
bool meet(Collective kind, uint64_t pc, void* operands);
void release();
bool meet_group(Collective kind, uint64_t pc, void* operands);  // as meet, of a warp group
uint64_t place(const void* return_address);  // in the library; 0 is its start
const char* who();                           // "block (0, 1, 0), thread 5"
void meet_at(const Warp& warp, uint64_t pc);  // like the warp's first
void suspend();                              // runs others until this fibre is ready again
void make_ready(Fibre& fibre);
const char* name_of(int collective);

// ---- memory

enum Kind : uint32_t { SHARED_READ, SHARED_WRITE, GLOBAL_READ, GLOBAL_WRITE, MATRIX_READ };

void begin_memory();
void begin_block_memory();
void end_memory();
void read_shared(uint32_t at, uint32_t bytes, uint32_t pc);
void write_shared(uint32_t at, uint32_t bytes, uint32_t pc);
void copy_begins(uint32_t at, uint32_t bytes, uint32_t pc);  // written, and not to be read yet
void copy_ends(uint32_t at, uint32_t bytes, uint32_t pc);
void make_barrier(uint32_t at, uint32_t bytes, uint32_t pc);  // not to be read or written any more
void read_by_product(uint32_t at, uint32_t pc, int first);   // 16 bytes, by a warp group
// Byte `at` is used by the thread: was it written before that?
void check_writer(const Fibre& by, uint32_t at, uint32_t pc, const char* what);
uint32_t shared_offset(const void* p, uint32_t bytes, uint64_t pc, const char* what);
void read_global(const void* p, uint32_t bytes, uint64_t pc);
void write_global(void* p, uint32_t bytes, uint64_t pc, bool atomic);

// ---- the order of accesses in a block (clocks.cpp)

void begin_clocks();
Time now();  // of the running thread
bool before(const Fibre& by, uint32_t thread, const Time& then);
void learn(std::vector<uint32_t>& known, const std::vector<uint32_t>& other);
void tell(Fibre& fibre, std::vector<uint32_t>& into);  // its clock ticks
void meet_clocks(int first, int end);                  // all these threads know what each did
void note_reading(uint32_t at, uint32_t pc);
void check_readings(uint32_t at, uint32_t pc);

// ---- what blocks tell each other by tickets (tickets.cpp)

void begin_tickets();
uint32_t tickets_taken();  // by the block that runs
// True if the running thread knows by a ticket the access of another block's thread, which was made
// in `epoch` of that block after it had taken `taken` tickets.
bool told(uint32_t block, uint32_t thread, uint32_t epoch, uint32_t taken);

// ---- the grid of a cooperative kernel

void run_grid(Job* job);
void call_cooperative();
void read_grid(const Buffer& buffer, const void* p, uint32_t bytes, uint64_t pc);
void write_grid(const Buffer& buffer, const void* p, uint32_t bytes, uint64_t pc);
const Buffer& buffer_of(const void* p, uint32_t bytes, uint64_t pc, const char* what);

// ---- figures

void begin_figures();
void note(Kind kind, uint64_t address, uint32_t bytes, uint64_t pc);
void flush_warp(int warp);
void end_figures();

}  // namespace gtco_emulator
