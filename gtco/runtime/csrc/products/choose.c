/* The choice of a product's kernel and chunks when its sizes become known: Helix, Algorithm 3. Every candidate is priced by
 * equations 1 to 8, and the least price wins (docs/papers/helix.md). The number of candidates has a bound that does not
 * depend on the sizes. */
#include <math.h>

#include "products/table.h"

#define USABLE 0.5 /* of a cache, as in gtco/search/analytic.py */
#define SHOWN 0.15  /* of what is hidden behind the longer of computing and loading */
#define LATE 0.5    /* of what is read again by each part of a task */
#define LINE 64.0
#define PAGE 4096
#define PER_TILE 6e-9 /* seconds of the loops around a tile, beside its stores */
#define MOVED 2.0     /* multiply-adds that take as long as a vector's load or store around a transform */
#define FAR 35e9      /* bytes a second of one core from memory, whatever the others do, on a Zen 5 */
#define RECENT 8      /* weights lie where so many times their bytes do: other layers run in between */
#define UNEVEN 0.02   /* of a task: what the last one is waited for, since cores have other work too */
#define PER_TASK 1e-7 /* seconds */
#define PER_RUN 5e-9  /* seconds around the copy of a run of neighbours in an image, beside its stores */
#define KEPT 3        /* widths that go on to the levels above */
#define FEW_COLUMNS 4 /* as in gtco/tensor/nest/open.py */
#define FOLDING 9

/* fmax and fmin are calls of libm, since they know NaN. */
static double larger(double a, double b) { return a > b ? a : b; }
static double smaller(double a, double b) { return a < b ? a : b; }
/* Sizes are at most 2^40, so doubles hold them, and divide them in a third of the time of integers. */
static int64_t quotient(int64_t a, int64_t b) { return (int64_t)((double)a / (double)b); }
static int64_t up(int64_t a, int64_t b) { return quotient(a + b - 1, b); }
static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

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

int gtco_product_feeds(const gtco_problem* problem, int32_t feed) {
  if (feed == GTCO_FILTERED) return gtco_filters(&problem->images);
  return (feed == GTCO_GATHERED) == (problem->images.batch && !pointwise(&problem->images));
}

/* Distances in scratch of which not all are multiples of the same power of two: an odd number of lines. */
static int64_t odd(int64_t elements) { return (up(elements, 16) / 2 * 2 + 1) * 16; }

/* The rows and the steps of k of the product that a feed makes of a problem. */
static void rows_of(const gtco_problem* problem, int32_t feed, gtco_cut* cut, int64_t* m, int64_t* k) {
  const gtco_convolution* c = &problem->images;
  cut->image_h = c->height, cut->image_w = c->width, cut->channels = c->channels;
  cut->kernel_w = c->kernel_w, cut->stride = c->stride, cut->padding = c->padding;
  gtco_convolutions_output(c, &cut->out_h, &cut->out_w);
  *m = problem->m, *k = problem->k;
  cut->size = cut->tiles_h = cut->tiles_w = 0;
  if (feed != GTCO_FILTERED) return;
  cut->size = GTCO_TILE + 1 - c->kernel_w;
  cut->tiles_h = up(cut->out_h, cut->size), cut->tiles_w = up(cut->out_w, cut->size);
  *m = c->batch * cut->tiles_h * cut->tiles_w, *k = c->channels;
}

/* The bytes of packed B, up to the last panel's width. */
static double b_bytes(const gtco_problem* problem, int32_t feed) {
  const int64_t steps = feed == GTCO_FILTERED ? GTCO_POSITIONS * problem->images.channels : problem->k;
  return 4 * (double)steps * (double)problem->n;
}

/* Where B comes from, as in gtco/tensor/nest/open.py: L3, MEMORY. */
static int64_t far(const gtco_problem* problem, int32_t feed) {
  const gtco_product_machine* of = &gtco_the_machine;
  const double resident = RECENT * b_bytes(problem, feed);
  return resident > USABLE * of->l3 ? 2 : resident > USABLE * of->l2 ? 1 : 0;
}

