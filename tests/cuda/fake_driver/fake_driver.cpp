// A libcuda.so.1 without a GPU: the functions of the NVIDIA driver that gtco's runtime calls, on host memory, as strict as
// the driver's manual allows it to be. Work in streams is put off until something waits for it, and then steps of different
// streams run in a random order; device memory is out of the host's reach except while such work runs; every handle is
// checked for its context and its life. What a program does wrong is a line of fake_faults(); what it has not given back,
// of fake_live(). fake_fail(n, code) makes the n-th call from now fail.
//
// An image is "GTCOFAKE ARCH PATH": kernels are functions of the shared object PATH, `void KERNEL(void** arguments, const
// unsigned* grid, unsigned threads, unsigned shared)`, and an int `KERNEL_count` says how many arguments it has.
#include <dlfcn.h>
#include <sys/mman.h>

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
  INVALID_IMAGE = 200, INVALID_CONTEXT = 201, NO_BINARY = 209, INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600,
  ILLEGAL_ADDRESS = 700, LAUNCH_FAILED = 719, CAPTURE_ISOLATION = 905, UNKNOWN = 999,
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
    {INVALID_HANDLE, {"CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"}},
    {NOT_FOUND, {"CUDA_ERROR_NOT_FOUND", "named symbol not found"}},
    {ILLEGAL_ADDRESS, {"CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"}},
    {LAUNCH_FAILED, {"CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"}},
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

struct Context;
struct Stream;

