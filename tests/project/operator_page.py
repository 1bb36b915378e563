# ruff: noqa: E501 (lines of text are written as the pages have them)
"""docs/reference/operators.md, made from the tables that decide how a node of ONNX is read, and from
ONNX's own tests of single operators: they are read and lowered, and each operator of the result is
asked for its sketches. Nothing is built or run here; ``tests/end_to_end/nodes`` does that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from functools import cache
from textwrap import fill
from unittest.mock import patch

import onnx
import onnx.defs
from onnx import helper

from gtco.driver.canonical import canonical
from gtco.frontend import model_check
from gtco.frontend.expansion import EXPANDED
from gtco.frontend.expansion.rules import RULES
from gtco.frontend.expansion.writer import MICROSOFT
from gtco.frontend.onnx import load_onnx
from gtco.frontend.operators.overrides import OVERRIDES
from gtco.frontend.pytorch import skeleton
from gtco.graph.graph import Graph
from gtco.graph.lower.walk import lower
from gtco.machine.target import target
from gtco.support.errors import GtcoError, InternalError
from gtco.support.quiet import quiet
from gtco.tensor.sketch import sketches
from gtco.tensor.stage import ITEM_BYTES, make_stage
from tests.end_to_end.nodes.cases import OPERATORS, cases
from tests.end_to_end.nodes.failures import EXPECTED_FAILURES
from tests.end_to_end.nodes.runner import simplify

OPSET = 28  # operators of later opsets are not listed, so that a new onnx leaves the page as it is
TARGET = "x86-64-v3"
FLOAT = onnx.TensorProto.FLOAT

TYPES = fill(
    f"Tensors may have these types: {', '.join(ITEM_BYTES)}. Constants may also be of int4, uint4, int2 and uint2. "
    "Sequences and optional values may be inside of a model, and not its inputs or outputs.",
    120,
)
ABOUT = f"""
gtco reads a file's operators in four ways. The columns say which, and what the kernels are.

- **opsets**: those in which ONNX has the operator, as far as opset {OPSET}. A file may ask for any that the
  installed onnx knows. ONNX's tests, and so the last column, are of the newest form of an operator.
- **read by**
    - *gtco*: a rule in `gtco/frontend/operators/`. Where the rule leaves a node alone, TVM's importer reads it.
    - *written out*: gtco writes other operators in its place (`gtco/frontend/expansion/`).
    - *TVM*: TVM's importer.
    - *definition*: gtco takes ONNX's own definition of the operator, by the operators that are named.
- **kernels**, in ONNX's own tests of the operator, for `{TARGET}`
    - *own*: each of its parts has a kernel of gtco, which can be tuned, and fused with its neighbours.
    - *fallback*: a part of it gets a kernel of last resort: right, and slow. *own or fallback*: this depends on types,
      sizes and attributes.
    - *none*: nothing is left to compute when the model runs; what decides the result is constant there.
    - *not run*: ONNX's tests of it are not among those that gtco's tests run; gtco may have tests of its own.

