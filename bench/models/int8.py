"""int8 beside the peers: one quantized file for every engine, and each peer's own file.

``python -m bench int8 [--models vit-ti-16,swin-t] [--quantizer gtco|onnxruntime|nncf]
[--samples 32] [--rounds 7] [--threads 2] [--json FILE]``

gtco, ONNX Runtime and OpenVINO run the file of ``--quantizer``. ONNX Runtime also runs the file of
its own quantizer (``onnxruntime:own``), and OpenVINO that of NNCF (``openvino:nncf``), which need
not quantize the same operators. The best of the four counts as the best peer. ``gtco:fp32`` is the
float model. The files lie in the folder of ``--folder`` and are made anew where the model, the
number of samples or the quantizer's version has changed. Of a quantizer whose package is not
installed a file that lies there is taken; without one it is left out, and a note says so.

Weights are random, so this is about speed alone: what a quantized model loses is told by the
verdict of ``gtco quantize`` on a model that is trained.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from rich.table import Table

from gtco.cli.arguments import positive
from gtco.cli.console import say, status
from gtco.support.errors import BuildError, ModelError

from ..harness.by_model import ended, every_model, parser
from ..harness.quantizers import QUANTIZERS, installed, made, quantize
from ..harness.rounds import Comparison, Contender, compare
from ..harness.suite import QUANTIZED, console, judge, write_report
from ..harness.workload import candidates, prepare

MODELS = (
    *("vit-ti-16", "vit-s-16", "vit-base-16", "deit-s-16", "swin-t"),
    *("detr-resnet50-e6", "segformer-b0"),
)
PEERS = ("onnxruntime", "openvino")
FLOAT = "gtco:fp32"
LOSSES = ("gtco", "onnxruntime", "openvino:nncf")  # the systems whose losses are shown
OWN = {"onnxruntime:own": "onnxruntime", "openvino:nncf": "nncf"}  # a system, its quantizer


@dataclass(frozen=True)
class Row:
    """One model.

    - ``milliseconds``: the median of each system that was timed, by its name
    - ``failed``: the reason of each one that was not
    - ``size``: bytes of the int8 library over those of the float one
    - ``difference``: the largest difference between the outputs of gtco and of ONNX Runtime on the
      same file, over the largest magnitude
    - ``disagrees``: why gtco's outputs cannot be those of the file; None if they can
    - ``losses``: by system, the relative error of its outputs against the float model's, the root
      mean square over that of the latter
    """

    model: str
    quantizer: str
    milliseconds: dict[str, float]
    failed: dict[str, str]
    size: float
    difference: float | None
    disagrees: str | None = None
    losses: dict[str, float] = field(default_factory=dict)

    @property
    def gain(self) -> float:
        """gtco's time in float over its time in int8."""
        return self.milliseconds["gtco:fp32"] / self.milliseconds["gtco"]

    @property
    def best(self) -> tuple[float, str] | None:
        """The best peer's time over gtco's, and its name; None if no peer ran."""
        ours = self.milliseconds["gtco"]
        peers = [(t, name) for name, t in self.milliseconds.items() if not name.startswith("gtco")]
        return min(((time / ours, name) for time, name in peers), default=None)


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    if not installed(options.quantizer):
        raise ModelError(f"{options.quantizer} is not installed: pip install {options.quantizer}")
    for system, quantizer in OWN.items():
        if not installed(quantizer):
            say(f"note: {system} is timed only on files that are there: pip install {quantizer}")
    rows, failed = every_model(options, shown, partial(keep, options))
    if len(rows) > 1:
        show(rows)
    for name, values in (
        ("fp32 / int8", [row.gain for row in rows]),
        ("best peer / gtco", [row.best[0] for row in rows if row.best]),
    ):
        if values:
            mean, least = statistics.geometric_mean(values), min(values)
            say(f"{name}: geometric mean {mean:.3f}, least {least:.3f}, over {len(values)} models")
    return ended(failed, not any(row.disagrees for row in rows))


