/* The choice of a product's kernel and chunks when its sizes become known: Helix, Algorithm 3. Every candidate is priced by
 * equations 1 to 8, and the least price wins (docs/papers/helix.md). The number of candidates has a bound that does not
 * depend on the sizes.
 *
 * Candidates are a tree: feed and width, block of k, chunks, parts of a task. What a level decides is priced there once, and
 * where that alone reaches the least price so far, nothing below is looked at. */
#include <math.h>

#include "products/numbers.h"
#include "products/table.h"

#define SHOWN 0.15  /* of what is hidden behind the longer of computing and loading */
#define LATE 0.5    /* of what is read again by each part of a task */
#define LINE 64.0
#define PAGE 4096
#define PER_TILE 6e-9 /* seconds of the loops around a tile, beside its stores */
#define MOVED 2.0     /* multiply-adds that take as long as a vector's load or store around a transform */
#define FAR 35e9      /* bytes a second of one core from memory, whatever the others do, on a Zen 5 */
#define UNEVEN 0.02   /* of a task: what the last one is waited for, since cores have other work too */
#define PER_TASK 1e-7 /* seconds */
#define PER_RUN 5e-9  /* seconds around the copy of a run of neighbours in an image, beside its stores */
#define KEPT 3        /* widths that go on to the levels above */
#define CUTS 8        /* into chunks */

/* A search among the candidates of a problem: what it asks, the rates that it prices by, and what it has found. */
typedef struct {
  const gtco_problem* problem;
  int threads;
  int all, room, count; /* all candidates, or (room 1) the one of least price */
  gtco_product_config* configs;
  double* seconds;
  double best;
  double l2, l3, memory, read, handed; /* seconds of a byte */
  double store, fma;                   /* seconds of a vector */
  double a_all, c_all;                 /* bytes */
} search;

/* Chunks of a task, and what tasks of so many rows and columns share. */
typedef struct {
  int64_t chunks_m, chunks_n, task_units;
  double blocks, panels, rows, vectors; /* of a task */
  int cores;
  double fixed, factor; /* equations 7 and 8: seconds of all tasks are fixed + factor x those of one */
  double b_once;        /* seconds of a byte of B from where it lies */
} chunk;

/* A feed and a width. Blocks that stay together are a unit: those of a line. */
typedef struct {
  const gtco_product_nest* nest;
  int64_t kernel, units, together, panels, depth;
  gtco_cut cut;           /* only what is of the images, and the height of blocks */
  double high, step;      /* rows of a block; seconds of its step of k with one vector of columns */
  double width;           /* bytes of a step of k of a panel */
  chunk chunks[CUTS + 1];
  int count;
} level;

/* Equation 1: seconds of a byte of one core, by the working set. What lies in L1 takes no further time. */
static double each(const search* s, double resident, int cores) {
  const gtco_product_machine* of = &gtco_the_machine;
  if (resident <= USABLE * of->l1) return 0;
  if (resident <= USABLE * of->l2) return s->l2;
  if (resident <= USABLE * of->l3) return s->l3;
  return larger(cores * s->memory, 1 / FAR);
}

/* The same of weights, which are only read. */
static double weights(const search* s, double resident, int cores) {
  return resident <= USABLE * gtco_the_machine.l3 ? each(s, resident, cores) : larger(cores * s->read, 1 / FAR);
}

/* The room in a cache of runs a stride apart, over their size. */
static double spread(double stride, double run) {
  if (stride <= run || (int64_t)stride % (int64_t)LINE) return 1;
  const int64_t whole = (int64_t)stride, power = whole & -whole; /* of two, that divides it */
  const double room = (double)least(power, PAGE) / larger(run, LINE);
  return room > 1 ? room : 1;
}

/* Equation 5. */
static double together(double compute, double loads) {
  return larger(compute, loads) + SHOWN * smaller(compute, loads);
}

/* Equations 7 and 8. */
static void of_tasks(int64_t tasks, int threads, double* fixed, double* factor) {
  const double waves = (double)up(tasks, threads);
  *fixed = (tasks > 1 ? 2 * gtco_the_machine.launch : 0) + waves * PER_TASK;
  *factor = waves + UNEVEN;
}

