// The state of the fake driver: devices with their memory, contexts and handles, and the checks at the start of a call.
// streams.h runs the streams. See fake_driver.cpp, which includes both.
#pragma once

#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

namespace {

enum {
  OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101,
  INVALID_IMAGE = 200, INVALID_CONTEXT = 201, NO_BINARY = 209, INVALID_PTX = 218, UNSUPPORTED_PTX = 222, INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600,
  ILLEGAL_ADDRESS = 700, LAUNCH_FAILED = 719, TOO_LARGE = 720, CAPTURE_UNSUPPORTED = 900, CAPTURE_ISOLATION = 905,
  CAPTURE_IMPLICIT = 906, UNKNOWN = 999,
};

const std::map<int, std::pair<const char*, const char*>> NAMES = {
    {OK, {"CUDA_SUCCESS", "no error"}},
    {INVALID_VALUE, {"CUDA_ERROR_INVALID_VALUE", "invalid argument"}},
    {OUT_OF_MEMORY, {"CUDA_ERROR_OUT_OF_MEMORY", "out of memory"}},
    {NOT_INITIALIZED, {"CUDA_ERROR_NOT_INITIALIZED", "initialization error"}},
    {NO_DEVICE, {"CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"}},
    {INVALID_DEVICE, {"CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"}},
    {INVALID_IMAGE, {"CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"}},
    {INVALID_CONTEXT, {"CUDA_ERROR_INVALID_CONTEXT", "invalid device context"}},
    {NO_BINARY, {"CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"}},
    {INVALID_PTX, {"CUDA_ERROR_INVALID_PTX", "a PTX JIT compilation failed"}},
    {UNSUPPORTED_PTX, {"CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "the provided PTX was compiled with an unsupported toolchain."}},
    {INVALID_HANDLE, {"CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"}},
    {NOT_FOUND, {"CUDA_ERROR_NOT_FOUND", "named symbol not found"}},
    {ILLEGAL_ADDRESS, {"CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"}},
    {LAUNCH_FAILED, {"CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"}},
    {TOO_LARGE, {"CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE", "too many blocks in cooperative launch"}},
    {CAPTURE_UNSUPPORTED, {"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"}},
    {CAPTURE_IMPLICIT, {"CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", "operation would make the legacy stream depend on a capturing blocking stream"}},
    {CAPTURE_ISOLATION, {"CUDA_ERROR_STREAM_CAPTURE_ISOLATION", "dependency created on uncaptured work in another stream"}},
    {UNKNOWN, {"CUDA_ERROR_UNKNOWN", "unknown error"}},
};

#ifdef __SANITIZE_THREAD__
constexpr uintptr_t FIRST = 0x560000000000;  // ThreadSanitizer has memory of programs in few places
#else
constexpr uintptr_t FIRST = 0x500000000000;
#endif
constexpr uintptr_t REGION = 1ull << 32, PAGE = 4096;
constexpr unsigned BLOCKING = 0, DISABLE_TIMING = 2;
constexpr int RELAXED = 2, MULTIPROCESSORS = 4;

struct Context;
struct Stream;

struct Point {  // after the seq-th operation of a stream
  Stream* stream = nullptr;
  uint64_t seq = 0;
};

struct Operation {
  std::vector<Point> after;
  std::function<void()> run{};  // empty: only waits
  std::vector<uintptr_t> memory{};  // that it reads or writes
  const void* module = nullptr;  // whose kernel it is
};

struct Stream {
  Context* context;
  unsigned flags;
  bool alive = true, capturing = false, user = false;
  uint64_t enqueued = 0, done = 0;
  std::deque<Operation> queue{};
  std::vector<Operation> captured{};
};

struct Event {
  Context* context;
  unsigned flags;
  bool alive = true, captured = false;
  Point at{};
  double time = -1;
};

struct Allocation {
  uintptr_t start;
  size_t bytes;
  bool alive, user, foreign = false;  // of another context of the device
};

struct Module {
  Context* context;
  void* library;
  bool alive = true;
};

typedef void (*HostKernel)(void** arguments, const unsigned* grid, unsigned threads, unsigned shared);

struct Function {
  Module* module;
  std::string name;
  HostKernel run;
  int count;
  const int* sizes = nullptr;  // of a cooperative kernel's parameters
  unsigned shared_limit = 48 << 10;
};

struct NodeParams {  // CUDA_KERNEL_NODE_PARAMS_v2
  Function* function;
  unsigned grid[3], block[3];
  unsigned shared;
  void** params;
  void** extra;
  void* kernel;
  Context* context;
};

struct EdgeData {  // CUgraphEdgeData
  unsigned char from_port, to_port, type, reserved[5];
};

struct Launch {
  Function* function;
  unsigned grid[3], threads, shared;
  std::vector<void*> arguments;
  std::vector<std::vector<uint64_t>> copies;  // of a cooperative kernel's parameters
};

struct Graph;

struct Node {
  Graph* graph;
  Context* context;
  Launch launch;
  std::vector<Node*> before;
};

struct Graph {
  bool alive = true;
  int programmatic = 0;  // edges
  std::vector<std::unique_ptr<Node>> nodes;
};

struct Executable {
  Context* context;
  bool alive = true;
  std::vector<Node*> order;
  std::map<Node*, Launch> launches;
  std::vector<Point> running;
};

struct Context {
  int device;
  int users = 0;
  int broken = 0;  // the error that every later call gives
  Stream* legacy = nullptr;
};

struct Device {
  int major = 8, minor = 0;
  int cooperative = 1, room = 2;  // blocks that a multiprocessor holds of any kernel, so long as its shared memory lasts
  size_t memory = 1 << 30, used = 0;
  int occupancy(unsigned shared) const {
    int fit = shared ? (int)(shared_limit() / shared) : room;
    return fit < room ? fit : room;
  }
  unsigned shared_limit() const {  // of a block that asks for it
    if (major == 7) return 64 << 10;
    if (major == 8) return (minor == 0 || minor == 7 ? 163 : 99) << 10;
    if (major == 12) return 99 << 10;
    return 227 << 10;
  }
  Context context;
  uintptr_t next = 0;
  std::map<uintptr_t, Allocation> allocations;
};

std::recursive_mutex lock;
std::vector<std::unique_ptr<Device>> devices;
std::list<std::unique_ptr<Stream>> streams;
std::list<std::unique_ptr<Event>> events;
std::list<std::unique_ptr<Module>> modules;
std::list<std::unique_ptr<Function>> functions;
std::list<std::unique_ptr<Graph>> graphs;
std::list<std::unique_ptr<Executable>> executables;
thread_local std::vector<Context*> stack;
thread_local int capture_mode = 0;  // GLOBAL, THREAD_LOCAL, RELAXED
std::string faults, answer, failed_call;
std::mt19937 choice(1);
bool initialized = false;
int initialized_in = 0;  // the process that did it; a child of it is another one
int version = 13000, visible = 1;
long calls = 0, copies = 0, fail_at = -1, fail_code = UNKNOWN;
std::string fail_name;
long fail_after = -1;
int kernel_fault = 0;
double clock_ms = 0;

void fault(const std::string& text) { faults += text + "\n"; }

Device& device(int ordinal) {
  while ((int)devices.size() <= ordinal) {
    auto made = std::make_unique<Device>();
    made->context.device = (int)devices.size();
    uintptr_t start = FIRST + REGION * devices.size();
    void* got = mmap((void*)start, REGION, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
    if (got != (void*)start) { perror("fake driver: mmap"); abort(); }
    made->next = start;
    devices.push_back(std::move(made));
  }
  return *devices[ordinal];
}

bool in_device_range(uintptr_t p) { return p >= FIRST && p < FIRST + REGION * (devices.empty() ? 1 : devices.size()); }

Allocation* find(uintptr_t p, int* ordinal) {
  for (auto& d : devices) {
    auto at = d->allocations.upper_bound(p);
    if (at == d->allocations.begin()) continue;
    --at;
    if (p < at->second.start + at->second.bytes) {
      if (ordinal) *ordinal = d->context.device;
      return &at->second;
    }
  }
  return nullptr;
}

// All of [p, p + bytes) is live memory of that device.
bool valid(uintptr_t p, size_t bytes, int ordinal, const std::string& what) {
  int where = -1;
  Allocation* a = find(p, &where);
  char text[200];
  const char* why = !a ? "no device memory" : !a->alive ? "freed" : where != ordinal ? "memory of another device"
                    : a->foreign ? "memory of another context"
                    : p + bytes > a->start + a->bytes ? "beyond the end of its allocation" : nullptr;
  if (!why) return true;
  snprintf(text, sizeof text, ": pointer %#lx (%zu bytes) is %s", (long)p, bytes, why);
  fault(what + text);
  return false;
}

void reach(bool open) {
  for (auto& d : devices)
    for (auto& [start, a] : d->allocations)
      if (a.alive)
        mprotect((void*)(start / PAGE * PAGE), (start % PAGE + a.bytes + PAGE - 1) / PAGE * PAGE,
                 open ? PROT_READ | PROT_WRITE : PROT_NONE);
}

// ---- calls ----

struct Call {
  std::unique_lock<std::recursive_mutex> held{lock};
  bool fails;
  explicit Call(const char* name) {
    ++calls;
    fails = calls == fail_at || (fail_after >= 0 && fail_name == name && fail_after-- == 0);
    if (fails) failed_call = name;
  }
};

#define BEGIN                     \
  Call call(__func__);            \
  if (call.fails) return (int)fail_code; \
  if (!initialized) return NOT_INITIALIZED
// Frees or waits even if it is made to fail, so that a leak is the caller's fault.
#define BEGIN_FREE                \
  Call call(__func__);            \
  if (!initialized) return NOT_INITIALIZED
#define END_FREE return call.fails ? (int)fail_code : OK
#define IN_CONTEXT                                               \
  Context* context = stack.empty() ? nullptr : stack.back();     \
  if (!context || !context->users) {                             \
    fault(std::string(__func__) + ": no context is current");    \
    return INVALID_CONTEXT;                                      \
  }                                                              \
  if (context->broken) return context->broken;                    \
  if (breaks_capture(__func__)) return CAPTURE_UNSUPPORTED

// Streams are captured in GLOBAL mode here. It forbids all calls that may be unsafe (the manual lists none) to every
// thread that has not said that it has nothing to do with captures.
bool breaks_capture(const std::string& name) {
  if (capture_mode == RELAXED) return false;
  for (auto& s : streams)
    if (s->capturing) {
      fault(name + " breaks what is being captured");
      return true;
    }
  return false;
}

template <class T>
bool known(const std::list<std::unique_ptr<T>>& all, const T* one) {
  for (auto& x : all)
    if (x.get() == one) return true;
  return false;
}

#define CHECK(list, object, text)                                                                             \
  if (!known(list, object) || !object->alive || object->context != context) {                                 \
    fault(std::string(__func__) + ": " text " is not alive, or is of another context than the current one");   \
    return INVALID_HANDLE;                                                                                    \
  }

}  // namespace