struct Point {  // behind the seq-th operation of a stream
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
  bool alive, user;
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

struct Launch {
  Function* function;
  unsigned grid[3], threads, shared;
  std::vector<void*> arguments;
};

struct Graph;

struct Node {
  Graph* graph;
  Launch launch;
  std::vector<Node*> before;
};

struct Graph {
  bool alive = true;
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
  size_t memory = 1 << 30, used = 0;
  unsigned shared_limit = 163 << 10;
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
std::string faults, answer, failed_call;
std::mt19937 choice(1);
bool initialized = false;
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
// Frees, or waits, even where it is made to fail: so a leak is the caller's.
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
  if (context->broken) return context->broken

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

// ---- streams ----

Stream* stream_of(Context* context, Stream* given) {
  if ((uintptr_t)given > 2) return given;
  if (!context->legacy) {
    streams.push_back(std::make_unique<Stream>(Stream{context, BLOCKING}));
    context->legacy = streams.back().get();
    context->legacy->user = true;
  }
  return context->legacy;
}

Point push(Stream* s, Operation operation) {
  if (s->capturing) {
    s->captured.push_back(operation);
    return {s, s->enqueued};
  }
  Stream* legacy = stream_of(s->context, nullptr);
  if (s == legacy) {
    for (auto& other : streams)
      if (other->context == s->context && other.get() != s && other->flags == BLOCKING)
        operation.after.push_back({other.get(), other->enqueued});
  } else if (s->flags == BLOCKING) {
    operation.after.push_back({legacy, legacy->enqueued});
  }
  s->queue.push_back(std::move(operation));
  return {s, ++s->enqueued};
}

bool reached(const Point& p) { return !p.stream || p.stream->done >= p.seq; }

bool ready(const Stream& s) {
  if (s.queue.empty()) return false;
  for (auto& p : s.queue.front().after)
    if (!reached(p)) return false;
  return true;
}

void step(Stream& s) {
  Operation operation = std::move(s.queue.front());
  s.queue.pop_front();
  clock_ms += 0.001;
  if (operation.run && !s.context->broken) {
    reach(true);
    operation.run();
    reach(false);
  }
  ++s.done;
}

// Runs work of all streams, in a random order between them, until that point is reached.
void run_until(const Point& goal) {
  while (!reached(goal)) {
    std::vector<Stream*> able;
    for (auto& s : streams)
      if (ready(*s)) able.push_back(s.get());
    if (able.empty()) { fault("streams wait for each other"); return; }
    step(*able[choice() % able.size()]);
  }
}

// Is there work under way that uses this memory, or a kernel of this module?
bool in_use(uintptr_t start, size_t bytes, const void* module) {
  for (auto& s : streams)
    for (auto& operation : s->queue) {
      if (module && operation.module == module) return true;
      for (uintptr_t p : operation.memory)
        if (p >= start && p < start + bytes) return true;
    }
  return false;
}

Operation launch_of(Context* context, const Launch& launch);

void execute(Context* context, const Launch& l) {
  bool good = true;
  for (size_t i = 0; i < l.arguments.size(); ++i) {
    uintptr_t p = (uintptr_t)l.arguments[i];
    std::string what = l.function->name + ", argument " + std::to_string(i);
    good &= valid(p, 1, context->device, what);
    if (p % 16) { fault(what + " is not aligned to 16 bytes"); good = false; }
  }
  if (!l.function->module->alive) { fault(l.function->name + " runs after its module was unloaded"); good = false; }
  if (kernel_fault > 0 && --kernel_fault == 0) good = false;
  if (!good) { context->broken = ILLEGAL_ADDRESS; return; }
  std::vector<void*> arguments = l.arguments;
  l.function->run(arguments.data(), l.grid, l.threads, l.shared);
}

Operation launch_of(Context* context, const Launch& launch) {
  Operation operation{{}, [context, launch] { execute(context, launch); }};
  for (void* p : launch.arguments) operation.memory.push_back((uintptr_t)p);
  operation.module = launch.function->module;
  return operation;
}

int check_launch(Context* context, Function* f, const unsigned* grid, const unsigned* block, unsigned shared,
                 void** params, Launch* launch) {
  if (!known(functions, f) || !f->module->alive || f->module->context != context) {
    fault("a launch of a function that is not loaded in the current context");
    return INVALID_HANDLE;
  }
  unsigned long threads = (unsigned long)block[0] * block[1] * block[2];
  if (!threads || threads > 1024 || !grid[0] || !grid[1] || !grid[2] || grid[0] > 0x7fffffffu || grid[1] > 65535 ||
      grid[2] > 65535 || shared > f->shared_limit)
    return INVALID_VALUE;
  launch->function = f;
  memcpy(launch->grid, grid, sizeof launch->grid);
  launch->threads = (unsigned)threads;
  launch->shared = shared;
  launch->arguments.clear();
  for (int i = 0; i < f->count; ++i) launch->arguments.push_back(*(void**)params[i]);
  return OK;
}

}  // namespace

// ---- the driver's interface ----

API int cuInit(unsigned flags) {
  Call call(__func__);
  if (call.fails) return (int)fail_code;
  if (flags) return INVALID_VALUE;
  if (!visible) return NO_DEVICE;
  for (int i = 0; i < visible; ++i) device(i);
  initialized = true;
  return OK;
}

API int cuDriverGetVersion(int* out) { *out = version; return OK; }

API int cuGetErrorName(int error, const char** name) {
  auto at = NAMES.find(error);
  *name = at == NAMES.end() ? nullptr : at->second.first;
  return at == NAMES.end() ? INVALID_VALUE : OK;
}

API int cuGetErrorString(int error, const char** text) {
  auto at = NAMES.find(error);
  *text = at == NAMES.end() ? nullptr : at->second.second;
  return at == NAMES.end() ? INVALID_VALUE : OK;
}

API int cuDeviceGetCount(int* count) { BEGIN; *count = visible; return OK; }
API int cuDeviceGet(int* out, int ordinal) {
  BEGIN;
  if (ordinal < 0 || ordinal >= visible) return INVALID_DEVICE;
  *out = ordinal + 100;  // no ordinal: a handle
  return OK;
}
API int cuDeviceGetName(char* name, int bytes, int handle) { BEGIN; snprintf(name, (size_t)bytes, "Fake GPU %d", handle - 100); return OK; }
API int cuDeviceGetAttribute(int* value, int attribute, int handle) {
  BEGIN;
  Device& d = device(handle - 100);
  switch (attribute) {
    case 75: *value = d.major; return OK;
    case 76: *value = d.minor; return OK;
    case 97: *value = (int)d.shared_limit; return OK;
    case 16: *value = 4; return OK;
  }
  return INVALID_VALUE;
}

API int cuDevicePrimaryCtxRetain(Context** out, int handle) {
  BEGIN;
  Context& c = device(handle - 100).context;
  ++c.users;
  *out = &c;
  return OK;
}

API int cuDevicePrimaryCtxRelease_v2(int handle) {
  BEGIN_FREE;
  Context& c = device(handle - 100).context;
  if (!c.users) { fault("the primary context is released more often than retained"); return INVALID_CONTEXT; }
  --c.users;
  END_FREE;
}

API int cuCtxPushCurrent_v2(Context* context) {
  BEGIN;
  if (!context->users) { fault("a context that was released is made current"); return INVALID_CONTEXT; }
  stack.push_back(context);
  return OK;
}

API int cuCtxPopCurrent_v2(Context** out) {
  BEGIN_FREE;
  if (stack.empty()) { fault("no context to pop"); return INVALID_CONTEXT; }
  *out = stack.back();
  stack.pop_back();
  END_FREE;
}

API int cuCtxGetCurrent(Context** out) { *out = stack.empty() ? nullptr : stack.back(); return OK; }

API int cuMemGetInfo_v2(size_t* available, size_t* total) {
  BEGIN;
  IN_CONTEXT;
  Device& d = device(context->device);
  *available = d.memory - d.used;
  *total = d.memory;
  return OK;
}

namespace {
int allocate(Device& d, size_t bytes, uintptr_t* out, bool user) {
  if (!bytes) return INVALID_VALUE;
  if (d.used + bytes > d.memory) return OUT_OF_MEMORY;
  uintptr_t start = d.next + 256;  // never at a page's start: memory is aligned to 256 bytes and no more
  size_t pages = (256 + bytes + PAGE - 1) / PAGE * PAGE;
  d.next += pages + PAGE;  // a page out of reach behind each, and none is used twice
  d.used += bytes;
  d.allocations[start] = {start, bytes, true, user};
  mprotect((void*)(start - 256), pages, PROT_READ | PROT_WRITE);
  memset((void*)start, 0xff, bytes);  // NaN
  mprotect((void*)(start - 256), pages, PROT_NONE);
  *out = start;
  return OK;
}

int release(uintptr_t p, Context* context) {
  int ordinal = -1;
  Allocation* a = find(p, &ordinal);
  if (!a || !a->alive || a->start != p) { fault("cuMemFree of what is not allocated"); return INVALID_VALUE; }
  if (context && ordinal != context->device) { fault("cuMemFree in the context of another device"); return INVALID_VALUE; }
  if (in_use(p, a->bytes, nullptr)) fault("memory is freed while work that uses it is under way");
  a->alive = false;
  device(ordinal).used -= a->bytes;
  mprotect((void*)(p - 256), (256 + a->bytes + PAGE - 1) / PAGE * PAGE, PROT_NONE);
  return OK;
}
}  // namespace

API int cuMemAlloc_v2(uintptr_t* out, size_t bytes) { BEGIN; IN_CONTEXT; return allocate(device(context->device), bytes, out, false); }
API int cuMemFree_v2(uintptr_t p) {
  BEGIN_FREE;
  Context* context = stack.empty() ? nullptr : stack.back();
  if (!context) { fault("cuMemFree: no context is current"); return INVALID_CONTEXT; }
  if (int wrong = release(p, context)) return wrong;
  if (context->broken) return context->broken;
  END_FREE;
}

API int cuMemcpyHtoD_v2(uintptr_t to, const void* from, size_t bytes) {
  BEGIN;
  IN_CONTEXT;
  if (in_device_range((uintptr_t)from)) { fault("cuMemcpyHtoD from device memory"); return INVALID_VALUE; }
  if (!valid(to, bytes, context->device, __func__)) return INVALID_VALUE;
  reach(true);
  memcpy((void*)to, from, bytes);
  reach(false);
  return OK;
}

namespace {
int copy(Context* context, Stream* s, uintptr_t to, uintptr_t from, size_t bytes, const char* name) {
  ++copies;
  push(s, {{}, [=] {
    for (uintptr_t p : {to, from})
      if (in_device_range(p) && !valid(p, bytes, context->device, name)) return;
    memcpy((void*)to, (void*)from, bytes);
  }, {to, from}});
  return OK;
}
}  // namespace

#define ON_STREAM                                                            \
  IN_CONTEXT;                                                                \
  Stream* s = stream_of(context, given);                                     \
  CHECK(streams, s, "a stream")

API int cuMemcpyHtoDAsync_v2(uintptr_t to, const void* from, size_t bytes, Stream* given) {
  BEGIN;
  ON_STREAM;
  if (in_device_range((uintptr_t)from) || !in_device_range(to)) { fault("cuMemcpyHtoDAsync: not from host to device"); return INVALID_VALUE; }
  return copy(context, s, to, (uintptr_t)from, bytes, __func__);
}
API int cuMemcpyDtoHAsync_v2(void* to, uintptr_t from, size_t bytes, Stream* given) {
  BEGIN;
  ON_STREAM;
  if (in_device_range((uintptr_t)to) || !in_device_range(from)) { fault("cuMemcpyDtoHAsync: not from device to host"); return INVALID_VALUE; }
  return copy(context, s, (uintptr_t)to, from, bytes, __func__);
}
API int cuMemcpyDtoDAsync_v2(uintptr_t to, uintptr_t from, size_t bytes, Stream* given) {
  BEGIN;
  ON_STREAM;
  if (!in_device_range(to) || !in_device_range(from)) { fault("cuMemcpyDtoDAsync: host memory"); return INVALID_VALUE; }
  return copy(context, s, to, from, bytes, __func__);
}

API int cuPointerGetAttributes(unsigned count, int* attributes, void** values, uintptr_t pointer) {
  BEGIN;
  int ordinal = -2;
  Allocation* a = find(pointer, &ordinal);
  bool here = a && a->alive;
  for (unsigned i = 0; i < count; ++i) switch (attributes[i]) {
      case 2: *(unsigned*)values[i] = here ? 2 : 0; break;
      case 8: *(unsigned*)values[i] = 0; break;
      case 9: *(int*)values[i] = here ? ordinal : -2; break;
      default: return INVALID_VALUE;
    }
  return OK;
}

API int cuModuleLoadData(Module** out, const void* image) {
  BEGIN;
  IN_CONTEXT;
  char magic[16] = "", arch[16] = "", path[4096] = "";
  if (sscanf((const char*)image, "%15s %15s %4095s", magic, arch, path) != 3 || strcmp(magic, "GTCOFAKE")) return INVALID_IMAGE;
  int number = atoi(arch + 3);
  Device& d = device(context->device);
  bool exact = arch[strlen(arch) - 1] == 'a';
  if (number / 10 != d.major || (exact ? number % 10 != d.minor : number % 10 > d.minor)) return NO_BINARY;
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!library) { fault(std::string("the image's kernels cannot be opened: ") + dlerror()); return INVALID_IMAGE; }
  modules.push_back(std::make_unique<Module>(Module{context, library}));
  *out = modules.back().get();
  return OK;
}

