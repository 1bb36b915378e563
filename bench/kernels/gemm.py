"""Products with constant weights in every precision, as shares of the machine's peak in it.

    python -m bench gemm [--cases TEXT ...] [--precision fp32,bf16] [--threads N] [--json FILE]

The shapes are those of vision transformers' layers. The time is of the kernel that multiplies;
rounding its input, which inside a model is part of the kernel before, is named beside it where it
is a kernel of its own. "OV" is OpenVINO's time over gtco's, in the same precision, both with all
that a lone product needs. The command fails where gtco's output is not the product.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from gtco.cli.arguments import new_file, positive
from gtco.cli.console import status
from gtco.search.calibration.peak import machine_peak
from gtco.support.errors import OptionError
from gtco.support.options import PRECISIONS

from ..harness.agreement import largest_difference
from ..harness.single import model
from ..harness.suite import available_threads, header, write_report
from .convolutions import arrays_of, differs, gtco_run, openvino_seconds, with_constants


@dataclass(frozen=True)
class Dense:
    """C[m, n] = A[m, k] x B[k, n], B constant."""

    m: int
    k: int
    n: int

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.k * self.n

    def model(self) -> onnx.ModelProto:
        m, k, n = self.m, self.k, self.n
        inputs = f"float[{m},{k}] x, float[{k},{n}] w"
        return with_constants(model(inputs, "y = MatMul(x, w)", f"float[{m},{n}] y"))


CASES = {
    f"{label} {m} x {k} x {n}": Dense(m, k, n)
    for label, m, k, n in (
        ("ViT-Ti qkv", 197, 192, 576),
        ("ViT-B projection", 197, 768, 768),
        ("ViT-B mlp up", 197, 768, 3072),
        ("ViT-B mlp down", 197, 3072, 768),
        ("DINOv2-S@518 mlp up", 1370, 384, 1536),
        ("DINOv2-S@518 mlp down", 1370, 1536, 384),
        ("Swin-T stage 1 mlp", 3136, 96, 384),
        ("Swin-T stage 4 mlp", 49, 768, 3072),
        ("classifier", 1, 768, 1000),
        ("square", 1024, 1024, 1024),
    )
}


def run(case: Dense, precision: str, threads: int) -> dict[str, Any]:
    """Seconds of the product's kernel, of all kernels, and of OpenVINO; and the largest difference
    between gtco's output and the product in float64.
    """
    made = case.model()
    arrays = arrays_of(made)
    stages, output = gtco_run(made, arrays, threads, precision)
    weights = onnx.numpy_helper.to_array(made.graph.initializer[0])
    exact = arrays["x"].astype(np.float64) @ weights
    product = [seconds for operators, _, seconds in stages if "matmul" in operators.split("+")]
    return {
        "flops": case.flops,
        "seconds": sum(product),
        "kernels": [(operators, seconds) for operators, _, seconds in stages],
        "openvino": openvino_seconds(made, arrays, threads, precision),
        "difference": largest_difference([output], [exact])[0],
    }


def line(label: str, r: dict[str, Any], peak: float) -> str:
    rate, whole = r["flops"] / r["seconds"], sum(t for _, t in r["kernels"])
    others = [f"{ops} {t * 1e6:.0f}" for ops, t in r["kernels"] if "matmul" not in ops.split("+")]
    return (
        f"{label}{r['seconds'] * 1e6:10.1f}{rate / 1e9:9.1f}{rate / peak:8.0%}"
        f"{r['openvino'] / whole:7.2f}  " + ", ".join(others)
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench gemm", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--cases", nargs="*", default=[], help="parts of the names to run")
    parser.add_argument(
        "--precision", default=",".join(PRECISIONS), help="by comma; default: %(default)s"
    )
    parser.add_argument("--threads", type=positive, default=available_threads())
    parser.add_argument("--json", type=new_file)
    args = parser.parse_args(argv)
    precisions = args.precision.split(",")
    if unknown := [p for p in precisions if p not in PRECISIONS]:
        raise OptionError(f"unknown precision {unknown[0]!r}: choose from {', '.join(PRECISIONS)}")
    chosen = {n: c for n, c in CASES.items() if not args.cases or any(p in n for p in args.cases)}
    header(args.threads)
    known = {p: machine_peak(args.threads, PRECISIONS[p]) for p in precisions}
    peaks = {p: peak.flops for p, peak in known.items()}
    results: dict[str, Any] = {}
    with status() as update:
        for name, case in chosen.items():
            for p in precisions:
                update(f"{name}: {p}")
                results.setdefault(name, {})[p] = run(case, p, args.threads)
    print("peak: " + ", ".join(f"{p} {peak}" for p, peak in known.items()))
    print(f"{'m x k x n':40}{'':6}{'us':>10}{'GFLOP/s':>9}{'% peak':>8}{'OV':>7}  other kernels")
    for name, found in results.items():
        for precision, r in found.items():
            print(line(f"{name:40}{precision:6}", r, peaks[precision]) + differs(r, precision))
    if args.json:
        write_report(args.json, args.threads, 1, {"peaks": peaks, "cases": results})
    wrong = [name for name, found in results.items() for p, r in found.items() if differs(r, p)]
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
