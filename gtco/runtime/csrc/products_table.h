/* The generated table of a library of products: its kernels, and the figures of the machine by which one is chosen.
 * gtco/runtime/products_table.py writes it. */
#ifndef GTCO_PRODUCTS_TABLE_H
#define GTCO_PRODUCTS_TABLE_H

#include <stdint.h>

#include "gtco_products.h"

/* The numbers of a product's loops, in the order of gtco/tensor/nest/open.py: Cut. */
typedef struct {
  int64_t n, k, kc, height, taller, blocks, task_blocks, panels, task_panels, chunks_n, held, lda;
} gtco_cut;

typedef void (*gtco_product_kernel)(const void* a, const void* b, const void* numbers, void* c, void* w, int64_t begin,
                                    int64_t end);

typedef struct {
  gtco_product_kernel kernel;
  const char* name;
  int32_t rows, vectors, packed; /* of a tile; 1: A's rows are copied to scratch */
  int32_t columns; /* 0, or those of a kernel whose vectors lie along k; it has no vectors of columns and no rates */
  const double* rate; /* of tiles of 1 ... rows rows: vector operations a second of a core */
} gtco_product_nest;

typedef struct {
  int32_t lanes, nests, features;
  double l1, l2, l3;                     /* bytes; l2 and inner are of one core */
  double l2_rate, l3_rate, memory_rate;  /* bytes a second; the last of all cores together */
  double handed_rate;                    /* of what other cores wrote */
  double fma_rate, store_rate, launch;   /* vectors a second; seconds */
} gtco_product_machine;

extern const gtco_product_nest gtco_the_nests[];
extern const gtco_product_machine gtco_the_machine;
extern const char* const gtco_the_features[];
extern const int gtco_the_kernels_are_closed; /* 1: none calls code outside of the library */
/* Runs tasks of a product: b are A, B, its cut, C and its kernel. */
void gtco_product_tasks(void* const* b, void* w, int64_t begin, int64_t end);

/* 1 if the vectors of a product lie along k (gtco/tensor/nest/open.py: along_k). */
int gtco_product_along_k(int64_t n, int64_t k);

/* products_choose.c: the candidates of a product, at most `room` of them, each with its price. The sizes are positive.
 * Returns how many there are. */
int gtco_product_candidates(int64_t m, int64_t n, int64_t k, int threads, int room, gtco_product_config* configs,
                            double* seconds);
/* Fills the cut of a config, whose numbers are made smaller where they are too large. Returns its tasks. */
int64_t gtco_product_cut(int64_t m, int64_t n, int64_t k, const gtco_product_config* config, gtco_cut* cut);
/* Bytes of scratch of a thread. */
int64_t gtco_product_workspace(const gtco_product_config* config, const gtco_cut* cut);

#endif /* GTCO_PRODUCTS_TABLE_H */
