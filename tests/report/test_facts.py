"""Facts of real libraries against what the compile, gtco inspect and the model say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import numpy as np
import onnx
import pytest

import gtco
from gtco import cli
from gtco.report import gather as gather_module
from gtco.report import measured as measured_module
from gtco.report.bounds import bound_of, nominal
from gtco.report.compiled import with_report
from gtco.report.difference import difference
from gtco.report.facts import Machine, Tensor
from gtco.report.gather import bytes_of, gather, model_facts
from gtco.report.measured import measured, timing
from gtco.runtime.library import read_metadata
from gtco.runtime.variants import described_variants
from gtco.support.errors import ArtifactError
from gtco.tensor.stage import ITEM_BYTES
from gtco.tuning.view import StageView, View
from tests.cli.test_artifact import kernels, library  # noqa: F401 (fixtures are imported)

SCHEMA = json.loads((Path(gather_module.__file__).parent / "schema.json").read_text())


def valid(value, kind: str = "report") -> None:
    """Raises if the value, as JSON, is not what the schema says."""
    schema = {"$ref": f"#/$defs/{kind}", "$defs": SCHEMA["$defs"]}
    text = json.dumps(value, allow_nan=False)
    jsonschema.Draft202012Validator(schema).validate(json.loads(text))


def test_the_json_has_the_numbers_of_inspect(made, capsys):
    assert cli.main(["inspect", str(made.library), "--json", "--no-profile"]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert cli.main(["report", str(made.library), "--json", "--no-run"]) == 0
    facts = json.loads(capsys.readouterr().out)
    valid(facts)
    (model,) = facts["models"]
    assert len(model["stages"]) == len(seen["stages"]) >= 5
    for stage, known in zip(model["stages"], seen["stages"], strict=True):
        for name in ("name", "key", "kernel", "structure", "flops", "predicted_seconds"):
            assert stage[name] == known[name]
        assert stage["nbytes"] == known["bytes"]
        assert [op["kind"] for op in stage["operators"]] == known["operators"]
        assert [t["type"] for t in stage["inputs"]] == known["inputs"]
        assert stage["output"]["type"] == known["output"]
        config = {d["name"]: d["value"] for d in stage["config"]}
        assert {"sketch": stage["sketch"], **config} == known["schedule"]
    assert model["predicted_seconds"] == pytest.approx(made.report.predicted_seconds)
    assert model["arena_bytes"] == seen["metadata"]["arena_bytes"] == made.report.arena_bytes
    assert facts["weights_bytes"] == made.report.weights_bytes
    assert model["measurement"] is None and model["unmeasured"]


def test_the_schema_itself_is_one():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    with pytest.raises(jsonschema.ValidationError):
        valid({"format": "gtco-report", "version": 3})


def test_stages_have_their_loops(made):
    (model,) = made.facts.models
    gemm = next(s for s in model.stages if s.sketch == "gemm")
    task, *inner = gemm.loops
    assert task.runs == "threads" and task.extent == gemm.launch["tasks"] and task.depth == 0
    assert any(line.loop == "k" and line.runs == "registers" for line in inner)
    for stage in model.stages:
        assert any("-> output" in line.text for line in stage.loops), stage.name
    for kernel in {stage.kernel for stage in model.stages}:
        assert len({stage.loops for stage in model.stages if stage.kernel == kernel}) == 1


def test_stages_have_the_nodes_of_the_model(made):
    nodes = {node.name for node in made.model.graph.node}
    (model,) = made.facts.models
    found = [op.node for stage in model.stages for op in stage.operators]
    # onnxsim makes one product of the three for queries, keys and values, with a name of its own
    assert set(found) - {*nodes, ""} <= {"MatMul_0"}
    heavy = {n for n in nodes if n.startswith(("MatMul", "Gelu", "LayerNorm"))}
    # those three, and one of the two of attention, which is one operator
    assert len(heavy - set(found)) <= 4, heavy - set(found)


def test_tensors_lead_from_stage_to_stage(made):
    (model,) = made.facts.models
    for stage in model.stages:
        assert all(source < stage.number for source in stage.reads)
        assert sum(t.nbytes for t in (*stage.inputs, stage.output)) == stage.nbytes
        for tensor in stage.inputs:
            if tensor.stage is not None:
                source = model.stages[tensor.stage]
                assert tensor.type == source.output.type and tensor.name == source.output.name
                assert stage.number in source.read_by
            if tensor.place == "input":
                assert tensor.name == "x"
    assert model.stages[-1].output.place == "output" and model.stages[-1].output.name == "y"
    packed = [t for s in model.stages for t in s.inputs if t.packed]
    assert packed and all(t.place == "weight" for t in packed)
    residual = [s for s in model.stages if len(s.read_by) > 1]
    assert residual, "the block has a residual, which two stages read"


def test_tensors_that_live_at_once_do_not_overlap(made):
    (model,) = made.facts.models
    for n, one in enumerate(model.arena):
        assert 0 <= one.offset and one.offset + one.nbytes <= model.arena_bytes
        for other in model.arena[n + 1 :]:
            at_once = one.first <= other.last and other.first <= one.last
            apart = (
                one.offset + one.nbytes <= other.offset or other.offset + other.nbytes <= one.offset
            )
            assert apart or not at_once, (one, other)


def test_a_run_is_measured_and_adds_up(made, monkeypatch):
    monkeypatch.setattr(measured_module, "SECONDS", 0.0)
    known = Machine("here", 1, {"float32": 1e11}, {"L2": 1e11, "DRAM": 1e10}, {"L2": 1 << 20}, "")
    monkeypatch.setattr(measured_module, "machine_here", lambda formats, threads: known)
    facts = measured(made.facts, made.library)
    valid(facts.to_json())
    (model,) = facts.models
    found = model.measurement
    assert found is not None and found.runs == measured_module.LEAST_RUNS and found.threads == 1
    for stage in model.stages:
        assert 0 <= stage.measured.minimum <= stage.measured.median <= stage.measured.p99
        assert stage.seconds == stage.measured.median
        assert stage.bound.seconds / stage.seconds == pytest.approx(stage.roofline)
        assert stage.flops / stage.seconds / 1e11 == pytest.approx(stage.peak or 0)
    total = sum(stage.measured.median for stage in model.stages)
    assert found.stages_seconds == pytest.approx(total)
    left = found.end_to_end.median - total
    assert found.unattributed_seconds == pytest.approx(left)
    assert sum(stage.share for stage in model.stages) <= 1 + 1e-9


def test_no_run_runs_nothing(made, monkeypatch, capsys):
    def refuse(*args, **kwargs):
        raise AssertionError("the library was opened")

    monkeypatch.setattr(measured_module, "load", refuse)
    assert cli.main(["report", str(made.library), "--json", "--no-run"]) == 0
    with pytest.raises(AssertionError, match="was opened"):
        measured(made.facts, made.library)


def test_a_library_that_does_not_open_here_is_read(made, monkeypatch):
    def refuse(*args, **kwargs):
        raise ArtifactError("it needs avx1024")

    monkeypatch.setattr(measured_module, "load", refuse)
    facts = measured(made.facts, made.library)
    valid(facts.to_json())
    assert facts.models[0].unmeasured == "not measured: it needs avx1024"
    assert facts.models[0].stages[0].share == made.facts.models[0].stages[0].share


def test_the_prediction_is_of_the_way_that_the_first_architecture_is_launched(made):
    metadata = read_metadata(made.library)
    metadata |= {
        "target": {**metadata["target"], "arch": "sm_75"},
        "predicted_launches": {"graph": 2.0, "persistent": 1.0},
        "launches": "persistent",
    }
    (variant,) = described_variants(metadata)
    assert model_facts(variant, metadata).predicted_seconds == 1
    metadata["persistent_would_spill"] = {"sm_75": 8}
    assert model_facts(variant, metadata).predicted_seconds == 2


def test_timing_is_of_all_runs():
    found = timing([3.0, 1.0, 2.0])
    assert (found.minimum, found.median) == (1.0, 2.0) and 2.9 < found.p99 <= 3.0


def test_a_bound_is_the_peak_or_the_memory():
    levels = {"L1": 1e12, "L2": 1e11, "DRAM": 1e10}
    machine = Machine("", 1, {"float32": 1e12}, levels, {"L1": 100, "L2": 10_000}, "")

    def tensor(nbytes, place):
        return Tensor("", "", nbytes, place)

    near, weight = tensor(5_000, "stage"), tensor(4_000, "weight")
    # data in L2 take 50 ns and 40 ns; 1000 FLOPs take 1 ns
    small = bound_of(machine, "float32", 1e3, [near, weight], weights=4_000)
    assert small.by == "L2" and small.seconds == pytest.approx(90e-9)
    # what would fit in L1 may lie in L2
    tiny = bound_of(machine, "float32", 1.0, [tensor(50, "stage")], weights=0)
    assert tiny.by == "L2" and tiny.seconds == pytest.approx(0.5e-9)
    # all weights together do not stay in L2
    large = bound_of(machine, "float32", 1e3, [near, weight], weights=20_000)
    assert large.by == "DRAM" and large.seconds == pytest.approx(450e-9)
    heavy = bound_of(machine, "bfloat16", 1e6, [near, weight], weights=20_000)
    assert heavy.by == "compute" and heavy.seconds == pytest.approx(1e-6)
    assert bound_of(replace(machine, peaks={}), "float32", 1.0, [near], 0) is None


def test_levels_of_several_threads():
    """Caches that each core has count once a thread. L3 is one for all, but each core reads it by
    itself; DRAM is one for all.
    """
    from gtco.machine.target import TARGETS

    one, four = (nominal(TARGETS["znver4"], threads, "") for threads in (1, 4))
    times = {"L1": 4, "L2": 4, "L3": 4, "DRAM": 1}
    assert four.bandwidths == {level: times[level] * one.bandwidths[level] for level in times}
    times = {"L1": 4, "L2": 4, "L3": 1}
    assert four.capacities == {level: times[level] * one.capacities[level] for level in times}


def test_peaks_of_formats(made, narrow):
    from gtco.machine.target import TARGETS

    found = nominal(TARGETS["znver4"], 2, "")
    fma = 2 * TARGETS["znver4"].peak
    assert 0.9 * fma <= found.peaks["float32"] <= fma
    assert found.peaks["bfloat16"] == pytest.approx(2 * found.peaks["float32"], rel=0.1)
    stages = narrow.facts.models[0].stages
    products = [s for s in stages if s.number_format == "bfloat16" and s.sketch == "gemm"]
    assert products and all("VDPBF16PS" in s.instructions for s in products)
    fp32 = [s for s in made.facts.models[0].stages if s.sketch == "gemm"]
    assert fp32 and all(
        s.number_format == "float32" and s.instructions.endswith("FMA") for s in fp32
    )
    words = {d.name: d.words for s in fp32 for d in s.config}
    assert "summed in registers" in words["tile"] and "cut into" in words["chunks_m"]


def test_sizes_of_types():
    assert bytes_of("float32[1x197x192]") == 4 * 197 * 192
    assert bytes_of("bfloat16[3x2]") == 12 and bytes_of("int64[]") == 8
    assert bytes_of("float32[1x0x4]") == 0
    assert bytes_of("int4[3x3]") == 5  # two in a byte
    assert all(bytes_of(f"{dtype}[2]") == 2 * size for dtype, size in ITEM_BYTES.items())


def test_a_library_of_int4_weights(tmp_path, capsys):
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]> g (float[4,64] x) => (float[4,96] y)
            { y = MatMul(x, w) }"""
    )
    weights = np.random.default_rng().standard_normal((64, 96)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weights, "w"))
    quantized = gtco.quantize_weights(model, bits=4)
    saved = gtco.compile_model(quantized.model, target="x86-64-v3").save(tmp_path / "m.so")
    assert cli.main(["report", str(saved), "--json", "--no-run"]) == 0
    found = json.loads(capsys.readouterr().out)
    valid(found)
    (stage,) = found["models"][0]["stages"]
    assert "int4[64x96]" in json.dumps(stage)


