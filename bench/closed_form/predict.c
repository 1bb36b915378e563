/* The closed form of a product with constant weights, in C: what it costs to configure a kernel when
 * its sizes become known. It follows gtco/search/closed_form/form.py and the decisions of the space
 * of products (gtco/tensor/sketch/gemm/cpu.py); tests/bench/test_closed_form.py holds the two
 * against each other.
 */
#include <math.h>
#include <time.h>

enum { TILE, CHUNKS_M, CHUNKS_N, A, B, KC, ORDER, MC, PREFETCH, DECISIONS };
enum { FIRST = 15, COORDINATES = 15, MOST = 128, HEIGHTS = 33, WIDTHS = 7, KINDS = 4,
       FEW = 32 };
static const int WIDTH[DECISIONS] = {2, 1, 1, 2, 2, 1, 2, 1, 3};
static const double FAST = 0.95, BALANCED = 0.94;

struct tile { int kind, rows, vectors; };

struct machine {
    int cores, lanes, tiles, kinds;
    int item, out;             /* bytes of an element of A and B */
    int unit;                  /* of a block of k */
    int step[KINDS];           /* of k, of each kind of rows */
    double products[KINDS];    /* of one lane of one operation */
    double bandwidth;          /* of DRAM, for one core */
    double capacity;           /* of L2 */
    struct tile tile[MOST];
    double rate[KINDS][HEIGHTS][WIDTHS];
    double log[HEIGHTS]; /* of small numbers, to the base 2 */
};

static int up(int a, int b) { return (a + b - 1) / b; }
static long least(long a, long b) { return a < b ? a : b; }

static int chunk_options(long pieces, long cores, long *found)
{
    static const long WANTED[] = {0, 1, 2, 3, 4, 6, 8, 16, 32, 64};
    int count = 0;
    for (int n = 0; n < 10; n++) {
        long wanted = n ? cores * WANTED[n] : 1;
        long chunks = up(pieces, up(pieces, least(wanted, pieces)));
        if (!count || chunks > found[count - 1])
            found[count++] = chunks;
        if (wanted >= pieces)
            break;
    }
    return count;
}

static int depth_options(long k, long unit, long *found)
{
    static const long WANTED[] = {128, 256, 384, 512, 768, 1024};
    int count = 0;
    for (int n = 0; n <= 6; n++) {
        long depth = k;
        if (n < 6) {
            if (WANTED[n] >= k)
                continue;
            long blocks = up(k, WANTED[n]);
            depth = least(k, up(k, blocks * unit) * unit);
        }
        int at = 0;
        while (at < count && found[at] < depth)
            at++;
        if (at < count && found[at] == depth)
            continue;
        for (int later = count++; later > at; later--)
            found[later] = found[later - 1];
        found[at] = depth;
    }
    return count;
}

/* The point that the polynomials of a decision give; moves on to the next decision's weights. */
static void point(const double **weights, const double *terms, int before, int width, double *out)
{
    for (int row = 0; row < width; row++) {
        const double *w = *weights;
        double sums[4] = {0}; /* side by side, since each addition waits for the one before */
        int n = 0, end = FIRST + before;
        for (; n + 4 <= end; n += 4)
            for (int i = 0; i < 4; i++)
                sums[i] += w[n + i] * terms[n + i];
        for (; n < end; n++)
            sums[0] += w[n] * terms[n];
        *weights += end;
        out[row] = sums[0] + sums[1] + (sums[2] + sums[3]);
    }
}

/* The number whose logarithm lies nearest, of those that are admitted (all without `shares`). */
static int nearest(const long *options, const double *shares, int count, double wanted)
{
    double best = 0, far = INFINITY, at = exp2(wanted < -60 ? -60 : wanted > 60 ? 60 : wanted);
    int found = 0;
    for (int n = 0; shares && n < count; n++)
        best = shares[n] > best ? shares[n] : best;
    for (int n = 0; n < count; n++) {
        double ratio = options[n] > at ? options[n] / at : at / options[n];
        if ((!shares || shares[n] >= BALANCED * best) && ratio < far)
            far = ratio, found = n;
    }
    return found;
}