int64_t gtco_product_cut(const gtco_problem* problem, const gtco_product_config* config, gtco_cut* cut) {
  const gtco_product_nest* nest = &gtco_the_nests[config->kernel];
  const int64_t n = problem->n, wide = (int64_t)nest->vectors * gtco_the_machine.lanes;
  int64_t m, k;
  rows_of(problem, nest->feed, cut, &m, &k);
  const int64_t blocks = up(m, nest->rows), panels = nest->columns ? 1 : up(n, wide);
  cut->n = n, cut->k = k, cut->kc = nest->feed == GTCO_FILTERED ? k : least(config->kc, k);
  cut->blocks = blocks, cut->height = quotient(m, blocks), cut->taller = m - cut->height * blocks;
  cut->panels = panels;
  cut->task_blocks = up(blocks, least(config->chunks_m, blocks));
  cut->task_panels = up(panels, least(config->chunks_n, panels));
  cut->chunks_n = up(panels, cut->task_panels);
  cut->held = least(config->held, cut->task_blocks);
  const int64_t rest = cut->kc % 16, rows = cut->held * (cut->height + (cut->taller > 0));
  cut->lda = nest->feed == GTCO_FILTERED ? odd(k) : cut->kc + (cut->kc % 256 == 0 ? 16 : rest ? 16 - rest : 0);
  cut->ahead = far(problem, nest->feed);
  cut->plane_a = odd(rows * cut->lda), cut->plane_c = odd(rows * wide);
  return up(blocks, cut->task_blocks) * cut->chunks_n;
}

int64_t gtco_product_workspace(const gtco_product_config* config, const gtco_cut* cut) {
  const int32_t feed = gtco_the_nests[config->kernel].feed;
  if (feed == GTCO_DIRECT) return 0;
  if (feed == GTCO_FILTERED) return 4 * GTCO_POSITIONS * (cut->plane_a + cut->plane_c + cut->channels + 16);
  return 4 * cut->held * (cut->height + (cut->taller > 0)) * cut->lda;
}

/* Equation 1: seconds of a byte of one core, by the working set. What lies in L1 takes no further time. */
static double each(double resident, int64_t cores) {
  const gtco_product_machine* of = &gtco_the_machine;
  if (resident <= USABLE * of->l1) return 0;
  if (resident <= USABLE * of->l2) return 1 / of->l2_rate;
  if (resident <= USABLE * of->l3) return 1 / of->l3_rate;
  return larger((double)cores / of->memory_rate, 1 / FAR);
}

/* The same of weights, which are only read. */
static double weights(double resident, int64_t cores) {
  const gtco_product_machine* of = &gtco_the_machine;
  return resident <= USABLE * of->l3 ? each(resident, cores) : larger((double)cores / of->read_rate, 1 / FAR);
}

static double spread(double stride, double run) {
  if (stride <= run || (int64_t)stride % (int64_t)LINE) return 1;
  const int64_t whole = (int64_t)stride, power = whole & -whole; /* of two, that divides it */
  const double room = (double)least(power, PAGE) / larger(run, LINE);
  return room > 1 ? room : 1;
}

/* The bytes of A where it comes from. */
static double a_bytes(const gtco_problem* problem) {
  const gtco_convolution* c = &problem->images;
  if (!c->batch) return 4 * (double)problem->m * (double)problem->k;
  return 4 * (double)c->batch * (double)c->height * (double)c->width * (double)c->channels;
}

/* Level 0: what a block's step of k takes with one vector of columns, by the micro-kernels' measured rates (eq. 3). */
static double seconds_of_a_step(const gtco_product_nest* nest, const gtco_cut* cut) {
  const double share = (double)cut->taller / (double)cut->blocks;
  const double low = (1 - share) * (double)cut->height / nest->rate[cut->height - 1];
  return cut->taller ? low + share * (double)(cut->height + 1) / nest->rate[cut->height] : low;
}

/* Equations 7 and 8: all tasks, each of so many seconds. */
static double of_tasks(double seconds, int64_t tasks, int threads) {
  const double waves = (double)up(tasks, threads);
  return (tasks > 1 ? 2 * gtco_the_machine.launch : 0) + waves * (seconds + PER_TASK) + UNEVEN * seconds;
}

/* Seconds that a task waits for its panels of B. They arrive while the first block is multiplied, and each further part
 * of the task reads them again. `kept`: bytes that lie beside them in the caches. */
static double of_weights(double b_all, double b_task, double kept, double compute, double parts, const gtco_cut* cut,
                         int64_t cores) {
  const double once = weights(RECENT * b_all, cores), again = weights(b_task + kept, cores);
  const double first = b_task * once, beside = compute / (double)cut->task_blocks;
  return larger(0, first - beside) + SHOWN * smaller(first, beside) + LATE * b_task * (parts - 1) * again;
}