API int cuModuleUnload(Module* module) {
  BEGIN_FREE;
  if (!known(modules, module) || !module->alive) { fault("cuModuleUnload of what is not loaded"); return INVALID_HANDLE; }
  if (stack.empty() || stack.back() != module->context) { fault("cuModuleUnload in another context"); return INVALID_CONTEXT; }
  if (in_use(0, 0, module)) fault("a module is unloaded while a kernel of it is under way");
  module->alive = false;
  dlclose(module->library);
  END_FREE;
}

API int cuModuleGetFunction(Function** out, Module* module, const char* name) {
  BEGIN;
  IN_CONTEXT;
  CHECK(modules, module, "the module");
  void* run = dlsym(module->library, name);
  int* count = (int*)dlsym(module->library, (std::string(name) + "_count").c_str());
  if (!run || !count) return NOT_FOUND;
  functions.push_back(std::make_unique<Function>(Function{module, name, (HostKernel)run, *count}));
  *out = functions.back().get();
  return OK;
}

API int cuFuncSetAttribute(Function* f, int attribute, int value) {
  BEGIN;
  IN_CONTEXT;
  if (!known(functions, f) || !f->module->alive) return INVALID_HANDLE;
  if (attribute != 8 || value < 0 || (unsigned)value > device(context->device).shared_limit) return INVALID_VALUE;
  f->shared_limit = (unsigned)value;
  return OK;
}