That an operator is read does not say that every use of it is. A use that cannot be compiled is refused with the name of
its node, before code is generated. Shapes, axes and counts among a node's inputs must be constants, or follow from
shapes. `gtco inspect` shows each stage of a library with its kernel (`sketch=fallback`).
[Limits](../limits.md#operators) says more of single operators, [int8](../int8.md#which-files-gtco-reads) of quantized
ones.

{TYPES}
""".strip().splitlines()

PYTORCH = f"""
`torch.export` makes a program of a module, and torch's own ONNX exporter makes ONNX of opset {skeleton._OPSET} of the program. So the
tables above hold for modules too. gtco refuses the operators that the exporter gets wrong without an error
(`gtco/frontend/pytorch/mistakes.py`, [limits](../limits.md#pytorch-modules)). It gives the exporter translations of
those that the exporter lacks (`missing.py` there) or writes wrongly (`translations.py`). The texts at the top of these
three files list them by their names in PyTorch.
""".strip().splitlines()


def page() -> str:
    """Every operator of ONNX, and those of ONNX Runtime that gtco knows."""
    standard, refused = [], []
    for name in _names():
        how, why = _read_by(name), _refusal(name)
        if why:
            refused.append(f"| {name} | {_opsets(name)} | {why} |")
        else:
            standard.append(f"| {name} | {_opsets(name)} | {how} | {_kernels(name)} |")
    written_out = {name: rule for (domain, name), rule in RULES.items() if domain == MICROSOFT}
    microsoft = sorted(
        [(name, f"written out, `{_file(rule)}`") for name, rule in written_out.items()]
        + [
            (name, _with_file("gtco", name) if name in OVERRIDES else "TVM")
            for name in model_check.MICROSOFT
        ]
    )
    others = sorted({s.domain for s in onnx.defs.get_all_schemas()} - {""})
    return "\n".join(
        [
            "# Operators of ONNX and PyTorch",
            "<!-- Written by python -m tests.project.references; a test compares it with the code. -->",
            "",
            *ABOUT,
            "",
            "## Operators of ONNX",
            "",
            "| operator | opsets | read by | kernels |",
            "|---|---|---|---|",
            *standard,
            "",
            "## Refused operators of ONNX",
            "A model with one of these is refused. The message lists all of them, with their nodes.",
            "",
            "| operator | opsets | why |",
            "|---|---|---|",
            *refused,
            "",
            "## Uses that fail",
            "These uses are in ONNX's tests, and gtco's tests expect them to fail.",
            "",
            "| why | operators |",
            "|---|---|",
            *(f"| {row.reason} | {_operators_of(row.tests)} |" for row in EXPECTED_FAILURES),
            "",
            "## Operators of ONNX Runtime",
            f"Of the domain `{MICROSOFT}` gtco knows these. ONNX Runtime's optimizers and quantizers write them.",
            "",
            "| operator | read by |",
            "|---|---|",
            *(f"| {name} | {how} |" for name, how in microsoft),
            "",
            "Operators of other domains are refused by name, among them those of "
            + ", ".join(f"`{domain}`" for domain in others)
            + ".",
            "",
            "## PyTorch",
            *PYTORCH,
        ]
    ) + "\n"


@cache
def _names() -> list[str]:
    every = {s.name for s in onnx.defs.get_all_schemas_with_history() if not s.domain}
    return sorted(name for name in every if _versions(name))


@cache
def _versions(name: str) -> list[onnx.defs.OpSchema]:
    """The forms of an operator up to ``OPSET``, the oldest first."""
    found = [
        s
        for s in onnx.defs.get_all_schemas_with_history()
        if s.name == name and not s.domain and s.since_version <= OPSET
    ]
    return sorted(found, key=lambda s: s.since_version)


def _opsets(name: str) -> str:
    """The opsets in which ONNX has the operator."""
    versions = _versions(name)
    spans: list[tuple[int, int]] = []
    for schema, later in zip(versions, [*versions[1:], None], strict=True):
        first, last = schema.since_version, later.since_version - 1 if later else OPSET
        if schema.deprecated:
            continue
        if spans and spans[-1][1] == first - 1:
            first = spans.pop()[0]
        spans.append((first, last))
    return ", ".join(f"{a} to {b}" if b > a else str(a) for a, b in spans)


def _last(name: str) -> onnx.defs.OpSchema:
    return [s for s in _versions(name) if not s.deprecated][-1]


def _read_by(name: str) -> str:
    if ("", name) in EXPANDED:
        return f"written out, `{_file(RULES['', name])}`"
    if name in OVERRIDES:
        return _with_file("gtco", name)
    if name in model_check.supported_operators():
        return "TVM"
    if body := _definition(name):
        return f"definition: {', '.join(sorted(body))}"
    return "definition" if _is_defined(name) else ""


def _refusal(name: str) -> str:
    """Why an operator is refused; "" if it is not."""
    if name in model_check._DATA_DEPENDENT:
        return "the size of what it gives depends on values"
    if not _read_by(name):
        return "neither gtco nor TVM's importer reads it"
    lacking = sorted(
        inner
        for inner in (_definition(name) if _read_by(name).startswith("definition") else ())
        if _refusal(inner)
    )
    return f"its definition has {' and '.join(lacking)}" if lacking else ""


def _is_defined(name: str) -> bool:
    schema = _last(name)
    return bool(schema.has_function or schema.has_context_dependent_function)


@cache
def _definition(name: str) -> frozenset[str]:
    """The operators in ONNX's definition. Some definitions depend on types and attributes: then
    those for float32 and the defaults. Empty if there is none without further attributes.
    """
    schema = _last(name)
    nodes: Iterable[onnx.NodeProto] = schema.function_body.node if schema.has_function else ()
    if schema.has_context_dependent_function:
        node = helper.make_node(name, [i.name for i in schema.inputs], [o.name for o in schema.outputs])
        kind = helper.make_tensor_type_proto(FLOAT, [2, 2]).SerializeToString()
        version = max(v for v in schema.context_dependent_function_opset_versions if v <= OPSET)
        body = onnx.FunctionProto()
        try:
            body.ParseFromString(
                schema.get_context_dependent_function_with_opset_version(
                    version, node.SerializeToString(), [kind for _ in schema.inputs]
                )
            )
        except Exception:  # it needs an attribute, as SequenceMap its body
            return frozenset()
        nodes = body.node
    return frozenset(node.op_type for node in nodes)


def _file(rule: Callable[..., object]) -> str:
    return f"{rule.__module__.rpartition('.')[2]}.py"


def _with_file(how: str, name: str) -> str:
    file = _file(OVERRIDES[name])
    return f"{how}, `{file}`" if file != "overrides.py" else how


def _operators_of(tests: Collection[str]) -> str:
    """The operators that these tests are about. Some fail only as ONNX defines them."""
    found = {_operator(test) for test in tests if "_expanded" not in test}
    written = {_operator(test) for test in tests} - found
    return ", ".join([*sorted(found), *(f"{name} as ONNX defines it" for name in sorted(written))])


def _operator(test: str) -> str:
    """The operator that a test of ONNX is about."""
    plain = cases()[test.partition("_expanded")[0]]
    return str(plain.model.graph.node[-1].op_type)


@cache
def _kernels_by_operator() -> dict[str, set[str]]:
    """"own", "fallback" and "none": what ONNX's tests of each operator become."""
    found = defaultdict(set)
    for name, case in cases().items():
        if "_expanded" not in name:
            found[_operator(name)] |= _parts(case.model)
    return found


def _parts(model: onnx.ModelProto) -> set[str]:
    machine = target(TARGET)

    def failed(error: InternalError) -> None:
        raise error

    graph = _graph(model, False) or _graph(model, True)  # most do without onnxsim, which takes time
    if graph is None:
        return set()  # a use that is refused
    graph = canonical(graph, machine, 1, "float32", failed, lambda *_: None)
    kinds = set()
    for op in graph.operators.values():
        if all(map(graph.is_constant, op.inputs)):
            kinds.add("none")
            continue
        stage = make_stage([op], graph.types, filter(graph.is_constant, op.inputs))
        own = any(sketch.name != "fallback" for sketch in sketches(stage, machine))
        kinds.add("own" if own else "fallback")
    return kinds - {"none"} or {"none"}


def _graph(model: onnx.ModelProto, simplified: bool) -> Graph | None:
    """The model as a graph; None if it is refused."""
    try:
        with patch("gtco.frontend.onnx.run_onnxsim", simplify), quiet():
            return lower(load_onnx(model, simplify=simplified))
    except GtcoError:
        return None


def _kernels(name: str) -> str:
    if name not in OPERATORS:
        return "not run"
    kinds = _kernels_by_operator()[name]
    assert kinds, f"all tests of {name} are refused"
    return " or ".join(sorted(kinds - {"none"}, reverse=True)) or "none"
