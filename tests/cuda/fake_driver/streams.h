// Streams of the fake driver: their deferred work, when the turn of each operation comes, and how a kernel then runs.
// See fake_driver.cpp, which includes it.
#pragma once

#include "machine.h"

namespace {

Stream* stream_of(Context* context, Stream* given) {
  if ((uintptr_t)given > 2) return given;
  if (!context->legacy) {
    streams.push_back(std::make_unique<Stream>(Stream{context, BLOCKING}));
    context->legacy = streams.back().get();
    context->legacy->user = true;
  }
  return context->legacy;
}

// The legacy stream waits for all blocking ones, so it may not be used while one of them is captured.
bool implicit(const Stream* s) {
  if (s != s->context->legacy) return false;
  for (auto& other : streams)
    if (other->context == s->context && other.get() != s && other->flags == BLOCKING && other->capturing) {
      fault("the legacy stream is used while a stream that it waits for is captured");
      return true;
    }
  return false;
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

// Runs work of all streams, with a random order between them, until that point is reached.
void run_until(const Point& goal) {
  while (!reached(goal)) {
    std::vector<Stream*> able;
    for (auto& s : streams)
      if (ready(*s)) able.push_back(s.get());
    if (able.empty()) { fault("streams wait for each other"); return; }
    step(*able[choice() % able.size()]);
  }
}

// True if work in flight uses this memory or a kernel of this module.
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

// The model's one kernel: its parameters are at the place to which they were copied. Pointers to device memory must be
// live; the memory that they lead to is not checked.
void execute_cooperative(Context* context, const Launch& l) {
  if (!l.function->module->alive) { fault(l.function->name + " runs after its module was unloaded"); return; }
  bool good = true;
  for (auto& copy : l.copies)
    for (uint64_t p : copy)
      if (in_device_range(p)) good &= valid(p, 1, context->device, l.function->name);
  if (kernel_fault > 0 && --kernel_fault == 0) good = false;
  if (!good) { context->broken = ILLEGAL_ADDRESS; return; }
  auto copies = l.copies;
  std::vector<void*> arguments;
  for (auto& copy : copies) arguments.push_back(copy.data());
  l.function->run(arguments.data(), l.grid, l.threads, l.shared);
}

void execute(Context* context, const Launch& l) {
  if (l.function->sizes) return execute_cooperative(context, l);
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
  for (auto& copy : launch.copies)
    for (uint64_t p : copy) operation.memory.push_back(p);  // a number is not an address
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
  launch->copies.clear();
  for (int i = 0; i < f->count; ++i) {
    if (!f->sizes) { launch->arguments.push_back(*(void**)params[i]); continue; }
    launch->copies.emplace_back((size_t)(f->sizes[i] + 7) / 8);
    memcpy(launch->copies.back().data(), params[i], (size_t)f->sizes[i]);
  }
  return OK;
}

}  // namespace
