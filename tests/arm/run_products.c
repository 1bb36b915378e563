/* Products and convolutions of a library of any size, as a program that qemu runs: run_products JOBS RESULTS.
 *
 * JOBS has for each job ten int64: 1 for a convolution or 0 for a product, n, and the eight fields of a
 * gtco_convolution; of a product m = batch and k = channels. Then come the elements of A (or of the images) and of B
 * (or of the filter). RESULTS has for each job its number of configs, and for each of these 32 bytes with the kernel's
 * name and the output. The configs are the choice, and up to MOST of the candidates from all of them. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "products.h"

#define ROOM 512
#define MOST 6
#define NAME 32

static void fail(const char* what) {
  fprintf(stderr, "%s\n", what);
  exit(1);
}

static float* room(int64_t elements) { return aligned_alloc(64, (size_t)(elements * 4 + 63) / 64 * 64); }

static float* read_array(FILE* file, int64_t elements) {
  float* data = room(elements);
  if (fread(data, 4, (size_t)elements, file) != (size_t)elements) fail("the jobs end too early");
  return data;
}

int main(int count, char** args) {
  FILE *jobs = count == 3 ? fopen(args[1], "rb") : NULL, *results = count == 3 ? fopen(args[2], "wb") : NULL;
  gtco_products* p = gtco_products_open(2);
  if (!jobs || !results || !p) fail("a file or the library cannot be opened");
  int64_t job[10];
  static gtco_product_config configs[ROOM];
  static double seconds[ROOM];
  while (fread(job, sizeof job, 1, jobs) == 1) {
    const int convolves = job[0] != 0;
    const int64_t n = job[1];
    gtco_convolution c;
    memcpy(&c, job + 2, sizeof c);
    int64_t rows = c.batch, depth = c.channels, read = c.batch, out_h, out_w;
    if (convolves) {
      gtco_convolutions_output(&c, &out_h, &out_w);
      rows *= out_h * out_w;
      depth *= c.kernel_h * c.kernel_w;
      read *= c.height * c.width;
    }
    float *a = read_array(jobs, read * c.channels), *b = read_array(jobs, depth * n), *out = room(rows * n);
    const int64_t bytes = convolves ? gtco_convolutions_packed_bytes(&c, n) : gtco_products_packed_bytes(n, depth);
    float* packed = room(bytes / 4);
    if (convolves ? gtco_convolutions_pack(b, &c, n, packed) : gtco_products_pack(b, n, depth, packed)) fail("pack");
    const int64_t found = convolves ? gtco_convolutions_candidates(p, &c, n, ROOM, configs + 1, seconds)
                                    : gtco_products_candidates(p, rows, n, depth, ROOM - 1, configs + 1, seconds);
    if (found < 1 || found >= ROOM) fail("candidates");
    if (convolves ? gtco_convolutions_choose(p, &c, n, configs, seconds)
                  : gtco_products_choose(p, rows, n, depth, configs, seconds))
      fail("choose");
    const int64_t step = (found + MOST - 1) / MOST, tried = 1 + (found + step - 1) / step;
    fwrite(&tried, sizeof tried, 1, results);
    for (int64_t i = 0; i < tried; i++) {
      const gtco_product_config* config = configs + (i ? 1 + (i - 1) * step : 0);
      char name[NAME] = {0};
      strncpy(name, gtco_products_kernel_name(config->kernel), NAME - 1);
      memset(out, 0xff, (size_t)(rows * n) * 4);  // NaN
      if (convolves ? gtco_convolutions_set_config(p, &c, n, config)
                    : gtco_products_set_config(p, rows, n, depth, config))
        fail(gtco_products_error(p));
      if (gtco_products_run(p, a, packed, out)) fail(gtco_products_error(p));
      fwrite(name, NAME, 1, results);
      fwrite(out, 4, (size_t)(rows * n), results);
    }
    free(a), free(b), free(out), free(packed);
  }
  gtco_products_close(p);
  return fclose(results) ? 1 : 0;
}
