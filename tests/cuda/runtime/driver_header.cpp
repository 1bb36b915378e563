// gtco/runtime/csrc/cuda/driver.h beside NVIDIA's cuda.h: it compiles if both say the same.
#define __CUDA_API_VERSION_INTERNAL  // each function under the name that the driver exports
#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "gtco_api.h"

namespace ours {
#include "cuda/driver.h"  // its `struct CUctx_st*` is the global one: handles are the same types
}

template <class T>
constexpr bool INTEGER = std::is_integral_v<T> || std::is_enum_v<T>;

// True for types passed in the same way: one handle, integers of one size, pointers to these.
template <class Ours, class Theirs>
struct Alike : std::bool_constant<INTEGER<Ours> && INTEGER<Theirs> &&
                                  sizeof(Ours) == sizeof(Theirs)> {};
template <>
struct Alike<void, void> : std::true_type {};
template <class T>
struct Alike<T*, T*> : std::true_type {};
template <class Ours, class Theirs>
struct Alike<Ours*, Theirs*>
    : Alike<std::remove_const_t<Ours>, std::remove_const_t<Theirs>> {};
template <>
struct Alike<ours::gtco_node_params, CUDA_KERNEL_NODE_PARAMS_v2> : std::true_type {};  // below
template <>
struct Alike<ours::gtco_edge, CUgraphEdgeData> : std::true_type {};
template <class R, class S, class... Ours, class... Theirs>
struct Alike<R(Ours...), S(Theirs...)> {
  template <bool Counts>
  static constexpr bool each() {
    if constexpr (Counts) {
      return (Alike<R, S>::value && ... && Alike<Ours, Theirs>::value);
    }
    return false;
  }
  static constexpr bool value = each<sizeof...(Ours) == sizeof...(Theirs)>();
};

#define FUNCTION(name, exported, parameters) \
  static_assert(Alike<decltype(ours::gtco_driver::name), decltype(&::exported)>::value, #exported);
GTCO_DRIVER_FUNCTIONS(FUNCTION)

#define SAME_SIZE(Ours, Theirs) static_assert(sizeof(ours::Ours) == sizeof(Theirs), "size")
#define SAME_PLACE(Ours, mine, Theirs, theirs) \
  static_assert(offsetof(ours::Ours, mine) == offsetof(Theirs, theirs), #theirs)
SAME_SIZE(gtco_node_params, CUDA_KERNEL_NODE_PARAMS_v2);
#define OF_NODE(mine, theirs) SAME_PLACE(gtco_node_params, mine, CUDA_KERNEL_NODE_PARAMS_v2, theirs)
OF_NODE(function, func);
OF_NODE(grid, gridDimX);
OF_NODE(block, blockDimX);
OF_NODE(shared, sharedMemBytes);
OF_NODE(params, kernelParams);
OF_NODE(extra, extra);
OF_NODE(kernel, kern);
OF_NODE(context, ctx);
SAME_SIZE(gtco_edge, CUgraphEdgeData);
SAME_PLACE(gtco_edge, from_port, CUgraphEdgeData, from_port);
SAME_PLACE(gtco_edge, to_port, CUgraphEdgeData, to_port);
SAME_PLACE(gtco_edge, type, CUgraphEdgeData, type);
static_assert(GTCO_PORT_PROGRAMMATIC == CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC, "port");

#define CONSTANT(name) static_assert(long(ours::name) == long(::name), #name);
GTCO_CONSTANTS(CONSTANT)  // by tests/cuda/runtime/test_driver_header.py
