/* The C interface of a model that gtco compiled, for a CPU or for NVIDIA GPUs.
 *
 * One shared library holds one model, of one shape or of several. A handle (gtco_model) owns its memory and its threads:
 * any number of handles may be open, and different handles may run at the same time from different threads. One handle
 * runs one call at a time.
 * Every function reports failure through its result. None ends the process, but for one case: a sandbox that the
 * process entered after the model was opened forbids membarrier between two calls of it. Results could be wrong then.
 *
 * A model for GPUs needs the NVIDIA driver where it is opened, and nothing else of CUDA. It leaves the calling thread's
 * current context as it was.
 *
 * To use several models in one program, dlopen each library (RTLD_LOCAL) and look the functions up by name.
 */
#ifndef GTCO_API_H
#define GTCO_API_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define GTCO_ABI_VERSION 1

typedef enum {
  GTCO_OK = 0,
  GTCO_ERROR_ARGUMENT = 1, /* a null or overlapping pointer, an option out of range */
  GTCO_ERROR_CPU = 2,      /* the library was built for instructions that this CPU or operating system lacks */
  GTCO_ERROR_MEMORY = 3,   /* memory could not be allocated */
  GTCO_ERROR_WEIGHTS = 4,  /* the weights file beside the library is missing, truncated or of another model */
  GTCO_ERROR_THREADS = 5,  /* a thread could not be started */
  GTCO_ERROR_BUSY = 6,     /* another thread is inside gtco_run with this handle: open one handle per thread */
  GTCO_ERROR_DRIVER = 7,   /* a model for GPUs: there is no NVIDIA driver, or it is too old */
  GTCO_ERROR_DEVICE = 8,   /* there is no such GPU, or a call of the driver failed; the message has the error's name */
  GTCO_ERROR_IMAGE = 9     /* the library holds neither machine code nor PTX that runs on this GPU */
} gtco_status;

typedef enum {
  GTCO_FLOAT32 = 0,
  GTCO_FLOAT64 = 1,
  GTCO_FLOAT16 = 2,
  GTCO_BFLOAT16 = 3,
  GTCO_INT64 = 4,
  GTCO_INT32 = 5,
  GTCO_INT16 = 6,
  GTCO_INT8 = 7,
  GTCO_UINT64 = 8,
  GTCO_UINT32 = 9,
  GTCO_UINT16 = 10,
  GTCO_UINT8 = 11,
  GTCO_BOOL = 12 /* one byte: 0 or 1 */
} gtco_dtype;

/* An input or an output. Tensors are dense and row-major. */
typedef struct {
  const char* name;
  gtco_dtype dtype;
  int32_t ndim;
  const int64_t* dims;        /* -1 if the size is symbolic */
  const char* const* symbols; /* NULL if the size is a number, else the symbol's name */
  int64_t nbytes;             /* -1 if a size is symbolic */
} gtco_tensor_info;

/* How a model for GPUs is launched. */
typedef enum {
  GTCO_LAUNCHES_AS_COMPILED = 0, /* as the compile chose; as a graph if the GPU cannot do that */
  GTCO_LAUNCHES_GRAPH = 1,       /* one kernel a step, as a CUDA graph */
  GTCO_LAUNCHES_PERSISTENT = 2   /* one kernel for all steps; an error if the library or the GPU lacks it */
} gtco_launches_option;

/* Zero-initialize it, then set what you need. */
typedef struct {
  int32_t num_threads;       /* 0: $GTCO_NUM_THREADS, else the number chosen at compile time, else every core that the
                                process may use (affinity mask and cgroup quota) */
  int32_t spin_microseconds; /* how long an idle thread spins before it sleeps; 0: default, negative: never spin */
  int32_t device;            /* a model for GPUs: number of the GPU, as the driver counts those that are visible */
  int32_t launches;          /* a model for GPUs: a gtco_launches_option */
  int32_t reserved[4];
} gtco_options;

typedef struct gtco_model gtco_model;

/* Opens the model; NULL options mean the defaults. On failure *model is NULL and gtco_last_error(NULL) says why. */
gtco_status gtco_open(const gtco_options* options, gtco_model** model);
/* Frees everything; NULL is allowed. No other call on the handle may be under way. */
void gtco_close(gtco_model* model);

