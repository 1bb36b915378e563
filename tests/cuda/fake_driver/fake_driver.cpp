// A libcuda.so.1 without a GPU: the functions of the NVIDIA driver that gtco's runtime calls, on host memory, as strict
// as the driver's manual allows. Work in streams is deferred until something waits for it, and then steps of different
// streams run in a random order. The host cannot access device memory except while such work runs. Every handle is
// checked for its context and its life. Each fault of a program is a line of fake_faults(), and each thing that it has
// not released is a line of fake_live(). fake_fail(n, code) makes the n-th call from now fail.
//
// An image is "GTCOFAKE ARCH PATH", or PTX of the three lines ".version 9.0", ".target sm_80" and "// PATH"; with a
// PATH that is not absolute its compilation fails, and the log has that line. Kernels are functions of the shared
// object PATH, `void KERNEL(void** arguments, const unsigned* grid, unsigned threads, unsigned shared)`, and an int
// `KERNEL_count` says how many arguments it has. A kernel with `int KERNEL_sizes[]` is launched cooperatively. It gets
// copies of its parameters, which have these sizes in bytes, and no pointers to them.
#include "streams.h"

API int cuInit(unsigned flags) {
  Call call(__func__);
  if (call.fails) return (int)fail_code;
  if (flags) return INVALID_VALUE;
  if (initialized_in && initialized_in != getpid()) return NOT_INITIALIZED;  // the driver does not survive a fork
  if (!visible) return NO_DEVICE;
  for (int i = 0; i < visible; ++i) device(i);
  initialized = true;
  initialized_in = getpid();
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
    case 97: *value = (int)d.shared_limit(); return OK;
    case 16: *value = MULTIPROCESSORS; return OK;
    case 95: *value = d.cooperative; return OK;
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

API int cuThreadExchangeStreamCaptureMode(int* mode) {
  BEGIN_FREE;
  std::swap(*mode, capture_mode);
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
  uintptr_t start = d.next + 256;  // never at the start of a page: memory is aligned to exactly 256 bytes
  size_t pages = (256 + bytes + PAGE - 1) / PAGE * PAGE;
  d.next += pages + PAGE;  // an inaccessible page after each, and no page is used twice
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
  if (breaks_capture(__func__)) return CAPTURE_UNSUPPORTED;
  if (int wrong = release(p, context)) return wrong;
  if (context->broken) return context->broken;
  END_FREE;
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
  CHECK(streams, s, "a stream")                                              \
  if (implicit(s)) return CAPTURE_IMPLICIT

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
API int cuMemsetD8Async(uintptr_t to, unsigned char value, size_t bytes, Stream* given) {
  BEGIN;
  ON_STREAM;
  if (!in_device_range(to)) { fault("cuMemsetD8Async: host memory"); return INVALID_VALUE; }
  push(s, {{}, [=] {
    if (valid(to, bytes, context->device, "cuMemsetD8Async")) memset((void*)to, value, bytes);
  }, {to}});
  return OK;
}

API int cuPointerGetAttributes(unsigned count, int* attributes, void** values, uintptr_t pointer) {
  BEGIN;
  int ordinal = -2;
  Allocation* a = find(pointer, &ordinal);
  bool here = a && a->alive;
  static int elsewhere;  // a context that is not the primary one of a device
  for (unsigned i = 0; i < count; ++i) switch (attributes[i]) {
      case 1: *(void**)values[i] = !here ? nullptr : a->foreign ? (void*)&elsewhere : &device(ordinal).context; break;
      case 3: *(uintptr_t*)values[i] = here && !a->foreign ? pointer : 0; break;
      case 2: *(unsigned*)values[i] = here ? 2 : 0; break;
      case 8: *(unsigned*)values[i] = 0; break;
      case 9: *(int*)values[i] = here ? ordinal : -2; break;
      default: return INVALID_VALUE;
    }
  return OK;
}

namespace {
// The image that the driver compiles from PTX. CUDA n takes versions up to n - 4: 9.0 begins with 13.0.
int compiled(const Device& d, const char* ptx, unsigned count, const int* options, void** values, char path[4096]) {
  int major = 0, minor = 0, target = 0;
  if (sscanf(ptx, ".version %d.%d\n.target sm_%d\n// %4095[^\n]", &major, &minor, &target, path) != 4) return INVALID_PTX;
  if (std::pair(major, minor) > std::pair(version / 1000 - 4, version % 1000 / 10)) return UNSUPPORTED_PTX;
  if (target > 10 * d.major + d.minor) return NO_BINARY;
  if (path[0] == '/') return OK;
  char* log = nullptr;
  for (unsigned i = 0; i < count; ++i) {
    if (options[i] == 5) log = (char*)values[i];
    if (options[i] == 6 && log) {
      snprintf(log, (size_t)values[i], "ptxas fatal   : %s\nptxas fatal   : Ptx assembly aborted due to errors\n", path);
      values[i] = (void*)strlen(log);
    }
  }
  return INVALID_PTX;
}
}  // namespace

API int cuModuleLoadDataEx(Module** out, const void* image, unsigned count, int* options, void** values) {
  BEGIN;
  IN_CONTEXT;
  char magic[16] = "", arch[16] = "", path[4096] = "";
  Device& d = device(context->device);
  if (!strncmp((const char*)image, ".version", 8)) {
    if (int wrong = compiled(d, (const char*)image, count, options, values, path)) return wrong;
  } else {
    if (sscanf((const char*)image, "%15s %15s %4095s", magic, arch, path) != 3 || strcmp(magic, "GTCOFAKE")) return INVALID_IMAGE;
    int number = atoi(arch + 3);
    bool exact = arch[strlen(arch) - 1] == 'a';
    if (number / 10 != d.major || (exact ? number % 10 != d.minor : number % 10 > d.minor)) return NO_BINARY;
  }
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
  if (breaks_capture(__func__)) return CAPTURE_UNSUPPORTED;
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
  const int* sizes = (const int*)dlsym(module->library, (std::string(name) + "_sizes").c_str());
  functions.push_back(std::make_unique<Function>(Function{module, name, (HostKernel)run, *count, sizes}));
  *out = functions.back().get();
  return OK;
}

API int cuFuncSetAttribute(Function* f, int attribute, int value) {
  BEGIN;
  IN_CONTEXT;
  if (!known(functions, f) || !f->module->alive) return INVALID_HANDLE;
  if (attribute != 8 || value < 0 || (unsigned)value > device(context->device).shared_limit()) return INVALID_VALUE;
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
  if (!known(streams, s) || !s->alive) { fault("cuStreamDestroy of what is not a stream"); return INVALID_HANDLE; }
  s->alive = false;  // the work in it still runs
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
  if (!known(events, event) || !event->alive) { fault("cuEventDestroy of what is not an event"); return INVALID_HANDLE; }
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
  if (f->sizes) fault(f->name + " is not launched cooperatively");
  push(s, launch_of(context, launch));
  return OK;
}

API int cuLaunchHostFunc(Stream* given, void (*function)(void*), void* data) {
  BEGIN;
  ON_STREAM;
  push(s, {{}, [=] { function(data); }});
  return OK;
}

API int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Function* f, int threads, size_t shared) {
  BEGIN;
  IN_CONTEXT;
  if (!known(functions, f) || !f->module->alive || f->module->context != context) return INVALID_HANDLE;
  if (threads < 1 || shared > f->shared_limit) return INVALID_VALUE;
  *blocks = device(context->device).occupancy((unsigned)shared);
  return OK;
}

// All blocks are resident at once, so there may be no more of them.
API int cuLaunchCooperativeKernel(Function* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                                  unsigned shared, Stream* given, void** params) {
  BEGIN;
  ON_STREAM;
  const unsigned grid[3] = {gx, gy, gz}, block[3] = {bx, by, bz};
  Launch launch;
  if (int wrong = check_launch(context, f, grid, block, shared, params, &launch)) return wrong;
  if (!f->sizes) { fault(f->name + " is launched cooperatively"); return INVALID_VALUE; }
  const Device& d = device(context->device);
  if (!d.cooperative || gx * gy * gz > (unsigned)(MULTIPROCESSORS * d.occupancy(shared))) return TOO_LARGE;
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
  if (!known(graphs, graph) || !graph->alive) { fault("cuGraphDestroy of what is not a graph"); return INVALID_HANDLE; }
  graph->alive = false;
  END_FREE;
}

#ifndef FAKE_OLD_DRIVER  // CUDA 11 does not have this one
API int cuGraphAddKernelNode_v2(Node** out, Graph* graph, Node* const* before, size_t count, const NodeParams* what) {
  BEGIN;
  IN_CONTEXT;
  if (!known(graphs, graph) || !graph->alive) { fault("a node for what is not a graph"); return INVALID_HANDLE; }
  auto node = std::make_unique<Node>();
  node->graph = graph;
  node->context = context;
  if (int wrong = check_launch(context, what->function, what->grid, what->block, what->shared, what->params, &node->launch)) return wrong;
  node->before.assign(before, before + count);
  for (Node* b : node->before)
    if (b->graph != graph) return INVALID_VALUE;
  graph->nodes.push_back(std::move(node));
  *out = graph->nodes.back().get();
  return OK;
}
#endif

// A programmatic edge lets a kernel begin early; here each runs when those before it have ended.
API int cuGraphAddDependencies_v2(Graph* graph, Node* const* from, Node* const* to, const EdgeData* edges, size_t count) {
  BEGIN;
  if (!known(graphs, graph) || !graph->alive) { fault("an edge for what is not a graph"); return INVALID_HANDLE; }
  for (size_t i = 0; i < count; ++i) {
    if (from[i]->graph != graph || to[i]->graph != graph) return INVALID_VALUE;
    const bool programmatic = edges && edges[i].type == 1;
    if (edges && (edges[i].to_port || edges[i].type > 1 || edges[i].from_port != edges[i].type)) return INVALID_VALUE;
    if (programmatic && device(from[i]->context->device).major < 9) {
      fault("a programmatic edge on a GPU older than sm_90");
      return INVALID_VALUE;
    }
    graph->programmatic += programmatic;
    to[i]->before.push_back(from[i]);
  }
  return OK;
}

API int cuGraphInstantiateWithFlags(Executable** out, Graph* graph, unsigned long long flags) {
  BEGIN;
  IN_CONTEXT;
  if (flags || !known(graphs, graph) || !graph->alive) return INVALID_VALUE;
  auto made = std::make_unique<Executable>();
  made->context = context;
  std::set<Node*> placed;  // an order that the edges allow: a random one of the nodes that may come next
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
  if (!known(executables, e) || !e->alive) { fault("cuGraphExecDestroy of what is not a graph"); return INVALID_HANDLE; }
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

#include "control.h"