API int cuStreamCreate(Stream** out, unsigned flags) {
  BEGIN;
  IN_CONTEXT;
  streams.push_back(std::make_unique<Stream>(Stream{context, flags}));
  *out = streams.back().get();
  return OK;
}

API int cuStreamDestroy_v2(Stream* s) {
  BEGIN_FREE;
  if (!known(streams, s) || !s->alive) { fault("cuStreamDestroy of what is no stream"); return INVALID_HANDLE; }
  s->alive = false;  // what is in it still runs
  END_FREE;
}

API int cuStreamSynchronize(Stream* given) {
  BEGIN_FREE;
  ON_STREAM;
  run_until({s, s->enqueued});
  if (context->broken) return context->broken;
  END_FREE;
}

API int cuStreamGetCtx(Stream* given, Context** out) {
  BEGIN;
  if ((uintptr_t)given <= 2) { IN_CONTEXT; *out = context; return OK; }
  if (!known(streams, given) || !given->alive) return INVALID_HANDLE;
  *out = given->context;
  return OK;
}

API int cuStreamIsCapturing(Stream* given, int* status) { BEGIN; ON_STREAM; *status = s->capturing; return OK; }

API int cuStreamWaitEvent(Stream* given, Event* event, unsigned flags) {
  BEGIN;
  ON_STREAM;
  CHECK(events, event, "the event");
  if (flags) return INVALID_VALUE;
  if (s->capturing && !event->captured) { fault("a captured stream waits for an event outside of its capture"); return CAPTURE_ISOLATION; }
  push(s, {{event->at}});
  return OK;
}

