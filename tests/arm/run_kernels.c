/* Runs kernels of a library, as a program that qemu runs: run_kernels LIBRARY JOBS RESULTS.
 *
 * JOBS has for each kernel: its symbol (64 bytes); int64 numbers of inputs, bytes of the output, bytes of scratch, tasks,
 * bytes by which the output is off a line; each input's bytes and data. RESULTS has the outputs, one after the other.
 * Every buffer ends before an inaccessible page, and bytes around outputs are checked. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define PAGE 4096
#define LINE 64
#define GUARD 256
#define MOST 32

static void fail(const char* what, const char* symbol) {
  fprintf(stderr, "%s: %s\n", symbol, what);
  exit(1);
}

typedef struct {
  char *whole, *start, *end;
  size_t mapped;
} memory;

/* `bytes` after GUARD bytes and `off` more; the end of their last line is that of the memory. */
static memory make(size_t bytes, size_t off) {
  const size_t room = (GUARD + off + bytes + LINE - 1) / LINE * LINE;
  const size_t pages = (room + PAGE - 1) / PAGE * PAGE;
  memory m;
  m.mapped = pages + PAGE;
  m.whole = mmap(NULL, m.mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (m.whole == MAP_FAILED || mprotect(m.whole + pages, PAGE, PROT_NONE)) fail("no memory", "");
  m.end = m.whole + pages;
  memset(m.end - room, 0xa5, room);
  m.start = m.end - room + GUARD + off;
  return m;
}

static void check(const memory* m, size_t bytes, const char* what, const char* symbol) {
  for (const char* p = m->start - GUARD; p < m->start; ++p)
    if ((unsigned char)*p != 0xa5) fail(what, symbol);
  for (const char* p = m->start + bytes; p < m->end; ++p)
    if ((unsigned char)*p != 0xa5) fail(what, symbol);
}

static void call(void* f, void** p, int n, int64_t begin, int64_t end) {
  /* AArch64 passes eight arguments in registers and the others on the stack, as for any C function. */
  typedef void* v;
  switch (n) {
#define A(i) p[i]
    case 2: ((void (*)(v, v, int64_t, int64_t))f)(A(0), A(1), begin, end); return;
    case 3: ((void (*)(v, v, v, int64_t, int64_t))f)(A(0), A(1), A(2), begin, end); return;
    case 4: ((void (*)(v, v, v, v, int64_t, int64_t))f)(A(0), A(1), A(2), A(3), begin, end); return;
    case 5: ((void (*)(v, v, v, v, v, int64_t, int64_t))f)(A(0), A(1), A(2), A(3), A(4), begin, end); return;
    case 6: ((void (*)(v, v, v, v, v, v, int64_t, int64_t))f)(A(0), A(1), A(2), A(3), A(4), A(5), begin, end); return;
    case 7:
      ((void (*)(v, v, v, v, v, v, v, int64_t, int64_t))f)(A(0), A(1), A(2), A(3), A(4), A(5), A(6), begin, end);
      return;
    case 8:
      ((void (*)(v, v, v, v, v, v, v, v, int64_t, int64_t))f)(A(0), A(1), A(2), A(3), A(4), A(5), A(6), A(7), begin, end);
      return;
    case 9:
      ((void (*)(v, v, v, v, v, v, v, v, v, int64_t, int64_t))f)(A(0), A(1), A(2), A(3), A(4), A(5), A(6), A(7), A(8),
                                                                 begin, end);
      return;
    case 10:
      ((void (*)(v, v, v, v, v, v, v, v, v, v, int64_t, int64_t))f)(A(0), A(1), A(2), A(3), A(4), A(5), A(6), A(7), A(8),
                                                                    A(9), begin, end);
      return;
    case 11:
      ((void (*)(v, v, v, v, v, v, v, v, v, v, v, int64_t, int64_t))f)(A(0), A(1), A(2), A(3), A(4), A(5), A(6), A(7),
                                                                       A(8), A(9), A(10), begin, end);
      return;
    case 12:
      ((void (*)(v, v, v, v, v, v, v, v, v, v, v, v, int64_t, int64_t))f)(A(0), A(1), A(2), A(3), A(4), A(5), A(6), A(7),
                                                                          A(8), A(9), A(10), A(11), begin, end);
      return;
#undef A
  }
  fail("too many arguments", "");
}

int main(int count, char** arguments) {
  if (count != 4) return 2;
  void* library = dlopen(arguments[1], RTLD_NOW);
  if (!library) fail(dlerror(), arguments[1]);
  FILE *jobs = fopen(arguments[2], "rb"), *results = fopen(arguments[3], "wb");
  if (!jobs || !results) return 2;
  char symbol[64];
  while (fread(symbol, sizeof symbol, 1, jobs) == 1) {
    int64_t head[5], bytes;
    memory inputs[MOST];
    char* copies[MOST];
    size_t sizes[MOST];
    void* pointers[MOST + 2];
    if (fread(head, sizeof head, 1, jobs) != 1 || head[0] > MOST) fail("a bad job", symbol);
    const int n = (int)head[0];
    for (int i = 0; i < n; ++i) {
      if (fread(&bytes, sizeof bytes, 1, jobs) != 1) fail("a bad job", symbol);
      sizes[i] = (size_t)bytes;
      /* at the begin of a line, as the runtime gives them */
      inputs[i] = make((sizes[i] + LINE - 1) / LINE * LINE, 0);
      if (bytes && fread(inputs[i].start, sizes[i], 1, jobs) != 1) fail("a bad job", symbol);
      copies[i] = malloc(sizes[i] + 1);
      memcpy(copies[i], inputs[i].start, sizes[i]);
      pointers[i] = inputs[i].start;
    }
    memory out = make((size_t)head[1], (size_t)head[4]);
    memory work = make((size_t)head[2], 0);
    memset(work.start, 0xff, (size_t)head[2]); /* NaN */
    pointers[n] = out.start;
    pointers[n + 1] = work.start;
    void* kernel = dlsym(library, symbol);
    if (!kernel) fail("no such kernel", symbol);
    const int64_t tasks = head[3], middle = tasks / 2;
    call(kernel, pointers, n + 2, middle, tasks);
    if (middle) call(kernel, pointers, n + 2, 0, middle);
    check(&out, (size_t)head[1], "bytes around the output were overwritten", symbol);
    check(&work, (size_t)head[2], "bytes around the scratch were overwritten", symbol);
    for (int i = 0; i < n; ++i) {
      if (memcmp(copies[i], inputs[i].start, sizes[i])) fail("the kernel wrote to an input", symbol);
      munmap(inputs[i].whole, inputs[i].mapped);
      free(copies[i]);
    }
    if (head[1]) fwrite(out.start, (size_t)head[1], 1, results);
    munmap(out.whole, out.mapped);
    munmap(work.whole, work.mapped);
  }
  return fclose(results) ? 2 : 0;
}
