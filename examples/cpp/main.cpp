// Runs a compiled model on ones and prints its outputs.
//
//     make MODEL=path/to/vit.so && ./run path/to/vit.so [SHAPE of each input, such as 4x3x224x224]
#include <cstdio>
#include <cstdlib>
#include <sstream>

#include MODEL_HEADER
#include "gtco.hpp"

static std::vector<int64_t> shape_of(const std::string& text) {
  std::vector<int64_t> sizes;
  std::istringstream stream(text);
  for (std::string size; std::getline(stream, size, 'x');) sizes.push_back(std::stoll(size));
  return sizes;
}

int main(int argc, char** argv) try {
  if (argc < 2) throw gtco::Error("usage: run MODEL.so [SHAPE ...]");
  gtco::Model model(argv[1]);
  std::vector<std::vector<int64_t>> shapes;
  for (int i = 2; i < argc; ++i) shapes.push_back(shape_of(argv[i]));
  if (!shapes.empty()) model.set_shapes(shapes);

  std::vector<std::vector<float>> values, results;
  std::vector<const void*> inputs;
  std::vector<void*> outputs;
  for (const auto* tensor : model.sized_inputs()) {
    if (tensor->dtype != GTCO_FLOAT32) throw gtco::Error("this example feeds float32 alone");
    inputs.push_back(values.emplace_back(tensor->nbytes / 4, 1.0f).data());
  }
  const auto made = model.sized_outputs();
  for (const auto* tensor : made) outputs.push_back(results.emplace_back((tensor->nbytes + 3) / 4).data());
  model.run(inputs, outputs);

  std::printf("%d threads\n", model.threads());
  for (size_t i = 0; i < made.size(); ++i) {
    std::printf("%s =", made[i]->name);
    for (size_t j = 0; j < results[i].size() && j < 5; ++j) std::printf(" %g", results[i][j]);
    std::printf("%s\n", results[i].size() > 5 ? " ..." : "");
  }
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