API int cuEventCreate(Event** out, unsigned flags) {
  BEGIN;
  IN_CONTEXT;
  events.push_back(std::make_unique<Event>(Event{context, flags}));
  *out = events.back().get();
  return OK;
}

API int cuEventDestroy_v2(Event* event) {
  BEGIN_FREE;
  if (!known(events, event) || !event->alive) { fault("cuEventDestroy of what is no event"); return INVALID_HANDLE; }
  event->alive = false;
  END_FREE;
}

API int cuEventRecord(Event* event, Stream* given) {
  BEGIN;
  ON_STREAM;
  CHECK(events, event, "the event");
  event->captured = s->capturing;
  event->time = -1;
  event->at = push(s, {{}, [event] { event->time = clock_ms; }});
  return OK;
}

API int cuEventSynchronize(Event* event) {
  BEGIN_FREE;
  IN_CONTEXT;
  CHECK(events, event, "the event");
  run_until(event->at);
  if (context->broken) return context->broken;
  END_FREE;
}

API int cuEventElapsedTime(float* milliseconds, Event* start, Event* end) {
  BEGIN;
  IN_CONTEXT;
  CHECK(events, start, "the event");
  CHECK(events, end, "the event");
  if ((start->flags | end->flags) & DISABLE_TIMING) return INVALID_HANDLE;
  if (start->time < 0 || end->time < 0) return NOT_READY;
  *milliseconds = (float)(end->time - start->time);
  return OK;
}

API int cuLaunchKernel(Function* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                       Stream* given, void** params, void** extra) {
  BEGIN;
  ON_STREAM;
  const unsigned grid[3] = {gx, gy, gz}, block[3] = {bx, by, bz};
  Launch launch;
  if (extra) return INVALID_VALUE;
  if (int wrong = check_launch(context, f, grid, block, shared, params, &launch)) return wrong;
  push(s, launch_of(context, launch));
  return OK;
}

API int cuGraphCreate(Graph** out, unsigned flags) {
  BEGIN;
  if (flags) return INVALID_VALUE;
  graphs.push_back(std::make_unique<Graph>());
  *out = graphs.back().get();
  return OK;
}

API int cuGraphDestroy(Graph* graph) {
  BEGIN_FREE;
  if (!known(graphs, graph) || !graph->alive) { fault("cuGraphDestroy of what is no graph"); return INVALID_HANDLE; }
  graph->alive = false;
  END_FREE;
}

