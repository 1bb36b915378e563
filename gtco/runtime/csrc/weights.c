#define _GNU_SOURCE
#include "weights.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "error.h"

/* The file: magic (8 bytes), bytes of data (8), id (32), zeros up to 4096; then the data. */
#define HEADER_BYTES 4096
static const char MAGIC[8] = {'G', 'T', 'C', 'O', 'W', 'G', 'T', '1'};

/* The folder to which the library's path belongs, if it was loaded by a relative one: the program may go to another
 * folder before it opens the model. Empty for an absolute path. */
static char loaded_from[PATH_MAX];

__attribute__((constructor)) static void note_folder(void) {
  Dl_info library;
  if (gtco_the_plan.weights || !dladdr((const void*)&gtco_the_plan, &library)) return;
  if (!library.dli_fname || library.dli_fname[0] == '/') return;
  if (!getcwd(loaded_from, sizeof loaded_from - 1)) loaded_from[0] = '\0';
  if (loaded_from[0]) strcat(loaded_from, "/");
}

static gtco_status check_header(const gtco_plan* plan, int fd, const char* path, char* message) {
  unsigned char header[16 + GTCO_ID_BYTES];
  int64_t bytes;
  struct stat info;
  const ssize_t got = fstat(fd, &info) == 0 ? pread(fd, header, sizeof header, 0) : -1;
  if (got < 0)
    return gtco_fail(message, GTCO_ERROR_WEIGHTS, "the weights file '%s' cannot be read: %s", path, strerror(errno));
  if (got != (ssize_t)sizeof header)
    return gtco_fail(message, GTCO_ERROR_WEIGHTS, "the weights file '%s' is truncated; copy it again beside the library",
                     path);
  memcpy(&bytes, header + 8, sizeof bytes);
  if (memcmp(header, MAGIC, sizeof MAGIC) != 0)
    return gtco_fail(message, GTCO_ERROR_WEIGHTS, "'%s' is not a gtco weights file", path);
  if (memcmp(header + 16, plan->id, GTCO_ID_BYTES) != 0 || bytes != plan->weights_bytes)
    return gtco_fail(message, GTCO_ERROR_WEIGHTS,
                     "the weights file '%s' belongs to another compile; copy the one made with this library", path);
  if (info.st_size < HEADER_BYTES + plan->weights_bytes)
    return gtco_fail(message, GTCO_ERROR_WEIGHTS, "the weights file '%s' is truncated: %lld bytes of %lld", path,
                     (long long)info.st_size, (long long)(HEADER_BYTES + plan->weights_bytes));
  return GTCO_OK;
}

/* Asks Linux to read the file in pages of 2 MB. Reading weights then misses the TLB less often. A file system that
 * cannot do that refuses, which does no harm. */
static void ask_for_huge_pages(const unsigned char* data, int64_t bytes) {
  const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), begin = ((uintptr_t)data + page - 1) & ~(page - 1);
  const uintptr_t end = (uintptr_t)data + (uintptr_t)bytes;
  if (end >= begin + HUGE_PAGE) madvise((void*)begin, end - begin, MADV_HUGEPAGE);
}

gtco_status gtco_weights_open(const gtco_plan* plan, gtco_weights* weights, char* message) {
  memset(weights, 0, sizeof *weights);
  if (plan->weights) {
    weights->data = plan->weights;
    ask_for_huge_pages(weights->data, plan->weights_bytes);
    return GTCO_OK;
  }
  if (plan->weights_bytes == 0) return GTCO_OK;
  Dl_info library;
  char path[PATH_MAX];
  if (!dladdr((const void*)&gtco_the_plan, &library) || !library.dli_fname)
    return gtco_fail(message, GTCO_ERROR_WEIGHTS, "cannot tell where the library is, so its weights file is not found");
  const unsigned char* id = plan->id; /* publish.py gives the file its name */
  if (snprintf(path, sizeof path, "%s%s.weights-%02x%02x%02x%02x%02x%02x%02x%02x", loaded_from, library.dli_fname, id[0], id[1], id[2],
               id[3], id[4], id[5], id[6], id[7]) >= (int)sizeof path)
    return gtco_fail(message, GTCO_ERROR_WEIGHTS, "the path of the weights file is too long");
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0)
    return gtco_fail(message, GTCO_ERROR_WEIGHTS,
                     "the weights file '%s' cannot be opened (%s); it belongs beside the library", path, strerror(errno));
  gtco_status status = check_header(plan, fd, path, message);
  if (status == GTCO_OK) {
    weights->bytes = (size_t)(HEADER_BYTES + plan->weights_bytes);
    weights->mapping = mmap(NULL, weights->bytes, PROT_READ, MAP_PRIVATE, fd, 0);
    if (weights->mapping == MAP_FAILED) {
      weights->mapping = NULL;
      status = gtco_fail(message, GTCO_ERROR_MEMORY, "mapping '%s' failed: %s", path, strerror(errno));
    } else {
      weights->data = (const unsigned char*)weights->mapping + HEADER_BYTES;
      ask_for_huge_pages(weights->mapping, (int64_t)weights->bytes);
    }
  }
  close(fd);
  return status;
}

void gtco_weights_close(gtco_weights* weights) {
  if (weights->mapping) munmap(weights->mapping, weights->bytes);
  memset(weights, 0, sizeof *weights);
}
