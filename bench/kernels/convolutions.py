"""Contractions other than large products: convolutions, stems, heads, depthwise ones, products with
one row, beside ONNX Runtime and OpenVINO.

    python -m bench convolutions [--cases TEXT ...] [--precision bf16] [--threads N] [--json FILE]

Each case is one layer with its bias and ReLU. Inside a model, a layer's input and output lie as its
engine likes them, so a case is spelled twice, channels first and channels last (with transposes
that an engine of that layout drops), and each system counts with the spelling that suits it; a stem
reads the image as models are given it, channels first, in both. "% of peak" is of what all threads
sustain. The command fails where gtco's output differs from ONNX Runtime's.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

import gtco
from gtco.cli.arguments import new_file
from gtco.search.calibration.peak import machine_peak
from gtco.support.options import PRECISIONS

from ..harness.agreement import largest_difference
from ..harness.peers import openvino_settings
from ..harness.single import Stages, fastest, model, onnxruntime_seconds, profiled
from ..harness.suite import TOLERANCES, available_threads, header, write_report

Arrays = Mapping[str, np.ndarray]
WORST = 5  # rows that are named at the end


@dataclass(frozen=True)
class Conv:
    """A 2-d convolution of one image, padded to keep its size (over the stride)."""

    size: tuple[int, int]
    channels: int
    outputs: int
    kernel: int
    stride: int = 1
    groups: int = 1
    stem: bool = False

    @property
    def result(self) -> tuple[int, int]:
        pad, k, s = self.kernel // 2, self.kernel, self.stride
        height, width = ((d + 2 * pad - k) // s + 1 for d in self.size)
        return height, width

    @property
    def flops(self) -> float:
        height, width = self.result
        taps = self.channels // self.groups * self.kernel**2
        return 2.0 * height * width * self.outputs * taps

    def models(self) -> list[onnx.ModelProto]:
        """The layer, channels first and channels last. For a stem only the output differs."""
        c, n, k, s, (h, w), (oh, ow) = (
            self.channels,
            self.outputs,
            self.kernel,
            self.stride,
            self.size,
            self.result,
        )
        weights = f"float[{n},{c // self.groups},{k},{k}] w, float[{n}] b"
        p = k // 2
        conv = f"Conv<strides=[{s},{s}], pads=[{p},{p},{p},{p}], group={self.groups}>"
        first = model(
            f"float[1,{c},{h},{w}] x, {weights}",
            f"v = {conv}(x, w, b)\n y = Relu(v)",
            f"float[1,{n},{oh},{ow}] y",
        )
        image, enter = f"float[1,{h},{w},{c}] x", "t = Transpose<perm=[0,3,1,2]>(x)"
        if self.stem:
            image, enter = f"float[1,{c},{h},{w}] x", "t = Identity(x)"
        last = model(
            f"{image}, {weights}",
            f"""{enter}
            u = {conv}(t, w, b)
            v = Relu(u)
            y = Transpose<perm=[0,2,3,1]>(v)""",
            f"float[1,{oh},{ow},{n}] y",
        )
        return [with_constants(first), with_constants(last)]


@dataclass(frozen=True)
class Product:
    """A batched product of two tensors that are both inputs."""

    batch: int
    m: int
    k: int
    n: int

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * self.m * self.k * self.n

    def models(self) -> list[onnx.ModelProto]:
        b, m, k, n = self.batch, self.m, self.k, self.n
        return [
            model(
                f"float[{b},{m},{k}] x, float[{b},{k},{n}] z",
                "y = MatMul(x, z)",
                f"float[{b},{m},{n}] y",
            )
        ]


CASES: dict[str, Conv | Product] = {
    "stem 7x7/2 3->64 @800x1333": Conv((800, 1333), 3, 64, 7, 2, stem=True),
    "stem 7x7/4 3->32 @512": Conv((512, 512), 3, 32, 7, 4, stem=True),
    "stem 3x3/2 3->32 @224": Conv((224, 224), 3, 32, 3, 2, stem=True),
    "stem 3x3/2 32->64 @112": Conv((112, 112), 32, 64, 3, 2),
    "stem 4x4/4 3->96 @224": Conv((224, 224), 3, 96, 4, 4, stem=True),
    "patches 16x16/16 3->192 @224": Conv((224, 224), 3, 192, 16, 16, stem=True),
    "head 3x3 64->1 @256": Conv((256, 256), 64, 1, 3),
    "head 3x3 32->2 @224": Conv((224, 224), 32, 2, 3),
    "head 1x1 256->1 @128": Conv((128, 128), 256, 1, 1),
    "head 1x1 256->19 @128": Conv((128, 128), 256, 19, 1),
    "3x3 64->64 @256": Conv((256, 256), 64, 64, 3),
    "3x3 64->64 @200x334": Conv((200, 334), 64, 64, 3),
    "3x3/2 128->128 @200x334": Conv((200, 334), 128, 128, 3, 2),
    "3x3 128->128 @100x167": Conv((100, 167), 128, 128, 3),
    "3x3 256->256 @50x84": Conv((50, 84), 256, 256, 3),
    "3x3/2 512->512 @50x84": Conv((50, 84), 512, 512, 3, 2),
    "3x3 512->512 @25x42": Conv((25, 42), 512, 512, 3),
    "1x1 64->256 @200x334": Conv((200, 334), 64, 256, 1),
    "1x1 256->64 @200x334": Conv((200, 334), 256, 64, 1),
    "1x1/2 256->512 @200x334": Conv((200, 334), 256, 512, 1, 2),
    "1x1 1024->256 @50x84": Conv((50, 84), 1024, 256, 1),
    "3x3 groups of 16 256 @56": Conv((56, 56), 256, 256, 3, groups=16),
    "depthwise 7x7 96 @56": Conv((56, 56), 96, 96, 7, groups=96),
    "depthwise 7x7 384 @14": Conv((14, 14), 384, 384, 7, groups=384),
    "depthwise 5x5 64 @56": Conv((56, 56), 64, 64, 5, groups=64),
    "depthwise 3x3 256 @56": Conv((56, 56), 256, 256, 3, groups=256),
    "depthwise 3x3/2 192 @56": Conv((56, 56), 192, 192, 3, 2, groups=192),
    "depthwise 5x5/2 128 @28": Conv((28, 28), 128, 128, 5, 2, groups=128),
    "row 12 x [1,64] x [64,196]": Product(12, 1, 64, 196),
    "row 64 x [1,256] x [256,256]": Product(64, 1, 256, 256),
    "rows 12 x [4,64] x [64,196]": Product(12, 4, 64, 196),
}


def with_constants(made: onnx.ModelProto) -> onnx.ModelProto:
    """The model with its weights and bias as initializers."""
    rng = np.random.default_rng(1)
    for value in [i for i in made.graph.input if i.name in ("w", "b")]:
        shape = [d.dim_value for d in value.type.tensor_type.shape.dim]
        array = rng.standard_normal(shape, dtype=np.float32)
        made.graph.initializer.append(onnx.numpy_helper.from_array(array, value.name))
        made.graph.input.remove(value)
    return made


def openvino_seconds(
    made: onnx.ModelProto, arrays: Arrays, threads: int, precision: str = "fp32"
) -> float:
    import openvino

    settings = openvino_settings(threads, precision)
    core = openvino.Core()
    compiled = core.compile_model(core.read_model(made.SerializeToString()), "CPU", settings)
    request = compiled.create_infer_request()
    given = [arrays[i.any_name] for i in compiled.inputs]
    return fastest(lambda: request.infer(given, share_inputs=True, share_outputs=True))


def arrays_of(made: onnx.ModelProto) -> dict[str, np.ndarray]:
    """Seeded inputs of the case."""
    rng = np.random.default_rng(2)
    shapes = {i.name: [d.dim_value for d in i.type.tensor_type.shape.dim] for i in made.graph.input}
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def gtco_run(
    made: onnx.ModelProto, arrays: Arrays, threads: int, precision: str = "fp32"
) -> tuple[Stages, np.ndarray]:
    """The stages of gtco's fastest run, and the output."""
    with gtco.compile_model(made, threads=threads, precision=precision) as runtime:
        return profiled(runtime, arrays), runtime.run(arrays)["y"]