/* The same for minimal filtering: its products, and the transforms before and behind them. */
static double price_of_filtering(const gtco_problem* problem, const gtco_product_nest* nest, const gtco_cut* cut,
                                 int64_t tasks, int threads) {
  const gtco_product_machine* of = &gtco_the_machine;
  const gtco_convolution* c = &problem->images;
  const int64_t cores = least(threads, tasks);
  const double k = (double)cut->k, lanes = of->lanes, parts = (double)up(cut->task_blocks, cut->held);
  const double all = (double)(c->batch * cut->tiles_h * cut->tiles_w);
  const double rows = all / (double)cut->blocks * (double)cut->task_blocks;
  const double vectors = (double)cut->task_panels * nest->vectors, size = (double)cut->size;
  const double compute = GTCO_POSITIONS * (double)cut->task_blocks * seconds_of_a_step(nest, cut) * vectors * k;
  const double tiles = GTCO_POSITIONS * (double)(cut->task_blocks * cut->task_panels);

  const double forth = 2 * GTCO_TILE * (4 + 2 * (GTCO_TILE - 2)) + 2 * MOVED * GTCO_POSITIONS;
  const double back = (GTCO_TILE + size) * (GTCO_TILE - 2 + 2 * size) + MOVED * (GTCO_POSITIONS + size * size);
  double waiting = tiles * PER_TILE + GTCO_POSITIONS * rows * vectors / of->store_rate;
  waiting += rows * ((double)up((int64_t)k, of->lanes) * forth + vectors * back) / of->fma_rate;

  const double item = 4 * GTCO_POSITIONS, held = rows / parts;
  const double scratch = item * held * ((double)cut->lda + lanes * nest->vectors);
  const double a_task = item * rows * k, c_task = item * rows * vectors * lanes;
  waiting += (a_task + 2 * c_task) * each(scratch, cores);
  const double hidden = a_task * (double)cut->task_panels * each(scratch, cores);
  const double image = rows / all * a_bytes(problem), out = rows * size * size * 4 * vectors * lanes;
  waiting += image * larger(each(a_bytes(problem), cores), 1 / of->handed_rate);
  waiting += out * each(4.0 * (double)problem->m * (double)problem->n, cores);

  const double b_all = item * k * (double)cut->panels * nest->vectors * lanes, b_task = item * k * vectors * lanes;
  waiting += of_weights(b_all, b_task, scratch, compute, parts, cut, cores);

  const double longer = larger(compute, hidden), shorter = smaller(compute, hidden);
  return of_tasks(waiting + longer + SHOWN * shorter, tasks, threads);
}