#ifndef FAKE_OLD_DRIVER  // CUDA 11 has not got this one
API int cuGraphAddKernelNode_v2(Node** out, Graph* graph, Node* const* before, size_t count, const NodeParams* what) {
  BEGIN;
  IN_CONTEXT;
  if (!known(graphs, graph) || !graph->alive) { fault("a node for what is no graph"); return INVALID_HANDLE; }
  auto node = std::make_unique<Node>();
  node->graph = graph;
  if (int wrong = check_launch(context, what->function, what->grid, what->block, what->shared, what->params, &node->launch)) return wrong;
  node->before.assign(before, before + count);
  for (Node* b : node->before)
    if (b->graph != graph) return INVALID_VALUE;
  graph->nodes.push_back(std::move(node));
  *out = graph->nodes.back().get();
  return OK;
}
#endif

API int cuGraphInstantiateWithFlags(Executable** out, Graph* graph, unsigned long long flags) {
  BEGIN;
  IN_CONTEXT;
  if (flags || !known(graphs, graph) || !graph->alive) return INVALID_VALUE;
  auto made = std::make_unique<Executable>();
  made->context = context;
  std::set<Node*> placed;  // an order that the edges alone allow: of those that may come next, a random one
  while (placed.size() < graph->nodes.size()) {
    std::vector<Node*> able;
    for (auto& node : graph->nodes) {
      bool may = !placed.count(node.get());
      for (Node* b : node->before) may = may && placed.count(b);
      if (may) able.push_back(node.get());
    }
    Node* next = able[choice() % able.size()];
    placed.insert(next);
    made->order.push_back(next);
    made->launches[next] = next->launch;
  }
  executables.push_back(std::move(made));
  *out = executables.back().get();
  return OK;
}

API int cuGraphExecDestroy(Executable* e) {
  BEGIN_FREE;
  if (!known(executables, e) || !e->alive) { fault("cuGraphExecDestroy of what is no graph"); return INVALID_HANDLE; }
  for (auto& p : e->running)
    if (!reached(p)) fault("a graph is destroyed while it runs");
  e->alive = false;
  END_FREE;
}

API int cuGraphExecKernelNodeSetParams_v2(Executable* e, Node* node, const NodeParams* what) {
  BEGIN;
  IN_CONTEXT;
  CHECK(executables, e, "the graph");
  if (!e->launches.count(node)) return INVALID_VALUE;
  return check_launch(context, what->function, what->grid, what->block, what->shared, what->params, &e->launches[node]);
}

API int cuGraphLaunch(Executable* e, Stream* given) {
  BEGIN;
  ON_STREAM;
  CHECK(executables, e, "the graph");
  Point last{s, s->enqueued};
  bool first = true;
  for (Node* node : e->order) {
    Operation operation = launch_of(context, e->launches[node]);
    if (first) operation.after = e->running;  // one launch of a graph after the other
    first = false;
    last = push(s, std::move(operation));
  }
  e->running = {last};
  return OK;
}

// ---- what tests ask of it ----

API void fake_reset(int count, int major, int minor, unsigned seed) {
  std::lock_guard<std::recursive_mutex> held(lock);
  for (auto& s : streams) run_until({s.get(), s->enqueued});
  visible = count;
  faults.clear();
  for (int i = 0; i < (count > (int)devices.size() ? count : (int)devices.size()); ++i) {
    Device& d = device(i);
    for (auto& [start, a] : d.allocations)
      if (a.alive) release(start, nullptr);
    d.major = major;
    d.minor = minor;
    d.memory = 1 << 30;
    d.context.users = d.context.broken = 0;
    d.context.legacy = nullptr;
  }
  stack.clear();
  events.clear(); modules.clear(); functions.clear(); executables.clear(); graphs.clear(); streams.clear();
  faults.clear();
  failed_call.clear();
  calls = copies = 0;
  fail_at = fail_after = -1;
  kernel_fault = 0;
  initialized = false;
  version = 13000;
  choice.seed(seed);
}

API void fake_device(int ordinal, int major, int minor, size_t memory) {
  std::lock_guard<std::recursive_mutex> held(lock);
  Device& d = device(ordinal);
  d.major = major; d.minor = minor; d.memory = memory;
}
API void fake_version(int value) { version = value; }
API long fake_calls() { return calls; }
API long fake_copies() { return copies; }  // that were put into streams
// The n-th call from now fails, n from 1; 0 none.
API void fake_fail(long n, int code) { fail_at = n ? calls + n : -1; fail_code = code; failed_call.clear(); }
// The n-th call of that function from now fails, n from 1.
API void fake_fail_call(const char* name, long n, int code) { fail_name = name; fail_after = n - 1; fail_code = code; failed_call.clear(); }
API const char* fake_failed() { return failed_call.c_str(); }
API void fake_kernel_fault(int n) { kernel_fault = n; }
API const char* fake_faults() { return faults.c_str(); }