def run(case: Conv | Product, threads: int, precision: str) -> dict[str, Any]:
    """Seconds of each system with the form that suits it, gtco's kernels, and the largest
    difference between the outputs of gtco and of ONNX Runtime.
    """
    every, peers, differences = [], [], []
    for made in case.models():
        arrays = arrays_of(made)
        stages, output = gtco_run(made, arrays, threads, precision)
        every.append([(operators, t) for operators, _, t in stages])
        seconds, wanted = onnxruntime_seconds(made, arrays, threads)
        peers.append((seconds, openvino_seconds(made, arrays, threads, precision)))
        differences.append(largest_difference([output], [wanted])[0])
    kernels = min(every, key=lambda stages: sum(t for _, t in stages))
    return {
        "flops": case.flops,
        "seconds": sum(t for _, t in kernels),
        "kernels": kernels,
        "onnxruntime": min(seconds for seconds, _ in peers),
        "openvino": min(seconds for _, seconds in peers),
        "difference": max(differences),
    }


def differs(found: Mapping[str, Any], precision: str) -> str:
    """What a row says of an output that is off by more than the tolerance; else empty."""
    off = found["difference"]
    return f"  DIFFERS by {off:.1e}" if off > TOLERANCES[precision] else ""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench convolutions", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--cases", nargs="*", default=[], help="parts of the names to run")
    parser.add_argument(
        "--precision", choices=PRECISIONS, default="fp32", help="of gtco, OpenVINO and the peak"
    )
    parser.add_argument("--threads", type=int, default=available_threads())
    parser.add_argument("--json", type=new_file)
    args = parser.parse_args(argv)
    chosen = {n: c for n, c in CASES.items() if not args.cases or any(p in n for p in args.cases)}
    header(args.threads)
    known = machine_peak(args.threads, PRECISIONS[args.precision])
    peak = known.flops
    print(
        f"peak {known}; ORT and OV: their time over gtco's, above 1 gtco is faster"
    )
    print(f"{'case':32}{'us':>10}{'GFLOP/s':>9}{'% peak':>8}{'ORT':>7}{'OV':>7}  kernels")
    results = {}
    for name, case in chosen.items():
        r = results[name] = run(case, args.threads, args.precision)
        rate = r["flops"] / r["seconds"]
        print(
            f"{name:32}{r['seconds'] * 1e6:10.1f}{rate / 1e9:9.1f}{rate / peak:8.0%}"
            f"{r['onnxruntime'] / r['seconds']:7.2f}{r['openvino'] / r['seconds']:7.2f}  "
            + ", ".join(f"{label[:40]} {t * 1e6:.0f}" for label, t in r["kernels"])
            + differs(r, args.precision),
            flush=True,
        )
        if args.json:  # after each: a long run keeps what it has
            kept = {"precision": args.precision, "peak": peak, "cases": results}
            write_report(args.json, args.threads, 1, kept)
    ratios = {n: min(r["onnxruntime"], r["openvino"]) / r["seconds"] for n, r in results.items()}
    worst = sorted(ratios, key=ratios.__getitem__)[:WORST]
    print("Least ahead of the better peer: " + ", ".join(f"{n} {ratios[n]:.2f}" for n in worst))
    return 1 if any(differs(r, args.precision) for r in results.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
