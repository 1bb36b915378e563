/* The types of the generated table, which has everything about one model that the runtime needs. gtco/runtime/writing/table.py
 * writes it. */
#ifndef GTCO_PLAN_H
#define GTCO_PLAN_H

#include <stddef.h>
#include <stdint.h>

#include "gtco_api.h"

#define GTCO_ALIGNMENT 64 /* of every buffer a kernel sees */
#define GTCO_LEAST_ALIGNMENT 16 /* of a caller's buffer that is used in place, as malloc gives it */
#define GTCO_ID_BYTES 32

/* Runs tasks [begin, end) of a step: b are its buffers, w the calling thread's scratch. */
typedef void (*gtco_kernel)(void* const* b, void* w, int64_t begin, int64_t end);

typedef enum { GTCO_REF_INPUT, GTCO_REF_OUTPUT, GTCO_REF_ARENA, GTCO_REF_WEIGHT } gtco_ref_kind;

typedef struct {
  uint64_t kind : 3;    /* gtco_ref_kind */
  uint64_t tensor : 17; /* number of the input or output */
  int64_t offset : 44;  /* in bytes, from the beginning of that tensor, of the arena or of the weights */
} gtco_ref;

typedef struct {
  gtco_kernel kernel;
  int32_t first_ref; /* its buffers are refs[first_ref], refs[first_ref + 1], ... */
  uint32_t tasks;    /* independent parts, 1 ... 2^31 - 1 */
  int32_t closed;    /* 1 if the kernel calls no code outside of the library */
} gtco_step;

/* The model at one choice of its inputs' sizes: a range of the plan's steps, and the range of their refs. */
typedef struct {
  const gtco_tensor_info* inputs; /* every size is a number */
  const gtco_tensor_info* outputs;
  int32_t first_step, num_steps;
  int32_t first_ref, num_refs;
} gtco_variant;

/* The variants as which any number of samples is run, at one choice of the model's other sizes (cover.h). */
typedef struct {
  int32_t first_variant, num_variants;
  const int64_t* sizes;  /* samples of each of these variants, ascending */
  const int64_t* prices; /* predicted nanoseconds of each one's run, 1 or more */
} gtco_cover;

/* Of a model that computes each sample by itself: any number of samples of the range is run as parts, and each part is a
 * variant. Samples are along the outermost axis of every tensor that has them. */
typedef struct {
  const char* symbol;
  int64_t low, high, step;
  const int32_t* axes; /* of each tensor, inputs first: where its samples are; -1 if it is the same for all samples */
  const gtco_cover* covers; /* one for each choice of the other sizes */
  int32_t num_covers;
} gtco_range;

/* A dimension whose sizes in the variants are a range, each a variant of its own. */
typedef struct {
  const char* symbol;
  int64_t low, high, step;
} gtco_named_range;

typedef struct {
  const char* name;
  const char* const* features; /* names from cpu/features.def */
  const gtco_tensor_info* inputs; /* sizes that differ between the variants are symbols */
  const gtco_tensor_info* outputs;
  const gtco_variant* variants; /* at least one */
  const gtco_range* range; /* NULL: a variant for each shape */
  const gtco_named_range* named_ranges; /* for messages; NULL if there are none */
  const gtco_step* steps; /* of all variants, one after the other, as refs are */
  const gtco_ref* refs;
  int32_t num_features, num_inputs, num_outputs, num_variants, num_steps, num_refs, num_named_ranges;
  int32_t threads;           /* 0: all that the process may use */
  int64_t arena_bytes;       /* the largest of the variants */
  int64_t workspace_bytes;   /* a thread's, the largest of the steps */
  const unsigned char* weights; /* NULL: in the file beside the library */
  int64_t weights_bytes;
  unsigned char id[GTCO_ID_BYTES]; /* ties the library to its weights file */
} gtco_plan;

extern const gtco_plan gtco_the_plan;

/* JSON, compressed; metadata.c */
extern const unsigned char gtco_the_metadata[];
extern const int64_t gtco_the_metadata_bytes[2]; /* here, and of the text */
extern char gtco_the_metadata_text[];            /* room for the text and a zero behind it */

#endif /* GTCO_PLAN_H */