// Lines of what a program has taken and not given back, without what fake_alloc and fake_stream gave.
API const char* fake_live() {
  std::lock_guard<std::recursive_mutex> held(lock);
  answer.clear();
  auto count = [](const char* what, size_t n) { if (n) answer += std::to_string(n) + " " + what + "\n"; };
  size_t memory = 0, contexts = 0, n_streams = 0, n_events = 0, n_modules = 0, n_graphs = 0, n_executables = 0;
  for (auto& d : devices) {
    for (auto& [start, a] : d->allocations) memory += a.alive && !a.user;
    contexts += (size_t)d->context.users;
  }
  for (auto& x : streams) n_streams += x->alive && !x->user;
  for (auto& x : events) n_events += x->alive;
  for (auto& x : modules) n_modules += x->alive;
  for (auto& x : graphs) n_graphs += x->alive;
  for (auto& x : executables) n_executables += x->alive;
  count("pieces of memory", memory);
  count("uses of a primary context", contexts);
  count("streams", n_streams);
  count("events", n_events);
  count("modules", n_modules);
  count("graphs", n_graphs);
  count("executable graphs", n_executables);
  count("contexts on this thread's stack", stack.size());
  return answer.c_str();
}

API uintptr_t fake_alloc(int ordinal, size_t bytes) {
  std::lock_guard<std::recursive_mutex> held(lock);
  uintptr_t p = 0;
  return allocate(device(ordinal), bytes, &p, true) == OK ? p : 0;
}
API void fake_free(uintptr_t p) { std::lock_guard<std::recursive_mutex> held(lock); release(p, nullptr); }
API void fake_write(uintptr_t to, const void* from, size_t bytes) {
  std::lock_guard<std::recursive_mutex> held(lock);
  reach(true); memcpy((void*)to, from, bytes); reach(false);
}
API void fake_read(void* to, uintptr_t from, size_t bytes) {
  std::lock_guard<std::recursive_mutex> held(lock);
  reach(true); memcpy(to, (void*)from, bytes); reach(false);
}
API void* fake_stream(int ordinal, unsigned flags) {
  std::lock_guard<std::recursive_mutex> held(lock);
  streams.push_back(std::make_unique<Stream>(Stream{&device(ordinal).context, flags}));
  streams.back()->user = true;
  return streams.back().get();
}
// A write to device memory that waits in the stream.
API void fake_write_later(Stream* given, int ordinal, uintptr_t to, const void* from, size_t bytes) {
  std::lock_guard<std::recursive_mutex> held(lock);
  std::vector<char> data((const char*)from, (const char*)from + bytes);
  push(stream_of(&device(ordinal).context, given), {{}, [=] { memcpy((void*)to, data.data(), bytes); }});
}
API void fake_sync(Stream* given, int ordinal) {
  std::lock_guard<std::recursive_mutex> held(lock);
  Stream* s = stream_of(&device(ordinal).context, given);
  run_until({s, s->enqueued});
}
API size_t fake_pending(Stream* given, int ordinal) {
  std::lock_guard<std::recursive_mutex> held(lock);
  return stream_of(&device(ordinal).context, given)->queue.size();
}
API void fake_capture(Stream* s, int on) { std::lock_guard<std::recursive_mutex> held(lock); s->capturing = on; }
// What was captured, once more.
API void fake_replay(Stream* s) {
  std::lock_guard<std::recursive_mutex> held(lock);
  for (auto& operation : s->captured) push(s, operation);
}
// Makes that device's context current (once more), or takes it away: what a framework does.
API void fake_push(int ordinal) { Context* c = &device(ordinal).context; ++c->users; stack.push_back(c); }
API void fake_pop(int ordinal) { --device(ordinal).context.users; stack.pop_back(); }
API int fake_current() { return stack.empty() ? -1 : stack.back()->device; }
