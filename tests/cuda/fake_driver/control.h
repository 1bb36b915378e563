// The functions fake_* by which tests use the fake driver. See fake_driver.cpp, which includes it.
#pragma once

#include "machine.h"

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
    d.cooperative = 1;
    d.room = 2;
    d.context.users = d.context.broken = 0;
    d.context.legacy = nullptr;
  }
  stack.clear();
  capture_mode = 0;
  events.clear(); modules.clear(); functions.clear(); executables.clear(); graphs.clear(); streams.clear();
  faults.clear();
  failed_call.clear();
  calls = copies = 0;
  fail_at = fail_after = -1;
  kernel_fault = 0;
  initialized = false;
  initialized_in = 0;
  version = 13000;
  choice.seed(seed);
}

API void fake_device(int ordinal, int major, int minor, size_t memory) {
  std::lock_guard<std::recursive_mutex> held(lock);
  Device& d = device(ordinal);
  d.major = major; d.minor = minor; d.memory = memory;
}
// Sets whether it launches cooperatively, and how many blocks a multiprocessor of it holds.
API void fake_cooperative(int ordinal, int can, int room) { device(ordinal).cooperative = can; device(ordinal).room = room; }
// Live device memory: the emulator must know it if a kernel finds its pointers itself.
API int fake_regions(void** begin, size_t* bytes, int most) {
  std::lock_guard<std::recursive_mutex> held(lock);
  int n = 0;
  for (auto& d : devices)
    for (auto& [start, a] : d->allocations)
      if (a.alive && n++ < most) { begin[n - 1] = (void*)start; bytes[n - 1] = a.bytes; }
  return n;
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

// Lines of what a program has taken and not released, except from fake_alloc and fake_stream.
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
  count("as this thread's capture mode", (size_t)capture_mode);
  return answer.c_str();
}

API uintptr_t fake_alloc(int ordinal, size_t bytes) {
  std::lock_guard<std::recursive_mutex> held(lock);
  uintptr_t p = 0;
  return allocate(device(ordinal), bytes, &p, true) == OK ? p : 0;
}
// Memory of a context that is not the device's primary one; kernels of the primary one cannot access it.
API uintptr_t fake_alloc_foreign(int ordinal, size_t bytes) {
  uintptr_t p = fake_alloc(ordinal, bytes);
  std::lock_guard<std::recursive_mutex> held(lock);
  int found = -1;
  find(p, &found)->foreign = true;
  return p;
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
// A write to device memory that is deferred in the stream.
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
// Enqueues the captured work once more.
API void fake_replay(Stream* s) {
  std::lock_guard<std::recursive_mutex> held(lock);
  for (auto& operation : s->captured) push(s, operation);
}
// Makes that device's context current (once more) or not current, as a framework does.
API void fake_push(int ordinal) { Context* c = &device(ordinal).context; ++c->users; stack.push_back(c); }
API void fake_pop(int ordinal) { --device(ordinal).context.users; stack.pop_back(); }
API int fake_current() { return stack.empty() ? -1 : stack.back()->device; }