static void offer(search* s, const level* t, const chunk* of, int64_t kc, int64_t held, double price) {
  if (!s->all && price >= s->best) return;
  s->best = smaller(s->best, price);
  const int at = s->all ? s->count++ : 0;
  if (at >= s->room) return;
  s->configs[at] = (gtco_product_config){t->kernel, of->chunks_m, of->chunks_n, kc, held};
  s->seconds[at] = price;
}

/* 1 if no candidate of a chunk has the least price: each takes this time at least. */
static int too_long(const search* s, const chunk* of, double seconds) {
  return !s->all && of->fixed + of->factor * seconds >= s->best;
}

/* The parts of a task: all of its units, or as many as some share of L2 holds. Returns 0 if this part is no other. */
static int64_t units_of_part(const level* t, const chunk* of, int part, double bytes) {
  const double l2 = gtco_the_machine.l2;
  if (part) { /* a quarter of L2, half of it, ... */
    const int64_t fitting = (int64_t)(l2 / 8 * (1 << part) / bytes), held = fitting > 1 ? fitting : 1;
    return held < of->task_units ? held : 0;
  }
  if (t->nest->feed != GTCO_DIRECT && of->task_units > 1 && (double)of->task_units * bytes > l2) return 0;
  return of->task_units;
}

/* Seconds that a task waits for its panels of B, which arrive while the first block is multiplied. */
static double of_weights(double bytes, double once, double first_block) {
  const double first = bytes * once;
  return larger(0, first - first_block) + SHOWN * smaller(first, first_block);
}

/* Minimal filtering: its products, and the transforms before and behind them. */
static void filtered(search* s, const level* t) {
  const gtco_cut* cut = &t->cut;
  const int64_t lanes = gtco_the_machine.lanes;
  const double k = (double)t->depth, size = (double)cut->size, item = 4 * GTCO_POSITIONS, lda = (double)odd(t->depth);
  const double forth = 2 * GTCO_TILE * (4 + 2 * (GTCO_TILE - 2)) + 2 * MOVED * GTCO_POSITIONS;
  const double back = (GTCO_TILE + size) * (GTCO_TILE - 2 + 2 * size) + MOVED * (GTCO_POSITIONS + size * size);
  const double all = (double)(s->problem->images.batch * cut->tiles_h * cut->tiles_w);
  const double transformed = (double)up(t->depth, lanes) * forth;
  const double block = item * t->nest->rows * (lda + (double)(t->nest->vectors * lanes)); /* bytes of scratch */
  for (const chunk* of = t->chunks; of < t->chunks + t->count; ++of) {
    const double per_block = GTCO_POSITIONS * t->step * of->vectors * k, compute = of->blocks * per_block;
    double waiting = GTCO_POSITIONS * (of->blocks * of->panels * PER_TILE + of->rows * of->vectors * s->store);
    waiting += of->rows * (transformed + of->vectors * back) * s->fma;
    const double a_task = item * of->rows * k, c_task = item * of->rows * of->vectors * lanes;
    waiting += of->rows / all * s->a_all * larger(each(s, s->a_all, of->cores), s->handed);
    waiting += of->rows * size * size * 4 * of->vectors * lanes * each(s, s->c_all, of->cores);
    const double b_task = item * k * of->vectors * lanes;
    waiting += of_weights(b_task, of->b_once, per_block);
    if (too_long(s, of, waiting + compute)) continue;
    for (int part = 0; part < 4; ++part) {
      const int64_t held = units_of_part(t, of, part, block);
      if (!held) continue;
      const double parts = ceil(of->blocks / (double)held);
      const double scratch = item * of->rows / parts * (lda + (double)(lanes * t->nest->vectors));
      const double near = each(s, scratch, of->cores), again = weights(s, b_task + scratch, of->cores);
      const double late = (a_task + 2 * c_task) * near + LATE * b_task * (parts - 1) * again;
      const double loads = a_task * of->panels * near;
      offer(s, t, of, t->depth, held, of->fixed + of->factor * (waiting + late + together(compute, loads)));
    }
  }
}