def keep(options: argparse.Namespace, file: Path, rows: Sequence[Row]) -> None:
    """Writes the rows so far, and the machine on which they were read."""
    found = {"models": [asdict(row) for row in rows]}
    write_report(file, options.threads, options.rounds, found)


def shown(name: str, options: argparse.Namespace) -> list[Row]:
    """One model's row, which is shown as soon as it is there."""
    rows = [measure(name, options)]
    show(rows)
    for system, reason in rows[0].failed.items():
        say(f"  {system} failed: {reason}")
    if rows[0].disagrees:
        say(f"  gtco disagrees: {rows[0].disagrees}")
    return rows


def measure(name: str, options: argparse.Namespace) -> Row:
    folder: Path = options.folder
    with status() as update:
        update(f"{name}: prepare")
        floats = prepare(name, folder, options.threads)
        assert floats.onnx is not None and floats.build.library is not None
        update(f"{name}: quantize")
        same = quantize(options.quantizer, floats.onnx, options.samples, folder)
        work = prepare(str(same), folder, options.threads)
        for built in (floats.build, work.build):
            if built.error:
                raise BuildError(f"{name} cannot be compiled: {built.error}")
        chosen, failed = candidates(work, PEERS, options.threads)
        chosen[0] = Contender("gtco", {**chosen[0].job, "library": work.build.library})
        chosen.append(Contender(FLOAT, {**chosen[0].job, "library": floats.build.library}))
        for system, quantizer in OWN.items():
            if not (installed(quantizer) or made(quantizer, floats.onnx, folder).exists()):
                continue
            try:
                own = quantize(quantizer, floats.onnx, options.samples, folder)
            except ModelError as error:
                failed[system] = str(error)
                continue
            peer = system.partition(":")[0]
            chosen.append(Contender(system, {**chosen[0].job, "system": peer, "onnx": str(own)}))
        seen = compare(
            chosen,
            options.rounds,
            tolerance=QUANTIZED,
            truth=FLOAT,
            judge=judge(work),
            progress=lambda text: update(f"{name}: {text}"),
        )
    sizes = [Path(built.library).stat().st_size for built in (work.build, floats.build)]
    return _row(name, options.quantizer, seen, failed, sizes[0] / sizes[1])


def _row(name: str, quantizer: str, seen: Comparison, failed: dict[str, str], size: float) -> Row:
    times = {m.system: 1e3 * m.median for m in seen.measurements if m.rounds}
    failed |= {m.system: m.error for m in seen.measurements if m.error}
    if "gtco" not in times or "gtco:fp32" not in times:
        raise BuildError(f"gtco could not run {name}: {failed}")
    ours = seen["gtco"]
    losses = {m.system: m.loss for m in seen.measurements if m.loss is not None}
    return Row(name, quantizer, times, failed, size, ours.difference, ours.disagrees, losses)


def show(rows: Sequence[Row]) -> None:
    systems = ("gtco", "gtco:fp32", *PEERS, *OWN)
    table = Table(title=f"int8, files of {rows[0].quantizer}; ms", title_justify="left")
    table.add_column("model")
    losses = [f"loss, {system}" for system in LOSSES]
    headings = ("fp32 / int8", "best peer / gtco", "library", *losses, "difference")
    for heading in (*systems, *headings):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row.model,
            *(f"{row.milliseconds[s]:.2f}" if s in row.milliseconds else "-" for s in systems),
            f"{row.gain:.2f}",
            f"{row.best[0]:.2f} {row.best[1]}" if row.best else "-",
            f"{row.size:.2f}",
            *(f"{row.losses[s]:.1%}" if s in row.losses else "-" for s in LOSSES),
            "-" if row.difference is None else f"{row.difference:.1e}",
        )
    console().print(table)


def _parser() -> argparse.ArgumentParser:
    found = parser("int8", __doc__, MODELS)
    found.add_argument(
        "--quantizer",
        choices=tuple(QUANTIZERS),
        default="gtco",
        help="that writes the file which every engine runs",
    )
    found.add_argument("--samples", type=positive, default=32, help="inputs that calibration sees")
    found.add_argument("--rounds", type=positive, default=7)
    return found
