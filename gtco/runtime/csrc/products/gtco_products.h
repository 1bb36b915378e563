/* Float32 products C[m, n] = A[m, k] x B[k, n] and convolutions of any size, from kernels that were compiled once. Matrices are row-major
 * and dense. A handle is used by one thread at a time; several handles may be used at once.
 *
 *   gtco_products* p = gtco_products_open(0);
 *   float* packed = aligned_alloc(64, gtco_products_packed_bytes(n, k));
 *   gtco_products_pack(b, n, k, packed);           // once for all m
 *   gtco_products_set(p, m, n, k);                 // chooses the kernel; a few microseconds, remembered
 *   gtco_products_run(p, a, packed, c);
 *
 * Functions that return int return 0, or -1. Those that set sizes or run leave the reason in gtco_products_error. */
#ifndef GTCO_PRODUCTS_H
#define GTCO_PRODUCTS_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct gtco_products gtco_products;

/* How a product is run: a kernel by its number, the chunks of rows and columns, the block of k, and the row blocks that
 * are worked on at once. */
typedef struct {
  int64_t kernel, chunks_m, chunks_n, kc, held;
} gtco_product_config;

/* 0 threads: as many as the process has cores. NULL if there is no memory, or the CPU lacks instructions. */
gtco_products* gtco_products_open(int threads);
void gtco_products_close(gtco_products* p);

/* Bytes of packed B, a multiple of 64; -1 if the sizes are not positive or too large. */
int64_t gtco_products_packed_bytes(int64_t n, int64_t k);
/* `packed` begins at a multiple of 64. Returns -1 if the sizes are wrong. */
int gtco_products_pack(const float* b, int64_t n, int64_t k, float* packed);

/* Bytes of scratch that the handle takes for this product, on all threads; -1 if the sizes are wrong. */
int64_t gtco_products_workspace_bytes(gtco_products* p, int64_t m, int64_t n, int64_t k);
/* The sizes of the next runs, with the config of least price. */
int gtco_products_set(gtco_products* p, int64_t m, int64_t n, int64_t k);
/* The same with a config that the caller chooses. */
int gtco_products_set_config(gtco_products* p, int64_t m, int64_t n, int64_t k, const gtco_product_config* config);
int gtco_products_run(gtco_products* p, const float* a, const float* packed, float* c);

/* The config of least price, and its predicted seconds. */
int gtco_products_choose(const gtco_products* p, int64_t m, int64_t n, int64_t k, gtco_product_config* config,
                         double* seconds);
/* Fills at most `room` candidates, and their predicted seconds; returns how many there are, or -1. */
int gtco_products_candidates(const gtco_products* p, int64_t m, int64_t n, int64_t k, int room,
                             gtco_product_config* configs, double* seconds);
const char* gtco_products_kernel_name(int64_t kernel); /* NULL: there is none of this number */
const char* gtco_products_error(const gtco_products* p);

/* Convolutions of any size, by the same kernels. Images are [batch, height, width, channels], the filter is
 * [kernel_h, kernel_w, channels, n], the output [batch, out_h, out_w, n]; all of them are float32 and dense. Stride and
 * padding (zeros on all four sides) are the same along both axes.
 *
 *   gtco_convolution c = {batch, height, width, channels, kernel_h, kernel_w, stride, padding};
 *   float* packed = aligned_alloc(64, gtco_convolutions_packed_bytes(&c, n));
 *   gtco_convolutions_pack(filter, &c, n, packed); // once for any batch, height, width and padding
 *   gtco_convolutions_set(p, &c, n);
 *   gtco_products_run(p, images, packed, output); */
typedef struct {
  int64_t batch, height, width, channels, kernel_h, kernel_w, stride, padding;
} gtco_convolution;

int64_t gtco_convolutions_packed_bytes(const gtco_convolution* c, int64_t n);
int gtco_convolutions_pack(const float* filter, const gtco_convolution* c, int64_t n, float* packed);
int gtco_convolutions_set(gtco_products* p, const gtco_convolution* c, int64_t n);
int gtco_convolutions_set_config(gtco_products* p, const gtco_convolution* c, int64_t n,
                                 const gtco_product_config* config);
int gtco_convolutions_choose(const gtco_products* p, const gtco_convolution* c, int64_t n, gtco_product_config* config,
                             double* seconds);
int gtco_convolutions_candidates(const gtco_products* p, const gtco_convolution* c, int64_t n, int room,
                                 gtco_product_config* configs, double* seconds);
/* Writes height and width of the output's images. Both axes count alone: 0 if the window is larger than the padded
 * image. */
void gtco_convolutions_output(const gtco_convolution* c, int64_t* out_h, int64_t* out_w);

#ifdef __cplusplus
}
#endif

#endif /* GTCO_PRODUCTS_H */