def test_every_variant_of_a_library_of_several_shapes(shaped, capsys):
    facts = shaped.facts
    valid(facts.to_json())
    assert [model.sizes for model in facts.models] == [{"batch": 1}, {"batch": 3}]
    assert [model.inputs for model in facts.models] == [
        ("x: float32[1x24]",),
        ("x: float32[3x24]",),
    ]
    one = gather(shaped.library, {"batch": 3})
    assert one.models == (facts.models[1],)
    argv = ["report", str(shaped.library), "--json", "--no-run", "--dim", "batch=2"]
    assert cli.main(argv) == 1
    assert "batch=1,3" in capsys.readouterr().err


def test_what_a_compile_knows(made):
    facts = with_report(made.facts, made.report)
    valid(facts.to_json())
    (model,) = facts.models
    found = model.verification
    assert found["passed"] and found["reference"].startswith("ONNX Runtime")
    assert {d["output"] for d in found["differences"]} == {"y"} and model.tuning is None
    worst = made.report.verification.worst
    assert max(d["relative"] for d in found["differences"]) == worst.relative
    stage = {
        "stage": "matmul+add",
        "key": model.stages[0].key,
        "occurrences": 2,
        "candidates": 24,
        "first": {"sketch": "gemm", "tile": "6x4"},
        "last": {"sketch": "gemm", "tile": "12x2"},
        "first_seconds": 2e-3,
        "seconds": 1e-3,
        "noise": 0.01,
        "ranking": [],
    }
    seen = StageView("matmul+add", 2, 2e-3, 1e-3, 0.5, 24, "done")
    view = View("", (seen,), ((4e-3, 2e-3),), elapsed=9.5, remaining=0.0, changed=1)
    tuned = replace(made.report, tuning=[stage], tuned=view, fusion="3 partitions measured")
    facts = with_report(made.facts, tuned)
    valid(facts.to_json())
    found = facts.models[0].tuning
    assert found["stages"][0]["candidates"] == 24 and "noise" not in found["stages"][0]
    assert "24 candidates" in found["summary"][0] and found["summary"][1].startswith("3 part")