/* Equations 2 to 8 of one candidate, in seconds. */
static double price(const gtco_problem* problem, const gtco_product_nest* nest, const gtco_cut* cut, int64_t tasks,
                    int threads) {
  const gtco_product_machine* of = &gtco_the_machine;
  if (nest->feed == GTCO_FILTERED) return price_of_filtering(problem, nest, cut, tasks, threads);
  const int64_t m = problem->m;
  const double k = (double)cut->k, kc = (double)cut->kc, held = (double)cut->held;
  const int64_t cores = least(threads, tasks), kblocks = up(cut->k, cut->kc);
  const double width = LINE / 16 * of->lanes * nest->vectors; /* bytes of a step of k of a panel */
  const double high = (double)m / (double)cut->blocks;
  const double rows = high * (double)cut->task_blocks, panels = (double)cut->task_panels;
  const double parts = (double)up(cut->task_blocks, cut->held);
  const double tiles = (double)cut->task_blocks * panels * (double)kblocks;

  /* level 0: the micro-kernel at its measured rate (eq. 3) */
  const double each_row = seconds_of_a_step(nest, cut);
  const double vectors = panels * nest->vectors;
  double compute = (double)cut->task_blocks * each_row * vectors * k;

  /* what is stored, and loaded again between blocks of k */
  double waiting = tiles * PER_TILE + rows * vectors * (double)(2 * kblocks - 1) / of->store_rate;
  double c_bytes = rows * smaller(panels * width, 4.0 * (double)cut->n);
  /* Where panels do not end with lines, two of them write one, which may have left the caches in between. */
  const int apart = 4 * high * held * (double)cut->n > USABLE * of->l2;
  if (apart && cut->n % (int64_t)(LINE / 4)) c_bytes += rows * (panels - 1) * LINE;
  waiting += c_bytes * each(4.0 * (double)m * (double)cut->n, cores);

  /* A */
  const double stride = nest->feed != GTCO_DIRECT ? 0 : 4 * k, room = spread(stride, 4 * kc);
  const double a_tile = 4 * high * kc, b_panel = kc * width, c_tile = high * width;
  const double a_block = a_tile * held * room;
  const double lines = high * LINE * spread(stride, LINE);
  const double lost = larger(0, 1 - of->l1 / lines);
  const double a_all = a_bytes(problem), a_task = 4 * rows * k;
  double hidden = a_task * (panels - 1) * each(a_block + b_panel + c_tile, cores);
  waiting += a_task * panels * lost * (LINE / 4 - 1) / of->l2_rate;
  const double a_first = rows / (double)m * a_all * larger(each(a_all, cores), a_all > of->l2 ? 1 / of->handed_rate : 0);
  if (nest->feed == GTCO_DIRECT)
    hidden += a_first;
  else
    waiting += a_first + rows * k / of->lanes / of->store_rate;
  if (nest->feed == GTCO_GATHERED) {
    const gtco_convolution* c = &problem->images;
    const double lines_of = 4.0 * (double)(c->kernel_h * c->width * c->channels); /* that a row of windows reads */
    waiting += a_task * each(lines_of, cores) + rows * (double)(c->kernel_h + kblocks) * PER_RUN;
  }

  /* B: once from where the weights lie, again for each part, and for each block of a part. */
  const double b_all = k * (double)cut->panels * width, b_task = k * panels * width;
  waiting += of_weights(b_all, b_task, a_block, compute, parts, cut, cores);
  hidden += b_task * ((double)cut->task_blocks - parts) * each(b_panel * (1 + 1 / held) + room * a_tile + c_tile, cores);

  const double longer = larger(compute, hidden), shorter = smaller(compute, hidden);
  return of_tasks(waiting + longer + SHOWN * shorter, tasks, threads); /* eq. 5 to 8 */
}

/* The widths whose tiles multiply fastest on these rows and columns, the best first; wider ones than all columns would
 * read behind packed B. Returns how many. */
static int widths(int64_t m, int64_t n, int kept[KEPT]) {
  const gtco_product_machine* of = &gtco_the_machine;
  double best[KEPT];
  int count = 0;
  const int64_t all = up(n, of->lanes);
  for (int i = 0; i < of->nests; ++i) {
    const gtco_product_nest* nest = &gtco_the_nests[i];
    if (nest->feed != GTCO_DIRECT || nest->columns || nest->vectors > all) continue;
    const int64_t blocks = up(m, nest->rows);
    const double useful = (double)all / (double)(up(all, nest->vectors) * nest->vectors);
    const double rate = nest->rate[up(m, blocks) - 1] * useful;
    int at = count < KEPT ? count++ : KEPT;
    for (; at > 0 && best[at - 1] < rate; --at)
      if (at < KEPT) best[at] = best[at - 1], kept[at] = kept[at - 1];
    if (at < KEPT) best[at] = rate, kept[at] = i;
  }
  return count;
}

/* The candidates of a product whose vectors lie along k: they differ in their chunks of rows alone. */
static int along_k(const gtco_problem* problem, int threads, int room, gtco_product_config* configs, double* seconds) {
  const gtco_product_machine* of = &gtco_the_machine;
  const int64_t m = problem->m, n = problem->n, k = problem->k;
  int64_t kernel = 0;
  while (gtco_the_nests[kernel].columns != n) ++kernel;
  int count = 0;
  for (int64_t chunks = 1; chunks <= 8 * threads && count < room; chunks = chunks == 1 && threads > 1 ? threads : 2 * chunks) {
    gtco_product_config one = {kernel, chunks, 1, k, m};
    gtco_cut cut;
    const int64_t tasks = gtco_product_cut(problem, &one, &cut);
    one.held = cut.held;
    const double rows = (double)m / (double)cut.blocks * (double)cut.task_blocks;
    const double compute = rows * (double)n * ((double)k / of->lanes + FOLDING) / of->fma_rate;
    const double loads = rows * 4 * (double)k * each(4 * (double)m * (double)k, least(threads, tasks));
    const double work = larger(compute, loads) + SHOWN * smaller(compute, loads);
    configs[count] = one;
    seconds[count++] = of_tasks(work + PER_TILE, tasks, threads);
  }
  return count;
}