/* Inputs and outputs, in the order that gtco_run takes them. NULL if the index is out of range. In a model that was
 * compiled for several shapes (gtco compile --dim batch=1,4,16, or --dim batch=1..64), sizes that differ between them
 * are -1 and have a symbol. */
int gtco_num_inputs(const gtco_model* model);
int gtco_num_outputs(const gtco_model* model);
const gtco_tensor_info* gtco_input(const gtco_model* model, int index);
const gtco_tensor_info* gtco_output(const gtco_model* model, int index);

/* Chooses the shapes of the next runs: shapes[i] are the gtco_input(model, i)->ndim sizes of input i. Returns
 * GTCO_ERROR_ARGUMENT if the model was not compiled for them; the shapes then stay what they were. Nothing is allocated
 * or computed anew, so shapes may change from run to run. A model of several shapes needs this call before its first
 * run; a model of one shape does not need it. */
gtco_status gtco_set_shapes(gtco_model* model, const int64_t* const* shapes);

/* Inputs and outputs with the sizes that gtco_set_shapes chose. No size is -1, so the memory of an output is known
 * before the run. NULL before the first gtco_set_shapes of a model of several shapes, and if the index is out of range. */
const gtco_tensor_info* gtco_sized_input(const gtco_model* model, int index);
const gtco_tensor_info* gtco_sized_output(const gtco_model* model, int index);

/* gtco_set_shapes and gtco_run in one call. */
gtco_status gtco_run_shapes(gtco_model* model, const int64_t* const* shapes, const void* const* inputs,
                            void* const* outputs);

/* Runs the model. inputs and outputs are arrays of gtco_num_inputs and gtco_num_outputs pointers, of any alignment;
 * pointers aligned to 16 bytes, as malloc gives them, are used in place, others cost a copy (as does memory that is not
 * aligned to 64 bytes and ends less than 64 bytes before a page does). Inputs are not written to; outputs may overlap
 * neither inputs nor each other.
 *
 * A model for GPUs takes pointers of the host and of its own device, in any mixture: those of the device that are
 * aligned to 16 bytes are used in place. It returns when the outputs are there. What earlier work of the legacy default
 * stream wrote is waited for, that of other streams is not. */
gtco_status gtco_run(gtco_model* model, const void* const* inputs, void* const* outputs);

/* gtco_run on the caller's stream (CUstream or cudaStream_t; NULL is the legacy default stream), only for pointers of
 * the device. It returns as soon as the work is in the stream. Runs of one handle on several streams wait for each
 * other there. While the stream is being captured, the run becomes part of the caller's graph. The graph uses the
 * handle's memory, so keep the handle open for as long as the graph exists. Replays are not ordered against other runs
 * of the handle: runs that overlap give wrong results, later runs do not. A model for a CPU runs at once and takes only
 * NULL. */
gtco_status gtco_run_on(gtco_model* model, const void* const* inputs, void* const* outputs, void* stream);

/* Returns once every run that gtco_run_on put into a stream is over (except runs in captured streams). Until then the
 * memory of its inputs and outputs must stay valid. */
gtco_status gtco_wait(gtco_model* model);

/* gtco_run that also stores each step's seconds in seconds_per_step[gtco_num_steps]. */
gtco_status gtco_profile(gtco_model* model, const void* const* inputs, void* const* outputs, double* seconds_per_step);
/* Of a run with the shapes that are set; 0 if none are. */
int gtco_num_steps(const gtco_model* model);

/* Threads of the CPU that a run uses, the caller included. */
int gtco_num_threads(const gtco_model* model);

/* How a run of this handle is launched, in words, such as "persistent: 132 blocks of 256 threads" or "graph: 91
 * kernels". If the compile chose another way, it also says why. A model for a CPU: "". */
const char* gtco_launch_mode(const gtco_model* model);

/* JSON: the model, its tensors, target, versions and steps. The second needs no handle, so it also answers on a machine
 * that lacks the instructions. */
const char* gtco_metadata(const gtco_model* model);
const char* gtco_artifact_metadata(void);

/* The last failure of this handle; with NULL, of this thread's last gtco_open. "" if there was none. */
const char* gtco_last_error(const gtco_model* model);
const char* gtco_status_string(gtco_status status);

/* GTCO_ABI_VERSION of the library. */
int gtco_abi_version(void);

#ifdef __cplusplus
}
#endif

#endif /* GTCO_API_H */
