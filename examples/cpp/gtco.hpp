// A model that gtco compiled, as a C++ object (C++17). Copy this header into your project.
//
//     #include "vit.h"                                  // any library's header: all declare the same
//     #include "gtco.hpp"
//
//     gtco::Model model("vit.so", gtco::Options{2});    // throws gtco::Error, as every member does
//     model.set_shapes({{4, 3, 224, 224}});             // only for a model of several shapes
//     model.run({image.data()}, {logits.data()});
//
// The library is opened with dlopen, so a program may hold several models. A Model runs one call at a
// time; open one for each thread. Models of one file share the weights' memory.
#pragma once

#include <dlfcn.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#ifndef GTCO_API_H
#error "first include the header that gtco wrote beside a library, such as vit.h"
#endif

// The library's function of that name, with the type that its header declares.
#define GTCO_FUNCTION(name) reinterpret_cast<decltype(&name)>(symbol(#name))

namespace gtco {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Options {
  int threads = 0;            // 0: those that the library was compiled for, or every core
  int spin_microseconds = 0;  // 0: the default; negative: idle threads sleep at once
};

class Model {
 public:
  explicit Model(const std::string& library, Options options = {}) {
    if (!(library_ = {dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL), &dlclose})) throw Error(dlerror());
    gtco_options given{};
    given.num_threads = options.threads;
    given.spin_microseconds = options.spin_microseconds;
    gtco_model* opened = nullptr;
    if (GTCO_FUNCTION(gtco_open)(&given, &opened) != GTCO_OK)
      throw Error(library + ": " + GTCO_FUNCTION(gtco_last_error)(nullptr));
    model_ = {opened, GTCO_FUNCTION(gtco_close)};
    run_ = GTCO_FUNCTION(gtco_run);
  }

  // What the library says of its tensors: a size that differs between its shapes is -1.
  std::vector<const gtco_tensor_info*> inputs() const {
    return tensors(GTCO_FUNCTION(gtco_num_inputs), GTCO_FUNCTION(gtco_input));
  }
  std::vector<const gtco_tensor_info*> outputs() const {
    return tensors(GTCO_FUNCTION(gtco_num_outputs), GTCO_FUNCTION(gtco_output));
  }
  // The same with the sizes that set_shapes chose.
  std::vector<const gtco_tensor_info*> sized_inputs() const {
    return tensors(GTCO_FUNCTION(gtco_num_inputs), GTCO_FUNCTION(gtco_sized_input));
  }
  std::vector<const gtco_tensor_info*> sized_outputs() const {
    return tensors(GTCO_FUNCTION(gtco_num_outputs), GTCO_FUNCTION(gtco_sized_output));
  }

  // The shape of each input of the next runs.
  void set_shapes(const std::vector<std::vector<int64_t>>& shapes) {
    const auto known = inputs();
    if (shapes.size() != known.size()) throw Error("the model has " + std::to_string(known.size()) + " inputs");
    std::vector<const int64_t*> sizes;
    for (size_t i = 0; i < shapes.size(); ++i) {
      if (shapes[i].size() != static_cast<size_t>(known[i]->ndim))
        throw Error(std::string(known[i]->name) + " has " + std::to_string(known[i]->ndim) + " axes");
      sizes.push_back(shapes[i].data());
    }
    check(GTCO_FUNCTION(gtco_set_shapes)(model_.get(), sizes.data()));
  }

  // Pointers in the order of inputs() and outputs(), to dense row-major memory of the sizes' bytes.
  void run(const std::vector<const void*>& inputs, const std::vector<void*>& outputs) {
    if (inputs.size() != this->inputs().size() || outputs.size() != this->outputs().size())
      throw Error("one pointer for each input and each output");
    check(run_(model_.get(), inputs.data(), outputs.data()));
  }

  int threads() const { return GTCO_FUNCTION(gtco_num_threads)(model_.get()); }

 private:
  void* symbol(const char* name) const {
    void* found = dlsym(library_.get(), name);
    if (!found) throw Error(std::string("this is no model of gtco's: it has no ") + name);
    return found;
  }

  template <typename Count, typename Get>
  std::vector<const gtco_tensor_info*> tensors(Count count, Get get) const {
    std::vector<const gtco_tensor_info*> found(static_cast<size_t>(count(model_.get())));
    for (size_t i = 0; i < found.size(); ++i)
      if (!(found[i] = get(model_.get(), static_cast<int>(i))))
        throw Error("the model was compiled for several shapes: call set_shapes first");
    return found;
  }

  void check(gtco_status status) const {
    if (status != GTCO_OK) throw Error(GTCO_FUNCTION(gtco_last_error)(model_.get()));
  }

  std::unique_ptr<void, int (*)(void*)> library_{nullptr, &dlclose};  // closed last
  std::unique_ptr<gtco_model, void (*)(gtco_model*)> model_{nullptr, nullptr};
  decltype(&gtco_run) run_ = nullptr;
};

}  // namespace gtco

#undef GTCO_FUNCTION
