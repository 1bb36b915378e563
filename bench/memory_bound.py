"""Stages that memory bounds, beside a plain pass over the same bytes and beside ONNX Runtime.

    python -m bench memory_bound [--cases TEXT ...] [--threads N] [--json FILE]

Each case is a small graph of a vision transformer. "GB/s" counts its inputs and outputs once;
"of copy" is the time of a kernel that only reads and writes as many bytes (ReLU over half of them)
divided by the case's, so 1 is as fast as memory (or the cache that holds the bytes) allows.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser

import gtco

# name -> (inputs and their shapes, ONNX nodes, output y and its shape); constants are made in place
CASES: dict[str, tuple[str, str, str]] = {
    "layer_norm [3136,96]": (
        "float[1,3136,96] x, float[96] g, float[96] b",
        "y = LayerNormalization<axis=-1, epsilon=1e-5>(x, g, b)",
        "float[1,3136,96] y",
    ),
    "group_norm(1) [64,56,56]": (
        "float[1,64,56,56] x, float[64] g, float[64] b",
        "y = GroupNormalization<num_groups=1, epsilon=1e-5>(x, g, b)",
        "float[1,64,56,56] y",
    ),
    "group_norm(32) [256,64,64]": (
        "float[1,256,64,64] x, float[256] g, float[256] b",
        "y = GroupNormalization<num_groups=32, epsilon=1e-5>(x, g, b)",
        "float[1,256,64,64] y",
    ),
    "instance_norm [64,56,56]": (
        "float[1,64,56,56] x, float[64] g, float[64] b",
        "y = InstanceNormalization<epsilon=1e-5>(x, g, b)",
        "float[1,64,56,56] y",
    ),
    "layer_norm_2d [256,64,64]": (
        "float[1,256,64,64] x, float[256,1,1] g, float[256,1,1] b",
        """a = Constant<value_ints=[1]>()
        two = Constant<value_float=2.0>()
        eps = Constant<value_float=1e-6>()
        u = ReduceMean<keepdims=1>(x, a)
        d = Sub(x, u)
        s = Pow(d, two)
        v = ReduceMean<keepdims=1>(s, a)
        w = Add(v, eps)
        r = Sqrt(w)
        n = Div(d, r)
        m = Mul(n, g)
        y = Add(m, b)""",
        "float[1,256,64,64] y",
    ),
    "convnext layer_norm [96,56,56]": (
        "float[1,96,56,56] x, float[96] g, float[96] b",
        """t = Transpose<perm=[0,2,3,1]>(x)
        n = LayerNormalization<axis=-1, epsilon=1e-6>(t, g, b)
        y = Transpose<perm=[0,3,1,2]>(n)""",
        "float[1,96,56,56] y",
    ),
    "global mean NCHW [320,56,56]": (
        "float[1,320,56,56] x",
        "y = GlobalAveragePool(x)",
        "float[1,320,1,1] y",
    ),
    "mean over tokens [3136,256]": (
        "float[1,3136,256] x",
        "a = Constant<value_ints=[1]>()\n y = ReduceMean<keepdims=0>(x, a)",
        "float[1,256] y",
    ),
    "max of all [1e6]": (
        "float[1,1000000] x",
        "a = Constant<value_ints=[1]>()\n y = ReduceMax<keepdims=0>(x, a)",
        "float[1] y",
    ),
    "softmax [4,196,196]": (
        "float[4,196,196] x",
        "y = Softmax<axis=-1>(x)",
        "float[4,196,196] y",
    ),
    "softmax of tokens [8,784,16]": (
        "float[8,784,16] x",
        "y = Softmax<axis=1>(x)",
        "float[8,784,16] y",
    ),
    "softmax of tokens [3136,256]": (
        "float[1,3136,256] x",
        "y = Softmax<axis=1>(x)",
        "float[1,3136,256] y",
    ),
    "softmax of 4 long rows": (
        "float[4,50176] x",
        "y = Softmax<axis=-1>(x)",
        "float[4,50176] y",
    ),
    "se gate [96,56,56]": (
        "float[1,96,56,56] x, float[1,96,1,1] s",
        "g = Sigmoid(s)\n y = Mul(x, g)",
        "float[1,96,56,56] y",
    ),
    "silu [1e6]": (
        "float[1024,1024] x",
        "s = Sigmoid(x)\n y = Mul(x, s)",
        "float[1024,1024] y",
    ),
    "gelu [1e6]": (
        "float[1024,1024] x",
        "y = Gelu(x)",
        "float[1024,1024] y",
    ),
    "swiglu [257,2x1024]": (
        "float[1,257,2048] x",
        "a, b = Split<axis=-1, num_outputs=2>(x)\n s = Sigmoid(a)\n t = Mul(a, s)\n y = Mul(t, b)",
        "float[1,257,1024] y",
    ),
    "window partition [56,56,96]": (
        "float[1,56,56,96] x",
        """s = Constant<value_ints=[1,8,7,8,7,96]>()
        r = Reshape(x, s)
        t = Transpose<perm=[0,1,3,2,4,5]>(r)
        z = Constant<value_ints=[64,49,96]>()
        y = Reshape(t, z)""",
        "float[64,49,96] y",
    ),
    "roll [56,56,96]": (
        "float[1,56,56,96] x",
        """b0 = Constant<value_ints=[3]>()
        e0 = Constant<value_ints=[56]>()
        z0 = Constant<value_ints=[0]>()
        h = Constant<value_ints=[1]>()
        w = Constant<value_ints=[2]>()
        p = Slice(x, b0, e0, h)
        q = Slice(x, z0, b0, h)
        u = Concat<axis=1>(p, q)
        m = Slice(u, b0, e0, w)
        n = Slice(u, z0, b0, w)
        y = Concat<axis=2>(m, n)""",
        "float[1,56,56,96] y",
    ),
    "NCHW to NHWC [64,56,56]": (
        "float[1,64,56,56] x",
        "y = Transpose<perm=[0,2,3,1]>(x)",
        "float[1,56,56,64] y",
    ),
    "NHWC to NCHW [56,56,96]": (
        "float[1,56,56,96] x",
        "y = Transpose<perm=[0,3,1,2]>(x)",
        "float[1,96,56,56] y",
    ),
    "NCHW to NHWC + gelu [3,224,224]": (
        "float[1,3,224,224] x",
        "t = Transpose<perm=[0,2,3,1]>(x)\n y = Relu(t)",
        "float[1,224,224,3] y",
    ),
    "heads [197,12,64]": (
        "float[1,197,12,64] x",
        "y = Transpose<perm=[0,2,1,3]>(x)",
        "float[1,12,197,64] y",
    ),
    "keys [12,197,64] transposed": (
        "float[1,12,197,64] x",
        "y = Transpose<perm=[0,1,3,2]>(x)",
        "float[1,12,64,197] y",
    ),
    "transpose + add [3136,96]": (
        "float[1,3136,96] x, float[1,96,3136] z",
        "t = Transpose<perm=[0,2,1]>(x)\n y = Add(t, z)",
        "float[1,96,3136] y",
    ),
    "pixel shuffle [64,56,56]": (
        "float[1,64,56,56] x",
        'y = DepthToSpace<blocksize=2, mode="CRD">(x)',
        "float[1,16,112,112] y",
    ),
    "pixel unshuffle [16,112,112]": (
        "float[1,16,112,112] x",
        "y = SpaceToDepth<blocksize=2>(x)",
        "float[1,64,56,56] y",
    ),
    "patch merging [56,56,96]": (
        "float[1,56,56,96] x",
        """s = Constant<value_ints=[1,28,2,28,2,96]>()
        r = Reshape(x, s)
        t = Transpose<perm=[0,1,3,4,2,5]>(r)
        z = Constant<value_ints=[1,784,384]>()
        y = Reshape(t, z)""",
        "float[1,784,384] y",
    ),
    "concat channels [64+64,56,56]": (
        "float[1,64,56,56] x, float[1,64,56,56] z",
        "y = Concat<axis=1>(x, z)",
        "float[1,128,56,56] y",
    ),
    "concat last axis [3136,64+32]": (
        "float[1,3136,64] x, float[1,3136,32] z",
        "y = Concat<axis=2>(x, z)",
        "float[1,3136,96] y",
    ),
    "concat odd last axis [3136,63+30]": (
        "float[1,3136,63] x, float[1,3136,30] z",
        "y = Concat<axis=2>(x, z)",
        "float[1,3136,93] y",
    ),
    "channel shuffle NCHW [64,56,56]": (
        "float[1,64,56,56] x",
        """s = Constant<value_ints=[1,2,32,56,56]>()
        r = Reshape(x, s)
        t = Transpose<perm=[0,2,1,3,4]>(r)
        z = Constant<value_ints=[1,64,56,56]>()
        y = Reshape(t, z)""",
        "float[1,64,56,56] y",
    ),
    "channel shuffle NHWC [56,56,64]": (
        "float[1,56,56,64] x",
        """s = Constant<value_ints=[1,56,56,2,32]>()
        r = Reshape(x, s)
        t = Transpose<perm=[0,1,2,4,3]>(r)
        z = Constant<value_ints=[1,56,56,64]>()
        y = Reshape(t, z)""",
        "float[1,56,56,64] y",
    ),
    "rotary [12,197,64]": (
        "float[1,12,197,64] x, float[197,64] c, float[197,64] s",
        """a, b = Split<axis=-1, num_outputs=2>(x)
        m = Neg(b)
        r = Concat<axis=-1>(m, a)
        p = Mul(x, c)
        q = Mul(r, s)
        y = Add(p, q)""",
        "float[1,12,197,64] y",
    ),
    "rotary interleaved [12,197,64]": (
        "float[1,12,197,64] x, float[197,64] c, float[197,64] s",
        """h = Constant<value_ints=[1,12,197,32,2]>()
        v = Reshape(x, h)
        one = Constant<value_int=1>()
        zero = Constant<value_int=0>()
        b = Gather<axis=4>(v, one)
        a = Gather<axis=4>(v, zero)
        m = Neg(b)
        ax = Constant<value_ints=[4]>()
        mu = Unsqueeze(m, ax)
        au = Unsqueeze(a, ax)
        st = Concat<axis=4>(mu, au)
        f = Constant<value_ints=[1,12,197,64]>()
        r = Reshape(st, f)
        p = Mul(x, c)
        q = Mul(r, s)
        y = Add(p, q)""",
        "float[1,12,197,64] y",
    ),
}


def model(inputs: str, nodes: str, output: str) -> onnx.ModelProto:
    """The case as ONNX; every statement on a line of its own."""
    body = "\n".join(line.strip() for line in nodes.splitlines())
    text = f'<ir_version: 10, opset_import: ["": 21]>\ncase ({inputs}) => ({output}) {{\n{body}\n}}'
    made = onnx.parser.parse_model(text)
    onnx.checker.check_model(made)
    return made


def measure(made: onnx.ModelProto, threads: int, peers: bool) -> dict[str, Any]:
    """Seconds of gtco's kernels and of ONNX Runtime, and the bytes of inputs and outputs."""
    rng = np.random.default_rng(0)
    arrays = {
        i.name: rng.standard_normal(
            [d.dim_value for d in i.type.tensor_type.shape.dim], dtype=np.float32
        )
        for i in made.graph.input
    }
    compiled = gtco.compile_model(made, threads=threads)
    runtime = compiled.model
    rounds = [runtime.profile(*arrays.values(), repeat=1) for _ in range(40)]
    stages = min(rounds, key=sum)
    got = runtime(*arrays.values())
    nbytes = sum(a.nbytes for a in arrays.values()) + got.nbytes
    found = {
        "seconds": sum(stages),
        "stages": [
            (s["operators"] if "operators" in s else str(s)[:60], t)
            for s, t in zip(runtime.stages, stages, strict=True)
        ],
        "nbytes": nbytes,
    }
    runtime.close()
    if peers:
        found["onnxruntime"], wanted = onnxruntime_seconds(made, arrays, threads)
        found["difference"] = float(np.abs(got - wanted).max() / max(np.abs(wanted).max(), 1e-30))
    return found


