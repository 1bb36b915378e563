"""The layer rule, read from the imports: they point down, neighbours in a layer do not import each
other, nor do modules, the tensor layer alone knows its sketches, and the environment is read in one
place.

    {cli, integrations} -> {compiler, report} -> driver -> {tuning, quantization}
    -> {frontend, graph, search, codegen, runtime, verification} -> tensor -> machine -> support
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import networkx
import pytest

ROOT = Path(__file__).resolve().parents[2]
LEVELS = {
    "__main__": 9,
    "cli": 8,
    "integrations": 8,
    "compiler": 7,
    "report": 7,
    "driver": 6,
    "tuning": 5,
    "quantization": 5,
    "frontend": 4,
    "graph": 4,
    "search": 4,
    "codegen": 4,
    "runtime": 4,
    "verification": 4,
    "tensor": 3,
    "machine": 2,
    "support": 1,
}
PUBLIC = "gtco/__init__.py"  # it names things of every layer
# The imports between neighbours that are allowed, each with its reason.
FLOWS = {
    # Level 0 is profiled: its kernels are built to be timed. So is the C runtime's barrier.
    "gtco/search/calibration/measure.py": {"codegen"},
    "gtco/search/calibration/peak.py": {"codegen"},
    "gtco/search/calibration/barrier.py": {"runtime"},
}
# Only modules that make sketches may know single ones. All others ask ``gtco.tensor.sketch`` for
# the space of a stage.
MAKERS = {"tensor"}
# gtco bench reaches the harness, which is installed inside gtco and no part of the compiler.
OUTSIDE = {"cli": {"bench"}}


def imports(path: Path) -> list[tuple[int, str]]:
    """(line, module) of every import in the file, at any depth; relative ones are resolved."""
    package = ".".join(path.relative_to(ROOT).with_suffix("").parts[:-1])
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                base = ".".join(parts[: len(parts) - node.level + 1] + ([base] if base else []))
            if base == "gtco":  # from gtco import graph
                found += [(node.lineno, f"gtco.{alias.name}") for alias in node.names]
            else:
                found.append((node.lineno, base))
    return found


def violations(path: Path) -> list[str]:
    """The reason for each forbidden import of the file."""
    name = str(path.relative_to(ROOT))
    here = path.relative_to(ROOT / "gtco").with_suffix("").parts[0]
    if name == PUBLIC:
        return []
    if here not in LEVELS:
        return [f"{name}: '{here}' has no level in this test; give it one"]
    wrong = []
    for line, module in imports(path):
        parts = module.removeprefix("gtco.").split(".")
        if parts[0] in ("models", "bench", "tests") and parts[0] not in OUTSIDE.get(here, set()):
            wrong.append(f"{name}:{line} imports {module}, which is not a part of gtco")
        parts = module.split(".")
        if parts[0] != "gtco" or len(parts) == 1 or parts[1] in OUTSIDE.get(here, set()):
            continue
        there = parts[1]
        if there not in LEVELS:
            wrong.append(f"{name}:{line} imports {module}, whose layer is unknown")
        elif LEVELS[there] > LEVELS[here]:
            wrong.append(f"{name}:{line} imports {module}, a layer above it")
        elif LEVELS[there] == LEVELS[here] and there != here and there not in FLOWS.get(name, ()):
            wrong.append(f"{name}:{line} imports {module}, a neighbour of its layer")
        elif parts[1:3] == ["tensor", "sketch"] and len(parts) > 3 and here not in MAKERS:
            wrong.append(f"{name}:{line} imports {module}, one of the sketches: ask tensor.sketch")
    return wrong


def sources() -> list[Path]:
    return sorted((ROOT / "gtco").rglob("*.py"))


def test_imports_point_down():
    assert len(sources()) > 10
    wrong = [text for path in sources() for text in violations(path)]
    assert not wrong, "\n".join(wrong)


def modules() -> dict[str, Path]:
    """Every module of gtco by its dotted name."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sources()
    }


def circles() -> list[list[str]]:
    """Modules that import each other in a circle, at any depth, also if only for types."""
    known = modules()
    graph = networkx.DiGraph()
    for name, path in known.items():
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                there = {module for module in inner if module in known} or {node.module}
                graph.add_edges_from((name, module) for module in there if module in known)
            elif isinstance(node, ast.Import):
                graph.add_edges_from((name, a.name) for a in node.names if a.name in known)
    found = networkx.strongly_connected_components(graph)
    return sorted(sorted(circle) for circle in found if len(circle) > 1)