/* Equations 2 to 8 of the candidates with blocks of `kc` steps of k. */
static void multiplied(search* s, const level* t, int64_t kc_wanted) {
  const gtco_product_machine* machine = &gtco_the_machine;
  const gtco_cut* cut = &t->cut;
  const gtco_convolution* c = &s->problem->images;
  const int32_t feed = t->nest->feed;
  const int64_t n = s->problem->n;
  const int in_lines = feed == GTCO_LINES;
  const double run = (double)(cut->kernel_w * cut->channels), k = (double)t->depth;
  const double kc = in_lines ? larger(floor((double)kc_wanted / run), 1) * run : (double)kc_wanted;
  const double kblocks = ceil(k / kc), high = t->high;

  /* A */
  const double apart = in_lines ? (double)cut->stride * (double)cut->channels : feed == GTCO_DIRECT ? k : 0;
  const double stride = 4 * apart, room = in_lines ? 1 : spread(stride, 4 * kc);
  const double pitch = in_lines ? (double)gtco_line_pitch(cut) : 0;
  const double overlap = in_lines ? smaller(1, ((high - 1) * apart + run) / (high * run)) : 1; /* of windows */
  const double a_tile = 4 * high * kc * overlap, b_panel = kc * t->width, c_tile = high * t->width;
  const double lost = larger(0, 1 - machine->l1 / (high * LINE * spread(stride, LINE)));
  double unit = 4.0 * t->nest->rows * kc; /* bytes of scratch */
  if (in_lines) unit = 4 * (double)least(cut->stride, c->kernel_h) * gtco_line_of_windows(c);
  /* Where rows are gathered: bytes of images that a line of windows reads, and seconds around the runs of a window. */
  const double lines_of = feed == GTCO_GATHERED ? 4.0 * (double)(c->kernel_h * c->width * c->channels) : 0;
  const double runs = feed == GTCO_GATHERED ? ((double)c->kernel_h + kblocks) * PER_RUN : 0;

  for (const chunk* of = t->chunks; of < t->chunks + t->count; ++of) {
    const double tiles = of->blocks * of->panels, vectors = of->vectors;
    const double per_block = t->step * vectors * k, compute = of->blocks * per_block; /* level 0 (eq. 3) */
    /* what is stored, and loaded again between blocks of k */
    double waiting = tiles * kblocks * PER_TILE + of->rows * vectors * (2 * kblocks - 1) * s->store;
    const double c_each = each(s, s->c_all, of->cores);
    waiting += of->rows * smaller(of->panels * t->width, 4.0 * (double)n) * c_each;
    const double a_task = 4 * of->rows * k;
    waiting += a_task * of->panels * lost * (LINE / 4 - 1) * s->l2;
    const double a_each = larger(each(s, s->a_all, of->cores), s->a_all > machine->l2 ? s->handed : 0);
    const double a_first = of->rows / (double)s->problem->m * s->a_all * a_each;
    if (feed != GTCO_DIRECT) waiting += a_first;
    if (feed == GTCO_PACKED || feed == GTCO_GATHERED) waiting += of->rows * k / machine->lanes * s->store;
    waiting += a_task * each(s, lines_of, of->cores) + of->rows * runs;
    /* B: once from where the weights lie, again for each part, and for each block of a part. */
    const double b_task = k * of->panels * t->width;
    waiting += of_weights(b_task, of->b_once, per_block);
    const double a_direct = feed == GTCO_DIRECT ? a_first : 0;
    if (too_long(s, of, waiting + together(compute, a_direct))) continue;
    for (int part = 0; part < 2; ++part) {
      const int64_t units = units_of_part(t, of, part, unit);
      if (!units) continue;
      const double held = (double)(units * t->together), parts = part ? ceil(of->blocks / held) : 1;
      double a_block = a_tile * held * room, late = 0;
      if (in_lines) {
        const double lines = (double)gtco_lines_held(c, cut->out_h, units);
        a_block = 4 * lines * pitch;
        late = parts * lines * (pitch / machine->lanes * s->store + PER_RUN);
      }
      /* Where panels do not end with lines, two of them write one, which may have left the caches in between. */
      if (n % (int64_t)(LINE / 4) && 4 * high * held * (double)n > USABLE * machine->l2)
        late += of->rows * (of->panels - 1) * LINE * c_each;
      if (parts > 1) late += LATE * b_task * (parts - 1) * weights(s, b_task + a_block, of->cores);
      double loads = a_direct + a_task * overlap * (of->panels - 1) * each(s, a_block + b_panel + c_tile, of->cores);
      const double beside = b_panel + b_panel / held + room * a_tile + c_tile;
      loads += b_task * (of->blocks - parts) * each(s, beside, of->cores);
      offer(s, t, of, kc_wanted, units * t->together,
            of->fixed + of->factor * (waiting + late + together(compute, loads)));
    }
  }
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

/* Cuts into so many chunks, unless another cut is the same. */
static void add_chunks(const search* s, level* t, double b_recent, int64_t chunks_m, int64_t chunks_n) {
  const int64_t task = up(t->units, least(chunks_m, t->units)), panels = up(t->panels, least(chunks_n, t->panels));
  for (int i = 0; i < t->count; ++i)
    if (t->chunks[i].task_units == task && t->chunks[i].panels == (double)panels) return;
  chunk* of = &t->chunks[t->count++];
  const int64_t tasks = up(t->units, task) * up(t->panels, panels);
  *of = (chunk){.chunks_m = chunks_m, .chunks_n = chunks_n, .task_units = task};
  of->blocks = (double)(task * t->together), of->panels = (double)panels;
  of->rows = of->blocks * t->high, of->vectors = of->panels * t->nest->vectors;
  of->cores = tasks < s->threads ? (int)tasks : s->threads;
  of->b_once = weights(s, b_recent, of->cores);
  of_tasks(tasks, s->threads, &of->fixed, &of->factor);
}

/* The candidates of a feed and a width. */
static void candidates_of(search* s, level* t, int64_t rows) {
  const gtco_product_nest* nest = t->nest;
  const int64_t m = s->problem->m, n = s->problem->n, threads = s->threads, lanes = gtco_the_machine.lanes;
  const int64_t blocks = up(rows, nest->rows), height = quotient(rows, blocks), taller = rows - height * blocks;
  const int filters = nest->feed == GTCO_FILTERED, in_lines = nest->feed == GTCO_LINES;
  const double share = (double)taller / (double)blocks, depth = (double)t->depth;
  t->high = (double)rows / (double)blocks;
  t->step = (1 - share) * (double)height / nest->rate[height - 1];
  if (taller) t->step += share * (double)(height + 1) / nest->rate[height];
  t->panels = up(n, nest->vectors * lanes), t->width = 4.0 * (double)(nest->vectors * lanes);
  t->together = in_lines ? blocks : 1;
  t->units = in_lines ? s->problem->images.batch * t->cut.out_h : blocks;

  /* Multiply-adds, stores and copies, on all threads: no candidate takes less. */
  const double tiles = (double)(t->units * t->together) * (double)t->panels, stores = tiles * t->high * nest->vectors;
  double least_of_all = (filters ? GTCO_POSITIONS : 1) * tiles * nest->vectors * t->step * depth;
  if (!filters) least_of_all += tiles * PER_TILE + stores * s->store;
  if (nest->feed == GTCO_PACKED || nest->feed == GTCO_GATHERED) least_of_all += (double)m * depth / lanes * s->store;
  if (!s->all && least_of_all >= s->best * threads) return;

  const double b_recent = RECENT * (filters ? GTCO_POSITIONS : 1) * depth * (double)t->panels * t->width;
  t->count = 0;
  for (int64_t f = 1; threads > 1 && f <= 4; f *= 2) {
    if (threads * f <= t->units || f == 1) add_chunks(s, t, b_recent, threads * f, 1);
    if (threads * f <= t->panels || f == 1) add_chunks(s, t, b_recent, 1, threads * f);
  }
  if (threads > 1) add_chunks(s, t, b_recent, threads, 4);
  add_chunks(s, t, b_recent, 1, 1);
  if (filters) {
    filtered(s, t);
    return;
  }
  multiplied(s, t, t->depth);
  for (int64_t most = 1024; most >= 384; most -= 640) {
    if (t->depth <= most || m < nest->rows) continue;
    const int64_t kc = up(up(t->depth, up(t->depth, most)), 16) * 16;
    const double more = (double)(up(t->depth, kc) - 1);
    if (kc >= t->depth) continue;
    if (!s->all && least_of_all + more * (tiles * PER_TILE + 2 * stores * s->store) >= s->best * threads) continue;
    multiplied(s, t, kc);
  }
}

/* The candidates of a product whose vectors lie along k: they differ in their chunks of rows alone. */
static void along_k(search* s) {
  const int64_t m = s->problem->m, n = s->problem->n, k = s->problem->k, threads = s->threads;
  level t = {.kernel = 0, .units = 0};
  while (gtco_the_nests[t.kernel].columns != n) ++t.kernel;
  const int64_t blocks = up(m, gtco_the_nests[t.kernel].rows);
  for (int64_t chunks = 1; chunks <= 8 * threads; chunks = chunks == 1 && threads > 1 ? threads : 2 * chunks) {
    const int64_t task = up(blocks, least(chunks, blocks)), tasks = up(blocks, task);
    chunk of = {.chunks_m = chunks, .chunks_n = 1, .cores = tasks < threads ? (int)tasks : (int)threads};
    of_tasks(tasks, s->threads, &of.fixed, &of.factor);
    const double rows = (double)m / (double)blocks * (double)task;
    const double compute = rows * (double)n * ((double)k / gtco_the_machine.lanes + FOLDING) * s->fma;
    const double loads = rows * 4 * (double)k * each(s, s->a_all, of.cores);
    offer(s, &t, &of, k, task, of.fixed + of.factor * (together(compute, loads) + PER_TILE));
  }
}

static void find(search* s) {
  static const int32_t feeds[] = {GTCO_FILTERED, GTCO_LINES, GTCO_GATHERED, GTCO_DIRECT, GTCO_PACKED};
  const gtco_product_machine* of = &gtco_the_machine;
  const gtco_problem* problem = s->problem;
  const gtco_convolution* c = &problem->images;
  s->l2 = 1 / of->l2_rate, s->l3 = 1 / of->l3_rate, s->memory = 1 / of->memory_rate, s->read = 1 / of->read_rate;
  s->handed = 1 / of->handed_rate, s->store = 1 / of->store_rate, s->fma = 1 / of->fma_rate;
  s->a_all = 4 * (double)problem->m * (double)problem->k, s->c_all = 4 * (double)problem->m * (double)problem->n;
  if (c->batch) s->a_all = 4 * (double)c->batch * (double)c->height * (double)c->width * (double)c->channels;
  s->best = INFINITY, s->count = 0;
  if (gtco_product_along_k(problem)) {
    along_k(s);
    return;
  }
  for (int i = 0; i < 5; ++i) { /* those that are mostly the fastest come first, so that others are passed over */
    const int32_t feed = feeds[i];
    if (!gtco_product_feeds(problem, feed) || (feed == GTCO_PACKED && (problem->k < 128 || problem->m < 2))) continue;
    int kept[KEPT];
    level t;
    int64_t rows;
    gtco_product_rows(problem, feed, &t.cut, &rows, &t.depth);
    const int chosen = widths(rows, problem->n, kept);
    for (int w = 0; w < chosen; ++w) {
      t.kernel = kept[w] + feed, t.nest = &gtco_the_nests[t.kernel];
      candidates_of(s, &t, rows);
    }
  }
}

int gtco_product_candidates(const gtco_problem* problem, int threads, int room, gtco_product_config* configs,
                            double* seconds) {
  search s = {.problem = problem, .threads = threads, .all = 1, .room = room, .configs = configs, .seconds = seconds};
  find(&s);
  return s.count;
}

void gtco_product_choose(const gtco_problem* problem, int threads, gtco_product_config* config, double* seconds) {
  search s = {.problem = problem, .threads = threads, .room = 1, .configs = config, .seconds = seconds};
  find(&s);
}
