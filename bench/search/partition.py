"""DPOF's unique subgraphs on DETR-ResNet50-E6 beside GTCO's Table IV and TVM's FuseOps.

``python -m bench partition [--model detr-resnet50-e6] [--target znver4] [--json FILE]``

Each of encoder, decoder and whole transformer is exported by itself, canonicalized and cut by
DPOF with the analytic policy's predicted time as cost. As Ansor extracts its tasks, and so as
Table IV counts, a subgraph counts when it holds a complex operator or a reduction; subgraphs of
data movement and element-wise operators alone are shown beside it. Two rows are counterfactuals:
"projections apart" is DPOF on the graph in which the projections of one tensor stay products of
their own, as the paper has them, and "without copies" is DPOF with movement stored once.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

from gtco.cli.arguments import new_file
from gtco.frontend.imported import ImportedModel
from gtco.frontend.onnx import load_onnx
from gtco.graph.fusion.dpof import Cost
from gtco.graph.fusion.greedy import fuse_greedy
from gtco.graph.fusion.stages import Partition, fuse, partition
from gtco.graph.graph import Graph
from gtco.graph.layout import channels_last
from gtco.graph.lower.walk import lower
from gtco.graph.rewrites.merge_projections import merge_projections
from gtco.graph.rewrites.pipeline import PIPELINE, Rewrite, canonicalize
from gtco.machine.target import cpu_target
from gtco.models import create, export_onnx
from gtco.search.analytic import AnalyticPolicy
from gtco.support.errors import GtcoError
from gtco.tensor.operators import COMPLEX, REDUCTION, pattern
from gtco.tensor.stage import Stage

from ..harness import machine
from ..harness.suite import available_threads, console, header

PARTS = ("encoder", "decoder", "transformer")
# GTCO, Table IV: unique subgraphs and their weights, "weight x subgraphs".
TABLE_IV = {
    "Ansor": {
        "encoder": (9, "6x7 12x2"),
        "decoder": (13, "6x10 18x3"),
        "transformer": (22, "6x17 13x2 19x2 18x1"),
    },
    "GTCO": {
        "encoder": (6, "8x4 10x2"),
        "decoder": (11, "8x6 20x5"),
        "transformer": (17, "9x12 20x3 16x2"),
    },
}


@dataclass(frozen=True)
class Count:
    """Unique subgraphs of one partition: those with a complex operator or a reduction (``unique``;
    ``weights`` says how often each occurs), and those with only element-wise operators and
    movement.
    """

    unique: int
    weights: tuple[int, ...]
    light: int
    light_weights: tuple[int, ...]
    labels: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """Table IV's notation: weight x subgraphs of that weight."""
        return " ".join(f"{w}x{n}" for w, n in sorted(Counter(self.weights).items()))


class Part(nn.Module):
    """Encoder, decoder or both of a Detr. Positions and queries are constants, as in the whole
    model.
    """

    def __init__(self, detr: nn.Module, part: str):
        super().__init__()
        self.transformer: Any = detr.get_submodule("transformer")
        self.register_buffer("positions", detr.get_buffer("positions"))
        self.register_buffer("queries", detr.get_parameter("query_embed.weight").detach())
        self.part = part

    def forward(self, tokens: Tensor) -> Tensor:
        if self.part == "encoder":
            return self.transformer.encoder(tokens, self.positions)
        if self.part == "decoder":
            return self.transformer.decoder(tokens, self.positions, self.queries)
        return self.transformer(tokens, self.positions, self.queries)


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    output = console()
    try:
        policy = AnalyticPolicy(cpu_target(options.target))
        header(available_threads())
        results = {}
        for part, imported in parts(create(options.model)):
            results[part] = measure(imported, policy.predict)
            show(part, results[part], output)
    except GtcoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if options.json:
        data = {
            "machine": machine.describe(available_threads()),
            "model": options.model,
            "target": options.target,
            "table_iv": TABLE_IV,
            "parts": results,
        }
        Path(options.json).write_text(json.dumps(data, indent=1))
    return 0


def parts(detr: nn.Module, names: Sequence[str] = PARTS) -> list[tuple[str, ImportedModel]]:
    """Parts of a DETR of the models package by name, as Relax."""
    tokens = detr.get_buffer("positions")[None]
    imported = []
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        for part in names:
            path = export_onnx(Part(detr, part).eval(), (tokens,), Path(folder) / f"{part}.onnx")
            imported.append((part, load_onnx(path)))
    return imported


def measure(imported: ImportedModel, cost: Cost) -> dict[str, Any]:
    """Counts of DPOF, of its two counterfactuals, of the greedy rules and of TVM, and a description
    of every unique subgraph.
    """
    graph = canonical(imported)
    apart = canonical(imported, [r for r in PIPELINE if r is not merge_projections])
    _, found = fuse(graph, cost)
    _, unmerged = fuse(apart, cost)
    ours = count(found.stages)
    return {
        "DPOF": asdict(ours),
        "projections apart": asdict(count(unmerged.stages)),
        "without copies": asdict(count(partition(graph, cost).stages)),
        "greedy rules": asdict(count(fuse_greedy(graph, cost).stages)),
        "TVM FuseOps": asdict(count_tvm(imported)),
        "predicted_seconds": {
            "DPOF": found.seconds,
            "projections apart": unmerged.seconds,
            "greedy rules": fuse_greedy(graph, cost).seconds,
        },
        "search": _search(found),
        "subgraphs": subgraphs(found.stages),
    }


