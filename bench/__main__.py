"""``python -m bench NAME [options]``: runs ``main(argv)`` of the benchmark of that name."""

from __future__ import annotations

import importlib
import sys

from gtco.support.errors import GtcoError, installing
from gtco.support.pipes import until_closed

# A benchmark's name, the folder that it lies in, and what it measures.
BENCHMARKS = {
    "end_to_end": ("models", "every system on whole models, interleaved (docs/results.md)"),
    "readme": ("models", "the tables of docs/results.md and docs/int8.md, from a run's JSON"),
    "check_models": (
        "models",
        "the whole family: does it compile, is it right, how fast, by which kernels",
    ),
    "partition": ("search", "DPOF's unique subgraphs on DETR, beside GTCO's Table IV"),
    "memory_bound": (
        "kernels",
        "normalisation, softmax, gates and movement beside the machine's limits",
    ),
    "convolutions": (
        "kernels",
        "convolutions, stems, heads and small products beside both ONNX peers",
    ),
    "gemm": ("kernels", "products with constant weights in fp32 and bf16, as shares of the peak"),
    "helix": (
        "kernels",
        "products and convolutions of any size from one library, beside oneDNN and ONNX Runtime "
        "(Helix's Table 7)",
    ),
    "policy": ("search", "the analytic policy's picks beside the best that measuring finds"),
    "readings": ("search", "configs timed on this machine, for policy --readings"),
    "ablation": ("models", "models compiled without one technique each (GTCO's Table III)"),
    "tuning": (
        "models",
        "what measuring gains: untuned and tuned libraries and peers, interleaved",
    ),
    "scheduler": (
        "search",
        "the subgraph scheduler beside round-robin and TVM's, on the same readings",
    ),
    "trials": ("search", "trials until MetaSchedule's latency is matched (GTCO's Table V)"),
    "cost_model": (
        "search",
        "the tuner's learned cost model: its ranking, and its search at equal trials",
    ),
    "language_model": (
        "language",
        "the tensor language model: sample, pretrain, measure, finetune, evaluate (TLM)",
    ),
    "closed_form": (
        "closed_form",
        "products configured in constant time: build, time, train, evaluate (DyGen's Table III)",
    ),
    "compile_time": (
        "models",
        "seconds to the first output beside the peers, and by phase (GTCO's Table VI)",
    ),
    "int8": ("models", "quantized models beside the peers, on one file and on each peer's own"),
    "disturbed": ("models", "latency beside another process that spins on one core"),
    "dynamic": (
        "models",
        "open sizes beside libraries of one shape each, and beside peers on the dynamic file",
    ),
    "gpu": ("gpu", "models for GPUs beside torch, torch.compile and ONNX Runtime, on a GPU"),
    "runtime_overhead": (
        "models",
        "time of opening a library and time of a call outside its kernels",
    ),
}


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help") or argv[0] not in BENCHMARKS:
        asked_for_help = bool(argv) and argv[0] in ("-h", "--help")
        out = sys.stdout if asked_for_help else sys.stderr
        print("usage: python -m bench NAME [options]   (NAME --help shows the options)\n", file=out)
        for name, (_, what) in BENCHMARKS.items():
            print(f"  {name:18} {what}", file=out)
        return 0 if asked_for_help else 2
    folder, _ = BENCHMARKS[argv[0]]
    try:
        module = importlib.import_module(f".{folder}.{argv[0]}", __package__)
        return int(module.main(argv[1:]) or 0)
    except GtcoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "gtco"):
            raise
        how = installing("train" if folder == "language" else "bench")
        missing = f"error: bench {argv[0]} needs {package}, which is not installed: {how}"
        print(missing, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    raise SystemExit(until_closed(lambda: main(sys.argv[1:])))
