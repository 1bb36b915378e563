/* The generated table of a library of products: its kernels, and the figures of the machine by which one is chosen.
 * gtco/runtime/products_table.py writes it. */
#ifndef GTCO_PRODUCTS_TABLE_H
#define GTCO_PRODUCTS_TABLE_H

#include <stdint.h>

#include "products/gtco_products.h"

/* The numbers of a product's loops, in the order of gtco/tensor/nest/open.py: Cut; where its rows are windows of images,
 * those of open_images.py: Window; and where they are tiles, those of open_filtering.py: TILES. */
typedef struct {
  int64_t n, k, kc, height, taller, blocks, task_blocks, panels, task_panels, chunks_n, held, lda, ahead, past;
  int64_t image_h, image_w, channels, kernel_w, stride, padding, out_h, out_w;
  int64_t size, tiles_h, tiles_w, plane_a, plane_c;
  int64_t neighbours; /* blocks that are cut together: all, or those of a line; no kernel reads it */
} gtco_cut;

/* The product C[m, n] = A[m, k] x B[k, n]. The rows of A are the windows of `images`; if their batch is 0, A is a plain
 * matrix. */
typedef struct {
  int64_t m, n, k;
  gtco_convolution images;
} gtco_problem;

typedef enum { GTCO_DIRECT, GTCO_PACKED, GTCO_GATHERED, GTCO_LINES, GTCO_FILTERED } gtco_feed; /* gtco/tensor/nest/open.py: FEEDS */
#define GTCO_POSITIONS 36 /* of minimal filtering (gtco/tensor/nest/open_filtering.py): tiles of 6 x 6 inputs */
#define GTCO_TILE 6

typedef void (*gtco_product_kernel)(const void* a, const void* b, const void* numbers, void* c, void* w, int64_t begin,
                                    int64_t end);

typedef struct {
  gtco_product_kernel kernel;
  const char* name;
  int32_t rows, vectors, feed; /* of a tile; a gtco_feed */
  int32_t columns; /* 0, or those of a kernel whose vectors lie along k; it has no vectors of columns and no rates */
  const double* rate; /* of tiles of 1 ... rows rows: vector operations a second of a core */
} gtco_product_nest;

typedef struct {
  int32_t lanes, nests, features;
  double l1, l2, l3;                     /* bytes; l2 and inner are of one core */
  double l2_rate, l3_rate;               /* bytes a second */
  double read_rate, memory_rate;         /* of memory and all cores together: only read, and read and written */
  double handed_rate;                    /* of what other cores wrote */
  double fma_rate, store_rate, launch;   /* vectors a second; seconds */
} gtco_product_machine;

extern const gtco_product_nest gtco_the_nests[];
extern const gtco_product_machine gtco_the_machine;
extern const char* const gtco_the_features[];
/* G of minimal filtering for windows of 3 and of 5, [6][taps]. */
extern const double gtco_the_filters_3[GTCO_TILE * 3], gtco_the_filters_5[GTCO_TILE * 5];
extern const int gtco_the_kernels_are_closed; /* 1: none calls code outside of the library */
/* Runs tasks of a product: b are A, B, its cut, C and its kernel. */
void gtco_product_tasks(void* const* b, void* w, int64_t begin, int64_t end);

/* 1 if the vectors of a product lie along k (cut.c). Those of windows never do. */
int gtco_product_along_k(const gtco_problem* problem);

/* choose.c: all candidates of a product, at most `room` of them, each with its price. The sizes are positive. Returns how
 * many there are. */
int gtco_product_candidates(const gtco_problem* problem, int threads, int room, gtco_product_config* configs,
                            double* seconds);
/* The one of least price. */
void gtco_product_choose(const gtco_problem* problem, int threads, gtco_product_config* config, double* seconds);

/* cut.c. 1 if minimal filtering computes this convolution: windows of 3 x 3 or 5 x 5 and stride 1. */
int gtco_filters(const gtco_convolution* c);
/* 1 if a kernel of this feed reads A of this product. */
int gtco_product_feeds(const gtco_problem* problem, int32_t feed);
/* The rows and the steps of k of the product that a feed makes of a problem; rows in lines are those of one line. Fills the
 * part of the cut that is of the images. */
void gtco_product_rows(const gtco_problem* problem, int32_t feed, gtco_cut* cut, int64_t* m, int64_t* k);
/* The elements of a line of images under a line of windows, padding included; and how far apart such lines lie in scratch,
 * where gtco_lines_held of them hold what is under so many lines of the output (gtco/tensor/nest/open_lines.py). */
double gtco_line_of_windows(const gtco_convolution* c);
int64_t gtco_line_pitch(const gtco_cut* cut);
int64_t gtco_lines_held(const gtco_convolution* c, int64_t out_h, int64_t lines);
/* 1 if C is larger than the caches, so that its lines are written past them. */
int gtco_past_caches(const gtco_problem* problem);
/* Fills the cut of a config, whose numbers are made smaller where they are too large. Returns its tasks. */
int64_t gtco_product_cut(const gtco_problem* problem, const gtco_product_config* config, gtco_cut* cut);
/* Bytes of scratch of a thread. */
int64_t gtco_product_workspace(const gtco_problem* problem, const gtco_product_config* config, const gtco_cut* cut);

/* products.c: what products and convolutions share. Functions that return int return 0, or -1 with the reason. */
int gtco_problem_fail(gtco_products* p, const char* format, ...);
void gtco_problem_forget(gtco_products* p); /* the sizes that were set before */
int gtco_problem_set(gtco_products* p, const gtco_problem* problem);
int gtco_problem_set_config(gtco_products* p, const gtco_problem* problem, const gtco_product_config* config);
int gtco_problem_threads(const gtco_products* p);
int gtco_positive(int64_t m, int64_t n, int64_t k); /* 1 if these are sizes of a product */
int64_t gtco_panels(int64_t n); /* of packed B, a vector of columns each */
int64_t gtco_panels_bytes(int64_t n, int64_t k);
void gtco_pack_panels(const float* b, int64_t n, int64_t k, float* packed);

#endif /* GTCO_PRODUCTS_TABLE_H */
