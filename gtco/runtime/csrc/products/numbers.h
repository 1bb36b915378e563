/* What cutting a product and choosing its kernel share. */
#ifndef GTCO_PRODUCTS_NUMBERS_H
#define GTCO_PRODUCTS_NUMBERS_H

#include <stdint.h>

#define USABLE 0.5 /* of a cache, as in gtco/search/analytic.py */
#define RECENT 8   /* weights lie where so many times their bytes do: other layers run in between */
#define FOLDING 9  /* multiply-adds that take as long as folding a vector */

/* fmax and fmin are calls of libm, since they know NaN. */
static inline double larger(double a, double b) { return a > b ? a : b; }
static inline double smaller(double a, double b) { return a < b ? a : b; }
/* Sizes are at most 2^40, so doubles hold them, and divide them in a third of the time of integers. */
static inline int64_t quotient(int64_t a, int64_t b) { return (int64_t)((double)a / (double)b); }
static inline int64_t up(int64_t a, int64_t b) { return quotient(a + b - 1, b); }
static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Distances in scratch of which not all are multiples of the same power of two: an odd number of lines. */
static inline int64_t odd(int64_t elements) { return ((elements + 15) / 16 / 2 * 2 + 1) * 16; }

#endif /* GTCO_PRODUCTS_NUMBERS_H */