def test_no_modules_import_each_other():
    assert not circles()


def test_circles_are_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    folder = tmp_path / "gtco" / "graph"
    folder.mkdir(parents=True)
    (folder / "a.py").write_text("def f():\n    from gtco.graph import b")
    (folder / "b.py").write_text("if TYPE_CHECKING:\n    from gtco.graph.c import C")
    (folder / "c.py").write_text("import gtco.graph.a")
    (folder / "d.py").write_text("import gtco.graph.a")
    assert circles() == [["gtco.graph.a", "gtco.graph.b", "gtco.graph.c"]]


@pytest.mark.parametrize(
    ("file", "code", "reason"),
    [
        ("graph/x.py", "from gtco.compiler import compile_model", "a layer above it"),
        ("graph/x.py", "def f():\n    from gtco.search.policy import Policy", "a neighbour"),
        ("quantization/x.py", "from gtco.tuning import records", "a neighbour"),
        ("support/x.py", "from gtco.machine.target import target", "a layer above it"),
        ("search/x.py", "from gtco.tensor.sketch.gemm.cpu import Gemm", "one of the sketches"),
        ("tensor/x.py", "import gtco.graph", "a layer above it"),
        ("tensor/sketch/x.py", "from ...graph import graph", "a layer above it"),
        ("runtime/x.py", "from gtco import frontend", "a neighbour"),
        ("codegen/x.py", "import bench.harness.rounds", "not a part of gtco"),
        ("codegen/x.py", "from gtco.bench import harness", "not a part of gtco"),
        ("strange/x.py", "import os", "has no level"),
    ],
)
def test_the_rule_sees_what_it_forbids(tmp_path, monkeypatch, file, code, reason):
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    path = tmp_path / "gtco" / file
    path.parent.mkdir(parents=True)
    path.write_text(code)
    assert [text for text in violations(path) if reason in text]


def emission(path: Path) -> list[str]:
    """The imports of a module of ``tensor/analysis`` that emit code: TVM's builders, and all
    modules of the tensor layer except its own folder and the values.
    """
    values = ("gtco.tensor.analysis", "gtco.tensor.operators", "gtco.tensor.stage")
    packing = "gtco.tensor.packing"  # the layout of a constant is a value too
    return [
        f"{path.name}:{line} imports {module}"
        for line, module in imports(path)
        if (module.startswith("gtco.") and not module.startswith((*values, packing)))
        or module.startswith(("tvm.script", "tvm.tirx.script"))
    ]


def test_analysis_emits_nothing():
    files = sorted((ROOT / "gtco" / "tensor" / "analysis").glob("*.py"))
    assert len(files) > 5
    assert not [text for path in files for text in emission(path)]


@pytest.mark.parametrize(
    "code",
    [
        "from gtco.tensor.emit.emitter import Emitter",
        "from gtco.tensor.sketch import gemm",
        "from ..reader import Reader",
        "from tvm.tirx.script.builder import ir",
        "from gtco.machine.target import Target",
    ],
)
def test_the_rule_sees_emission(tmp_path, monkeypatch, code):
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    path = tmp_path / "gtco" / "tensor" / "analysis" / "x.py"
    path.parent.mkdir(parents=True)
    path.write_text(code)
    assert emission(path)


def test_one_module_reads_the_environment():
    """os.getenv, os.environ[...], .get and the like are reading. Giving a copy to a child process
    is not.
    """
    wrong = []
    for path in sources():
        if path == ROOT / "gtco" / "support" / "environment.py":
            continue
        tree = ast.parse(path.read_text())
        copies = {
            id(value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Dict)
            for key, value in zip(node.keys, node.values, strict=True)
            if key is None
        }
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Attribute)
                and node.attr in ("environ", "getenv")
                and id(node) not in copies
            ):
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    only = "only gtco/support/environment.py may read the environment"
    assert not wrong, f"{only}: {', '.join(wrong)}"


@pytest.mark.parametrize(
    "code", ["import gtco", "from gtco.runtime.module import load", "import gtco; gtco.load"]
)
def test_loading_needs_numpy_and_nothing_heavier(code):
    heavy = "tvm tvm_ffi torch onnx onnxsim onnxruntime networkx rich scipy xgboost".split()
    heavy += ["vl_convert", "jinja2"]
    script = f"import sys\n{code}\nprint(*[m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "", f"'{code}' loads {done.stdout.strip()}"
