/* Convolutions as products whose rows are windows of images: they are checked here, and products.c runs them. */
#include "products/table.h"

#define EXPORT __attribute__((visibility("default")))

EXPORT void gtco_convolutions_output(const gtco_convolution* c, int64_t* out_h, int64_t* out_w) {
  *out_h = *out_w = 0;
  if (c->stride < 1) return;
  const int64_t high = c->height + 2 * c->padding - c->kernel_h, wide = c->width + 2 * c->padding - c->kernel_w;
  if (high >= 0) *out_h = high / c->stride + 1;
  if (wide >= 0) *out_w = wide / c->stride + 1;
}

/* Fills `problem`; 0 if these are not the sizes of a convolution. */
static int problem_of(const gtco_convolution* c, int64_t n, gtco_problem* problem) {
  const int64_t sizes[] = {c->batch, c->height, c->width, c->channels, c->kernel_h, c->kernel_w, c->stride};
  const double most = (double)((int64_t)1 << 40);
  for (int i = 0; i < 7; ++i)
    if (sizes[i] < 1 || (double)sizes[i] > most) return 0;
  if (c->padding < 0 || (double)c->padding > most) return 0;
  int64_t out_h, out_w;
  gtco_convolutions_output(c, &out_h, &out_w);
  /* Padding counts: places in it are computed too. Rows, and a window's elements, are no more than these. */
  const double high = (double)c->height + 2 * (double)c->padding, wide = (double)c->width + 2 * (double)c->padding;
  if (out_h < 1 || out_w < 1 || (double)c->batch * high * wide * (double)c->channels > most) return 0;
  *problem = (gtco_problem){.m = c->batch * out_h * out_w, .n = n, .k = c->kernel_h * c->kernel_w * c->channels};
  problem->images = *c;
  return gtco_positive(problem->m, n, problem->k);
}

static int checked(gtco_products* p, const gtco_convolution* c, int64_t n, gtco_problem* problem) {
  if (problem_of(c, n, problem)) return 0;
  return gtco_problem_fail(p,
                           "there is no convolution of images [%lld, %lld, %lld, %lld] and %lld filters of %lld x %lld, "
                           "stride %lld, padding %lld: sizes are 1 or more, a window fits a padded image, and these have "
                           "at most 2^40 elements",
                           (long long)c->batch, (long long)c->height, (long long)c->width, (long long)c->channels,
                           (long long)n, (long long)c->kernel_h, (long long)c->kernel_w, (long long)c->stride,
                           (long long)c->padding);
}

/* Behind the panels of a filter lie those of minimal filtering where it applies: [vector of columns][position][channel]
 * [lane] of G w G^T. */
static int64_t filtered_bytes(const gtco_problem* problem) {
  const gtco_convolution* c = &problem->images;
  return gtco_filters(c) ? gtco_panels_bytes(problem->n, GTCO_POSITIONS * c->channels) : 0;
}

static void pack_filtered(const float* filter, const gtco_problem* problem, float* packed) {
  const gtco_convolution* c = &problem->images;
  const int64_t taps = c->kernel_w, n = problem->n, lanes = gtco_the_machine.lanes;
  const int64_t panels = gtco_panels(n);
  const double* g = taps == 3 ? gtco_the_filters_3 : gtco_the_filters_5;
  for (int64_t panel = 0; panel < panels; ++panel)
    for (int64_t channel = 0; channel < c->channels; ++channel)
      for (int64_t lane = 0; lane < lanes; ++lane) {
        const int64_t column = panel * lanes + lane;
        double half[GTCO_TILE][5] = {{0}}; /* G w */
        for (int64_t i = 0; i < GTCO_TILE && column < n; ++i)
          for (int64_t x = 0; x < taps; ++x)
            for (int64_t y = 0; y < taps; ++y)
              half[i][x] += g[i * taps + y] * (double)filter[((y * taps + x) * c->channels + channel) * n + column];
        for (int64_t p = 0; p < GTCO_POSITIONS; ++p) {
          double sum = 0;
          for (int64_t x = 0; x < taps; ++x) sum += half[p / GTCO_TILE][x] * g[p % GTCO_TILE * taps + x];
          packed[((panel * GTCO_POSITIONS + p) * c->channels + channel) * lanes + lane] = (float)sum;
        }
      }
}

EXPORT int64_t gtco_convolutions_packed_bytes(const gtco_convolution* c, int64_t n) {
  gtco_problem problem;
  return problem_of(c, n, &problem) ? gtco_panels_bytes(n, problem.k) + filtered_bytes(&problem) : -1;
}

EXPORT int gtco_convolutions_pack(const float* filter, const gtco_convolution* c, int64_t n, float* packed) {
  gtco_problem problem;
  if (!problem_of(c, n, &problem)) return -1;
  gtco_pack_panels(filter, n, problem.k, packed);
  if (gtco_filters(c)) pack_filtered(filter, &problem, packed + gtco_panels_bytes(n, problem.k) / (int64_t)sizeof *packed);
  return 0;
}

EXPORT int gtco_convolutions_set(gtco_products* p, const gtco_convolution* c, int64_t n) {
  gtco_problem problem;
  gtco_problem_forget(p);
  return checked(p, c, n, &problem) ? -1 : gtco_problem_set(p, &problem);
}

EXPORT int gtco_convolutions_set_config(gtco_products* p, const gtco_convolution* c, int64_t n,
                                        const gtco_product_config* config) {
  gtco_problem problem;
  gtco_problem_forget(p);
  return checked(p, c, n, &problem) ? -1 : gtco_problem_set_config(p, &problem, config);
}

EXPORT int gtco_convolutions_choose(const gtco_products* p, const gtco_convolution* c, int64_t n,
                                    gtco_product_config* config, double* seconds) {
  gtco_problem problem;
  if (!problem_of(c, n, &problem)) return -1;
  gtco_product_choose(&problem, gtco_problem_threads(p), config, seconds);
  return 0;
}

EXPORT int gtco_convolutions_candidates(const gtco_products* p, const gtco_convolution* c, int64_t n, int room,
                                        gtco_product_config* configs, double* seconds) {
  gtco_problem problem;
  return problem_of(c, n, &problem)
             ? gtco_product_candidates(&problem, gtco_problem_threads(p), room, configs, seconds)
             : -1;
}