def onnxruntime_seconds(
    made: onnx.ModelProto, arrays: dict[str, np.ndarray], threads: int
) -> tuple[float, np.ndarray]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(
        made.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    binding = session.io_binding()
    for name, array in arrays.items():
        binding.bind_cpu_input(name, array)
    binding.bind_output("y", "cpu")
    seconds = least(lambda: session.run_with_iobinding(binding))
    return seconds, binding.copy_outputs_to_cpu()[0]


def least(call: Callable[[], object], repeat: int = 60) -> float:
    times = []
    for _ in range(repeat + 3):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times[3:])


def copy_seconds(nbytes: int, threads: int) -> float:
    """Seconds of a ReLU that reads and writes ``nbytes`` together."""
    size = nbytes // 8
    made = model(f"float[1,{size}] x", "y = Relu(x)", f"float[1,{size}] y")
    return float(measure(made, threads, peers=False)["seconds"])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--cases", nargs="*", default=[], help="parts of the names to run")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    chosen = {n: c for n, c in CASES.items() if not args.cases or any(p in n for p in args.cases)}
    copies: dict[int, float] = {}
    results = {}
    print(f"{'case':36}{'us':>9}{'GB/s':>8}{'of copy':>9}{'ORT us':>9}{'ratio':>7}  kernels")
    for name, case in chosen.items():
        made = model(*case)
        r = measure(made, args.threads, peers=True)
        copies.setdefault(r["nbytes"], copy_seconds(r["nbytes"], args.threads))
        copy = copies[r["nbytes"]]
        print(
            f"{name:36}{r['seconds'] * 1e6:9.1f}{r['nbytes'] / r['seconds'] / 1e9:8.1f}"
            f"{copy / r['seconds']:9.2f}{r['onnxruntime'] * 1e6:9.1f}"
            f"{r['onnxruntime'] / r['seconds']:7.2f}  "
            + ", ".join(f"{'+'.join(label)[:44]} {t * 1e6:.0f}" for label, t in r["stages"])
            + (f"  DIFFERS {r['difference']:.1e}" if r["difference"] > 1e-4 else ""),
            flush=True,
        )
        results[name] = r | {"copy": copy}
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
