/* The numbers of a product's loops, from its sizes and a config: Helix, Algorithm 3, InferLaunch (docs/papers/helix.md). */
#include "products/numbers.h"
#include "products/table.h"

#define FEW_COLUMNS 4 /* as in gtco/tensor/nest/open.py */

int gtco_product_along_k(const gtco_problem* problem) {
  const int64_t n = problem->n, k = problem->k, lanes = gtco_the_machine.lanes;
  return !problem->images.batch && n <= FEW_COLUMNS && (double)n * ((double)k + FOLDING * lanes) < (double)k * lanes;
}

/* 1 if the windows are the pixels themselves. */
static int pointwise(const gtco_convolution* c) {
  return c->kernel_h == 1 && c->kernel_w == 1 && c->stride == 1 && c->padding == 0;
}

int gtco_filters(const gtco_convolution* c) {
  return c->batch && c->stride == 1 && c->kernel_h == c->kernel_w && (c->kernel_h == 3 || c->kernel_h == 5);
}

double gtco_line_of_windows(const gtco_convolution* c) {
  return ((double)c->width + 2 * (double)c->padding) * (double)c->channels;
}

int gtco_product_feeds(const gtco_problem* problem, int32_t feed) {
  const gtco_convolution* c = &problem->images;
  const int windows = c->batch && !pointwise(c);
  if (feed == GTCO_FILTERED) return gtco_filters(c);
  if (feed == GTCO_LINES) return windows && c->kernel_w > 1;
  return (feed == GTCO_GATHERED) == windows;
}

void gtco_product_rows(const gtco_problem* problem, int32_t feed, gtco_cut* cut, int64_t* m, int64_t* k) {
  const gtco_convolution* c = &problem->images;
  cut->image_h = c->height, cut->image_w = c->width, cut->channels = c->channels;
  cut->kernel_w = c->kernel_w, cut->stride = c->stride, cut->padding = c->padding;
  *m = problem->m, *k = problem->k;
  cut->out_h = cut->out_w = cut->size = cut->tiles_h = cut->tiles_w = 0;
  if (!c->batch) return;
  gtco_convolutions_output(c, &cut->out_h, &cut->out_w);
  if (feed == GTCO_LINES) *m = cut->out_w;
  if (feed != GTCO_FILTERED) return;
  cut->size = GTCO_TILE + 1 - c->kernel_w;
  cut->tiles_h = up(cut->out_h, cut->size), cut->tiles_w = up(cut->out_w, cut->size);
  *m = c->batch * cut->tiles_h * cut->tiles_w, *k = c->channels;
}

/* Where B comes from, as in gtco/tensor/nest/open.py: L3, MEMORY. */
static int64_t far(const gtco_problem* problem, int32_t feed) {
  const int64_t steps = feed == GTCO_FILTERED ? GTCO_POSITIONS * problem->images.channels : problem->k;
  const double resident = RECENT * 4 * (double)steps * (double)problem->n;
  return resident > USABLE * gtco_the_machine.l3 ? 2 : resident > USABLE * gtco_the_machine.l2 ? 1 : 0;
}

/* The rest of a cut whose rows are read in lines: chunks and parts are whole lines, blocks of k whole runs. */
static int64_t in_lines(const gtco_problem* problem, const gtco_product_config* config, gtco_cut* cut) {
  const int64_t lines = problem->images.batch * cut->out_h, some = cut->neighbours, run = cut->kernel_w * cut->channels;
  const int64_t task = up(lines, least(config->chunks_m, lines)), held = quotient(config->held, some);
  cut->blocks = lines * some, cut->task_blocks = task * some;
  cut->held = least(held > 1 ? held : 1, task) * some;
  cut->kc = cut->kc > run ? quotient(cut->kc, run) * run : run;
  cut->lda = gtco_line_pitch(cut);
  return up(lines, task) * cut->chunks_n;
}

int64_t gtco_line_pitch(const gtco_cut* cut) {
  return odd(((cut->out_w - 1) * cut->stride + cut->kernel_w) * cut->channels);
}

int64_t gtco_lines_held(const gtco_convolution* c, int64_t out_h, int64_t lines) {
  const int64_t later = least(c->stride, c->kernel_h);
  return (lines - 1) * later + c->kernel_h + up(lines - 1, out_h) * (c->kernel_h - later);
}

int gtco_past_caches(const gtco_problem* problem) {
  return 4 * (double)problem->m * (double)problem->n > gtco_the_machine.l3;
}

int64_t gtco_product_cut(const gtco_problem* problem, const gtco_product_config* config, gtco_cut* cut) {
  const gtco_product_nest* nest = &gtco_the_nests[config->kernel];
  const int64_t n = problem->n, wide = (int64_t)nest->vectors * gtco_the_machine.lanes;
  int64_t m, k;
  gtco_product_rows(problem, nest->feed, cut, &m, &k);
  const int64_t some = up(m, nest->rows), panels = nest->columns ? 1 : up(n, wide);
  cut->n = n, cut->k = k, cut->kc = nest->feed == GTCO_FILTERED ? k : least(config->kc, k);
  cut->neighbours = some, cut->height = quotient(m, some), cut->taller = m - cut->height * some;
  cut->panels = panels;
  cut->task_panels = up(panels, least(config->chunks_n, panels));
  cut->chunks_n = up(panels, cut->task_panels);
  cut->ahead = far(problem, nest->feed);
  cut->past = nest->feed != GTCO_FILTERED && cut->kc == k && n % 16 == 0 && gtco_past_caches(problem);
  if (nest->feed == GTCO_LINES) return in_lines(problem, config, cut);
  cut->blocks = some;
  cut->task_blocks = up(some, least(config->chunks_m, some));
  cut->held = least(config->held, cut->task_blocks);
  const int64_t rest = cut->kc % 16, rows = cut->held * (cut->height + (cut->taller > 0));
  cut->lda = nest->feed == GTCO_FILTERED ? odd(k) : cut->kc + (cut->kc % 256 == 0 ? 16 : rest ? 16 - rest : 0);
  cut->plane_a = odd(rows * cut->lda), cut->plane_c = odd(rows * wide);
  return up(some, cut->task_blocks) * cut->chunks_n;
}

int64_t gtco_product_workspace(const gtco_problem* problem, const gtco_product_config* config, const gtco_cut* cut) {
  const int32_t feed = gtco_the_nests[config->kernel].feed;
  if (feed == GTCO_DIRECT) return 0;
  if (feed == GTCO_FILTERED) return 4 * GTCO_POSITIONS * (cut->plane_a + cut->plane_c + cut->channels + 16);
  if (feed == GTCO_LINES)
    return 4 * gtco_lines_held(&problem->images, cut->out_h, quotient(cut->held, cut->neighbours)) * cut->lda;
  return 4 * cut->held * (cut->height + (cut->taller > 0)) * cut->lda;
}
