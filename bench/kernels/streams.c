/* What memory and the vector units give: the limits of bench/kernels/memory_bound.py. Plain C, so that they do
 * not rest on code that gtco generated. Built by bench/kernels/limits.py. */
#include <immintrin.h>
#include <pthread.h>
#include <stddef.h>
#include <time.h>

enum { READ, SCALE, DIVIDE, NORMALISE, SOFTMAX };
enum { MOST_THREADS = 256, ROW = 256, SIDE = 4 }; /* floats of a row; rows at once */

#ifdef __AVX512F__
enum { LANES = 16 };
typedef __m512 vector;
#define MAX _mm512_max_ps
static inline float sum(vector v) { return _mm512_reduce_add_ps(v); }
static inline float largest(vector v) { return _mm512_reduce_max_ps(v); }
#else
enum { LANES = 8 };
typedef __m256 vector;
#define MAX _mm256_max_ps
#define FOLD(v, of) /* halves, then quarters, then neighbours */ \
    __m128 h = of##_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1)); \
    h = of##_ps(h, _mm_movehl_ps(h, h)); \
    return _mm_cvtss_f32(of##_ps(h, _mm_movehdup_ps(h)))
static inline float sum(vector v) { FOLD(v, _mm_add); }
static inline float largest(vector v) { FOLD(v, _mm_max); }
#endif
typedef int lanes __attribute__((vector_size(4 * LANES)));

struct share {
    int kind;
    const float *from;
    float *to;
    size_t size; /* floats of a pass */
    double seconds;
    pthread_barrier_t *start;
    double passes, began, ended, sink;
};

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static inline vector all(float value) { return (vector){0} + value; }

static inline vector at(const float *x, int r, int i) { return *(const vector *)(x + r * ROW + i); }

/* LayerNorm of SIDE rows in the fewest passes there can be: sums and squares about zero, then the output. */
static void normalise(const float *x, float *y) {
    vector sums[SIDE], squares[SIDE];
    for (int r = 0; r < SIDE; r++) sums[r] = squares[r] = all(0.0f);
    for (int i = 0; i < ROW; i += LANES)
        for (int r = 0; r < SIDE; r++) {
            vector v = at(x, r, i);
            sums[r] += v;
            squares[r] += v * v;
        }
    for (int r = 0; r < SIDE; r++) {
        float mean = sum(sums[r]) / ROW, square = sum(squares[r]) / ROW;
        float scale = 1.0f / __builtin_sqrtf(square - mean * mean + 1.0f);
        sums[r] = all(-mean * scale), squares[r] = all(scale);
    }
    for (int i = 0; i < ROW; i += LANES)
        for (int r = 0; r < SIDE; r++)
            *(vector *)(y + r * ROW + i) = (at(x, r, i) * squares[r] + sums[r]) * 1.5f + 0.5f;
}

/* Softmax of SIDE rows: maxima, exponentials (a polynomial of degree 5) and their sums, quotients. */
static void softmax(const float *x, float *y) {
    vector tops[SIDE], sums[SIDE];
    for (int r = 0; r < SIDE; r++) tops[r] = at(x, r, 0), sums[r] = all(0.0f);
    for (int i = LANES; i < ROW; i += LANES)
        for (int r = 0; r < SIDE; r++) tops[r] = MAX(tops[r], at(x, r, i));
    for (int r = 0; r < SIDE; r++) tops[r] = all(largest(tops[r]));
    for (int i = 0; i < ROW; i += LANES)
        for (int r = 0; r < SIDE; r++) {
            vector d = MAX(at(x, r, i) - tops[r], all(-87.0f));
            vector n = d * 1.44269504f + 12582912.0f; /* rounded: a whole number in the last bits */
            vector f = d - (n - 12582912.0f) * 0.693147182f;
            vector p = f * 8.3333333e-3f + 4.1666667e-2f;
            p = p * f + 1.6666667e-1f;
            p = p * f + 0.5f;
            p = p * f + 1.0f;
            p = p * f + 1.0f;
            p = (vector)((lanes)p + ((lanes)n << 23));
            sums[r] += p;
            *(vector *)(y + r * ROW + i) = p;
        }
    for (int r = 0; r < SIDE; r++) sums[r] = all(1.0f / sum(sums[r]));
    for (int i = 0; i < ROW; i += LANES)
        for (int r = 0; r < SIDE; r++) *(vector *)(y + r * ROW + i) = at(y, r, i) * sums[r];
}

static float pass(const struct share *s) {
    const float *restrict from = s->from;
    float *restrict to = s->to;
    float sum = 0.0f;
    switch (s->kind) {
    case READ: /* eight vectors of sums: an addition's latency does not bound it */
        {
            float sums[128] = {0};
            size_t i = 0;
            for (; i + 128 <= s->size; i += 128)
                for (int k = 0; k < 128; k++) sums[k] += from[i + (size_t)k];
            for (int k = 0; k < 128; k++) sum += sums[k];
        }
        break;
    case SCALE: /* a product: a plain copy would become memcpy, which may go around the caches */
        for (size_t i = 0; i < s->size; i++) to[i] = from[i] * 1.0001f;
        break;
    case NORMALISE:
        for (size_t i = 0; i + SIDE * ROW <= s->size; i += SIDE * ROW) normalise(from + i, to + i);
        break;
    case SOFTMAX:
        for (size_t i = 0; i + SIDE * ROW <= s->size; i += SIDE * ROW) softmax(from + i, to + i);
        break;
    case DIVIDE:
        for (size_t i = 0; i < s->size; i++) to[i] = 1.0001f / from[i];
        break;
    }
    return sum;
}

static void *run(void *argument) {
    struct share *s = argument;
    s->sink = pass(s);
    pthread_barrier_wait(s->start);
    s->began = s->ended = now();
    size_t between = s->size < 65536 ? 65536 / s->size : 1; /* passes between looks at the clock */
    while (s->ended - s->began < s->seconds) {
        for (size_t i = 0; i < between; i++) s->sink += pass(s);
        s->passes += (double)between;
        s->ended = now();
    }
    return NULL;
}

/* Passes a second that `threads` threads make together over `size` floats each; 0 where no thread could
 * be started. `from` and `to` hold threads * size floats. */
double streams(int kind, int threads, const float *from, float *to, size_t size, double seconds) {
    static struct share shares[MOST_THREADS];
    pthread_t ids[MOST_THREADS];
    pthread_barrier_t start;
    if (threads < 1 || threads > MOST_THREADS || pthread_barrier_init(&start, NULL, (unsigned)threads)) return 0;
    for (int i = 0; i < threads; i++) {
        shares[i] = (struct share){kind, from + (size_t)i * size, to + (size_t)i * size, size, seconds, &start, 0, 0, 0, 0};
        if (i && pthread_create(&ids[i], NULL, run, &shares[i])) return 0;
    }
    run(&shares[0]);
    double rate = 0, first = shares[0].began;
    for (int i = 1; i < threads; i++) {
        pthread_join(ids[i], NULL);
        if (shares[i].began < first) first = shares[i].began;
    }
    for (int i = 0; i < threads; i++) rate += shares[i].passes / (shares[i].ended - first);
    pthread_barrier_destroy(&start);
    return rate;
}
