"""The worker that times a product in oneDNN, through torch: ``python -m
gtco.bench.closed_form.onednn`` (:mod:`bench.harness.worker`).

The weights are laid out by oneDNN beforehand, as torch.compile does when it freezes a model. Calls
take turns on several copies of the weights, so these come from memory as those of gtco's
candidates do. What a call from Python costs is part of the time.
"""

from __future__ import annotations

import itertools

import torch

from ..harness.worker import Job, System, serve


def opened(job: Job) -> System:
    """``sizes`` is m, n, k, ``dtype`` torch's name, ``copies`` the weights that take turns."""
    torch.set_num_threads(int(job["threads"]))
    m, n, k = job["sizes"]
    dtype = getattr(torch, job["dtype"])
    torch.manual_seed(0)
    x = torch.randn(m, k).to(dtype)
    pack = torch.ops.mkldnn._reorder_linear_weight.default
    packed = [pack(torch.randn(n, k).to(dtype), m) for _ in range(job["copies"])]
    multiply = torch.ops.mkldnn._linear_pointwise.default
    outputs: list[torch.Tensor] = [multiply(x, w, None, "none", [], "") for w in packed]

    turn = itertools.cycle(range(len(packed)))

    def call() -> None:
        number = next(turn)
        outputs[number] = multiply(x, packed[number], None, "none", [], "")

    return System(torch.__version__, call, lambda: [y.float().numpy() for y in outputs])


if __name__ == "__main__":
    serve({"onednn": opened})
