/* What memory and the vector units give: the limits of bench/memory_bound.py. Plain C, so that they do
 * not rest on code that gtco generated. Built by bench/limits.py. */
#include <pthread.h>
#include <stddef.h>
#include <time.h>

enum { READ, SCALE, DIVIDE };
enum { MOST_THREADS = 256 };

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