/* Seconds that no candidate of these kernels is below: the multiply-adds, on all threads. */
static double bound(const gtco_product_nest* nest, int32_t feed, int64_t rows, int64_t n, int64_t depth, int threads) {
  const int64_t blocks = up(rows, nest->rows), height = quotient(rows, blocks);
  const double rate = larger(nest->rate[height - 1], nest->rate[up(rows, blocks) - 1]);
  const double vectors = (double)(up(n, (int64_t)nest->vectors * gtco_the_machine.lanes) * nest->vectors);
  return (feed == GTCO_FILTERED ? GTCO_POSITIONS : 1) * (double)rows * vectors * (double)depth / rate / threads;
}

int gtco_product_candidates(const gtco_problem* problem, int threads, int all, int room, gtco_product_config* configs,
                            double* seconds) {
  const gtco_product_machine* of = &gtco_the_machine;
  const int64_t m = problem->m, n = problem->n, k = problem->k;
  if (gtco_product_along_k(problem)) return along_k(problem, threads, room, configs, seconds);
  int kept[KEPT], count = 0;
  double best = INFINITY;
  for (int32_t feed = GTCO_FILTERED; feed >= GTCO_DIRECT; --feed) { /* minimal filtering is mostly the fastest */
    if (!gtco_product_feeds(problem, feed) || (feed == GTCO_PACKED && (k < 128 || m < 2))) continue;
    gtco_cut made;
    int64_t rows, depth;
    rows_of(problem, feed, &made, &rows, &depth);
    const int chosen = widths(rows, n, kept);
    for (int w = 0; w < chosen; ++w) {
      const gtco_product_nest* nest = &gtco_the_nests[kept[w] + feed];
      if (!all && bound(nest, feed, rows, n, depth, threads) >= best) continue;
      const int64_t blocks = up(rows, nest->rows), panels = up(n, (int64_t)nest->vectors * of->lanes);
      for (int halves = 0; halves < (feed == GTCO_FILTERED ? 1 : 3); ++halves) {
        const int64_t kc = halves == 0 ? depth : up(up(depth, up(depth, halves == 1 ? 1024 : 384)), 16) * 16;
        if (halves && (kc >= depth || rows < nest->rows)) continue;
        int64_t chunks[9][2] = {{1, 1}};
        int cuts = 1;
        for (int64_t f = 1; threads > 1 && f <= 4; f *= 2) {
          if (threads * f <= blocks || f == 1) chunks[cuts][0] = threads * f, chunks[cuts++][1] = 1;
          if (threads * f <= panels || f == 1) chunks[cuts][0] = 1, chunks[cuts++][1] = threads * f;
        }
        if (threads > 1) chunks[cuts][0] = threads, chunks[cuts++][1] = 4;
        for (int c = 0; c < cuts; ++c) {
          const int64_t task_blocks = up(blocks, least(chunks[c][0], blocks));
          double block = 4.0 * nest->rows * (double)kc; /* bytes of a block's rows in scratch */
          if (feed == GTCO_FILTERED)
            block = 4.0 * GTCO_POSITIONS * nest->rows * (double)(odd(depth) + nest->vectors * of->lanes);
          for (int part = 0; part < (feed == GTCO_FILTERED ? 4 : 2); ++part) {
            gtco_product_config one = {kept[w] + feed, chunks[c][0], chunks[c][1], kc, task_blocks};
            gtco_cut cut;
            if (part) { /* a quarter of L2, half of it, ... */
              const int64_t fitting = (int64_t)(of->l2 / 8 * (1 << part) / block);
              one.held = fitting > 1 ? fitting : 1;
              if (one.held >= task_blocks) continue;
            } else if (feed != GTCO_DIRECT && task_blocks > 1 && (double)task_blocks * block > of->l2) {
              continue;
            }
            const int64_t tasks = gtco_product_cut(problem, &one, &cut);
            if (count < room) {
              configs[count] = one;
              seconds[count] = price(problem, nest, &cut, tasks, threads);
              best = smaller(best, seconds[count]);
            }
            ++count;
          }
        }
      }
    }
  }
  return count;
}