static int word(const double *wanted, int words, double *place)
{
    int found = 0;
    for (int n = 1; n < words; n++)
        found = wanted[n] > wanted[found] ? n : found;
    for (int n = 0; n < words; n++)
        place[n] = n == found;
    return found;
}

/* `few` and `many` are the weights of each decision, [coordinates, FIRST + coordinates before], one
 * after the other, for few rows and for more.
 * Fills chosen[DECISIONS] with tile's number, numbers of chunks, words' numbers, blocks; -1 where
 * the space has no such decision. Sizes are positive.
 */
void closed_form(const struct machine *of, const double *few, const double *many, long m, long n,
                 long k, long *chosen)
{
    const double *weights = m <= FEW ? few : many;
    double terms[FIRST + COORDINATES] = {0}, wanted[4], shares[MOST];
    double logs[5] = {0, log2(m), log2(n), log2(k), log2(of->cores)};
    long options[MOST];
    double *t = terms;
    *t++ = 1;
    for (int i = 0; i < 5; i++) *t++ = logs[i];
    *t++ = m / 4096.0, *t++ = n / 4096.0, *t++ = k / 4096.0;
    *t++ = logs[1] * logs[1], *t++ = logs[2] * logs[2], *t++ = logs[3] * logs[3];
    *t++ = logs[1] * logs[2], *t++ = logs[1] * logs[3], *t++ = logs[2] * logs[3];
    int before = 0;

    /* the tile */
    point(&weights, terms, before, 2, wanted);
    int kept[MOST], count = 0, large = 0, tallest = 0;
    int blocks[HEIGHTS], heights[HEIGHTS];
    double useful[WIDTHS];
    for (int i = 0; i < of->tiles; i++)
        tallest = of->tile[i].rows > tallest ? of->tile[i].rows : tallest;
    for (int rows = 1; rows <= tallest; rows++) {
        blocks[rows] = up(m, rows);
        heights[rows] = up(m, blocks[rows]);
    }
    for (int vectors = 1; vectors < WIDTHS; vectors++)
        useful[vectors] = (double)n / ((double)up(n, vectors * of->lanes) * vectors * of->lanes);
    for (int i = 0; i < of->tiles; i++) {
        const struct tile *one = &of->tile[i];
        if (one->rows - 1 >= m || (long)(one->vectors - 1) * of->lanes >= n)
            continue;
        if (count) { /* the tallest stand first: of equal numbers of blocks it is kept */
            const struct tile *other = &of->tile[kept[count - 1]];
            if (other->kind == one->kind && other->vectors == one->vectors &&
                blocks[other->rows] == blocks[one->rows])
                continue;
        }
        kept[count++] = i;
        large += one->rows * one->vectors >= 8 || one->rows >= m / 2;
    }
    double fastest = 0, far = INFINITY;
    for (int j = 0; j < count; j++) {
        const struct tile *one = &of->tile[kept[j]];
        int in = !large || one->rows * one->vectors >= 8 || one->rows >= m / 2;
        double rate = of->rate[one->kind][heights[one->rows]][one->vectors];
        shares[j] = in ? rate * (useful[one->vectors] * of->products[one->kind]) : -1;
        fastest = shares[j] > fastest ? shares[j] : fastest;
    }
    double demand = m * of->bandwidth / ((double)of->lanes * of->item);
    double bound = FAST * fastest < demand ? FAST * fastest : demand;
    int tile = 0;
    long height = 1;
    for (int j = 0; j < count; j++) {
        const struct tile *one = &of->tile[kept[j]];
        if (shares[j] < 0 || shares[j] < bound)
            continue;
        int high = heights[one->rows];
        double a = of->log[high] - wanted[0], b = of->log[one->vectors] - wanted[1];
        if (a * a + b * b < far)
            far = a * a + b * b, tile = kept[j], height = high;
    }
    const struct tile *row = &of->tile[tile];
    chosen[TILE] = tile;
    terms[FIRST + before++] = log2(height);
    terms[FIRST + before++] = log2(row->vectors);

    /* chunks of rows and of columns */
    long pieces_m = up(m, row->rows), pieces_n = up(n, (long)row->vectors * of->lanes);
    point(&weights, terms, before, 1, wanted);
    count = chunk_options(pieces_m, of->cores, options);
    int others[4];
    double part[4];
    for (int times = 0; times < 4; times++) {
        others[times] = times ? least(pieces_n, (long)of->cores << (times - 1)) : 1;
        part[times] = (double)pieces_n / up(pieces_n, others[times]);
    }
    for (int j = 0; j < count; j++) {
        shares[j] = 0;
        for (int times = 0; times < 4; times++) {
            double share = part[times] / up(options[j] * others[times], of->cores);
            shares[j] = share > shares[j] ? share : shares[j];
        }
        shares[j] /= up(pieces_m, options[j]);
    }
    long chunks_m = options[count > 1 ? nearest(options, shares, count, wanted[0]) : 0];
    terms[FIRST + before++] = log2(chunks_m);
    point(&weights, terms, before, 1, wanted);
    count = chunk_options(pieces_n, of->cores, options);
    for (int j = 0; j < count; j++) {
        long waves = up(chunks_m * options[j], of->cores);
        shares[j] = 1.0 / waves / up(pieces_n, options[j]);
    }
    long chunks_n = options[count > 1 ? nearest(options, shares, count, wanted[0]) : 0];
    terms[FIRST + before++] = log2(chunks_n);
    chosen[CHUNKS_M] = chunks_m, chosen[CHUNKS_N] = chunks_n;

    /* where A is read; B lies in panels */
    int direct = k > 1 && k % of->step[row->kind] == 0; /* a column has no row stride */
    point(&weights, terms, before, 2, wanted);
    chosen[A] = 1;
    if (direct)
        chosen[A] = word(wanted, 2, &terms[FIRST + before]);
    else
        terms[FIRST + before + 1] = 1;
    before += 2;
    point(&weights, terms, before, 2, wanted);
    chosen[B] = -1;
    before += 2;

    /* the block of k */
    point(&weights, terms, before, 1, wanted);
    count = depth_options(k, of->unit, options);
    chosen[KC] = options[count > 1 ? nearest(options, 0, count, wanted[0]) : 0];
    terms[FIRST + before++] = log2(chosen[KC]);

    /* order, and the rows that stay in L2 */
    long task_blocks = up(pieces_m, chunks_m), task_panels = up(pieces_n, chunks_n);
    point(&weights, terms, before, 2, wanted);
    chosen[ORDER] = -1;
    if (task_blocks > 1 && task_panels > 1)
        chosen[ORDER] = word(wanted, 2, &terms[FIRST + before]);
    before += 2;
    point(&weights, terms, before, 1, wanted);
    chosen[MC] = -1;
    long low = m / pieces_m, taller = m % pieces_m;
    long task_rows = task_blocks * low + least(taller, task_blocks);
    double bytes = (double)of->item * chosen[KC];
    int once = chosen[A] == 0 && task_panels == 1;
    if (chosen[ORDER] != 1 && !once && task_rows * bytes > floor(of->capacity / 2)) {
        count = 0;
        for (int share = 8; share >= 4; share -= 4) {
            double fits = floor(floor(of->capacity / share) / (bytes * height));
            long blocks = fits < 1 ? 1 : (long)fits;
            if (blocks < task_blocks && (!count || blocks > options[count - 1]))
                options[count++] = blocks;
        }
        if (count) {
            chosen[MC] = options[count > 1 ? nearest(options, 0, count, wanted[0]) : 0];
            terms[FIRST + before] = log2(chosen[MC]);
        }
    }
    before += 1;
    point(&weights, terms, before, 3, wanted);
    chosen[PREFETCH] = word(wanted, 3, &terms[FIRST + before]);
}

/* Seconds of one prediction, over so many products of which `sizes` has m, n and k. */
double seconds(const struct machine *of, const double *few, const double *many, const long *sizes,
               int products, int rounds)
{
    struct timespec begin, end;
    long chosen[DECISIONS];
    volatile long kept = 0;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    for (int round = 0; round < rounds; round++)
        for (int i = 0; i < products; i++) {
            const long *size = &sizes[3 * i];
            closed_form(of, few, many, size[0], size[1], size[2], chosen);
            kept += chosen[KC];
        }
    clock_gettime(CLOCK_MONOTONIC, &end);
    double whole = (end.tv_sec - begin.tv_sec) + 1e-9 * (end.tv_nsec - begin.tv_nsec);
    return whole / rounds / products;
}