def canonical(imported: ImportedModel, rewrites: Sequence[Rewrite] = PIPELINE) -> Graph:
    """The graph that DPOF partitions, made by ``rewrites``."""
    graph = canonicalize(lower(imported), rewrites=rewrites)
    return canonicalize(channels_last(graph), rewrites=rewrites)


def count(stages: Sequence[Stage]) -> Count:
    """Unique stages and their weights, split as Ansor's task extraction does."""
    weights = Counter(stage.key for stage in stages)
    unique = {stage.key: stage for stage in stages}
    heavy = [key for key in unique if is_heavy(unique[key])]
    light = [key for key in unique if not is_heavy(unique[key])]
    return Count(
        len(heavy),
        tuple(sorted(weights[key] for key in heavy)),
        len(light),
        tuple(sorted(weights[key] for key in light)),
        tuple(unique[key].label for key in heavy),
    )


def is_heavy(stage: Stage) -> bool:
    return any(pattern(op.kind) in (COMPLEX, REDUCTION) for op in stage.operators)


def count_tvm(imported: ImportedModel) -> Count:
    """The counts for TVM's own rules: LegalizeOps, FoldConstant, FuseOps and FuseTIR on the Relax
    module. Every call of a TIR function is a subgraph; equal functions count as one.
    """
    import tvm
    import tvm_ffi
    from tvm import relax

    module = relax.transform.LegalizeOps()(imported.module)
    module = relax.transform.AnnotateTIROpPattern()(module)
    module = relax.transform.FuseOps()(relax.transform.FoldConstant()(module))
    module = relax.transform.DeadCodeElimination()(relax.transform.FuseTIR()(module))
    calls: Counter[str] = Counter()

    def visit(node: Any) -> None:
        if isinstance(node, relax.Call) and node.op == tvm.ir.Op.get("relax.call_tir"):
            calls[node.args[0].name_hint] += 1

    relax.analysis.post_order_visit(module["main"], visit)
    # FuseOps gives equal functions different names: group them by structure.
    groups: dict[int, tuple[str, int, bool]] = {}
    for name, times in calls.items():
        function = module[name].without_attr("global_symbol")
        key = tvm_ffi.structural_hash(function)
        _, before, _ = groups.get(key, ("", 0, False))
        groups[key] = (name, before + times, _reduces(function))
    heavy = [(name, times) for name, times, reduces in groups.values() if reduces]
    light = [times for _, times, reduces in groups.values() if not reduces]
    return Count(
        len(heavy),
        tuple(sorted(times for _, times in heavy)),
        len(light),
        tuple(sorted(light)),
        tuple(name for name, _ in heavy),
    )


def _reduces(function: Any) -> bool:
    """True if a TIR function has a reduction axis: matrix products, softmax, layer norm."""
    import tvm_ffi
    from tvm import s_tir, tirx

    kinds: set[int] = set()

    def visit(block: Any) -> None:
        kinds.update(int(axis.iter_type) for axis in block.iter_vars)

    tvm_ffi.structural_walk(function.body, (s_tir.SBlock, visit))
    return int(tirx.IterVar.CommReduce) in kinds


def subgraphs(stages: Sequence[Stage]) -> list[dict[str, Any]]:
    """Every unique stage: its operators, its output, and how often it occurs."""
    weights = Counter(stage.key for stage in stages)
    return [
        {
            "stage": stage.label,
            "output": str(stage.output.type),
            "weight": weights[key],
            "counts": is_heavy(stage),
        }
        for key, stage in {stage.key: stage for stage in stages}.items()
    ]


def _search(found: Partition) -> dict[str, Any]:
    names = ("states", "transitions", "priced", "unique", "elapsed", "cost_elapsed", "notes")
    return {name: getattr(found, name) for name in names}


def show(part: str, result: dict[str, Any], output: Any) -> None:
    table = Table("system", "subgraphs", "weights", "kernels", "light ones", title=part)
    for system, rows in TABLE_IV.items():
        number, text = rows[part]
        table.add_row(f"{system} (Table IV)", str(number), text, "", "")
    for system in ("TVM FuseOps", "greedy rules", "without copies", "projections apart", "DPOF"):
        counted = Count(**result[system])
        kernels = sum(counted.weights)
        light = f"{counted.light} ({sum(counted.light_weights)} kernels)"
        table.add_row(system, str(counted.unique), counted.text, str(kernels), light)
    output.print(table)
    search, seconds = result["search"], result["predicted_seconds"]
    output.print(
        f"predicted {seconds['DPOF'] * 1e3:.3f} ms, projections apart "
        f"{seconds['projections apart'] * 1e3:.3f} ms, greedy rules "
        f"{seconds['greedy rules'] * 1e3:.3f} ms; {search['states']} states, "
        f"{search['transitions']} transitions, {search['priced']} stages priced in "
        f"{search['elapsed']:.2f} s, of them {search['cost_elapsed']:.2f} s in the cost function",
        highlight=False,
    )
    for note in search["notes"]:
        output.print(f"note: {note}", markup=False, highlight=False)
    for row in result["subgraphs"]:
        mark = "" if row["counts"] else "  (light)"
        output.print(
            f"  {row['weight']:3} x {row['stage']} -> {row['output']}{mark}",
            markup=False,
            highlight=False,
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench partition", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", default="detr-resnet50-e6", help="a DETR of the models package")
    parser.add_argument("--target", default="native", help="whose analytic policy prices stages")
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write everything there")
    return parser