def test_libraries_of_older_versions(made):
    """Without names of nodes and tensors there are still stages and what they read."""
    metadata = read_metadata(made.library)
    new = ("nodes", "results", "tensors", "packed", "layout")
    metadata = {name: value for name, value in metadata.items() if name != "loops"}
    steps = [{k: v for k, v in step.items() if k not in new} for step in metadata["steps"]]
    older = model_facts({**metadata, "steps": steps}, metadata)
    now = made.facts.models[0]
    assert [s.reads for s in older.stages] == [s.reads for s in now.stages]
    assert [s.flops for s in older.stages] == [s.flops for s in now.stages]
    assert all(op.node == "" for stage in older.stages for op in stage.operators)
    found = difference(replace(made.facts, models=(older,)), made.facts)
    valid(found.to_json(), "difference")
    assert all(row.state == "same" for row in found.models[0].rows)


def test_a_library_that_no_compile_made_is_refused(library, capsys):  # noqa: F811
    assert cli.main(["report", str(library), "--json", "--no-run"]) == 1
    assert "does not say what it was compiled for" in capsys.readouterr().err


def test_the_page_of_docs_names_every_field(root):
    text = (root / "docs" / "report.md").read_text()
    kinds = "report machine model measurement stage line losses measure layer timing row"
    for kind in kinds.split():
        missing = [n for n in SCHEMA["$defs"][kind]["properties"] if f"`{n}`" not in text]
        assert set(missing) <= {"format", "version"}, (kind, missing)
