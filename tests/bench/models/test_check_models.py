"""A failure costs its row and the exit status, and the numbers are what their names say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

import bench.models.check_models as check_models
import gtco
import gtco.models.family as family
import gtco.verification
from bench.harness.build import Build
from bench.harness.rounds import Comparison, Measurement
from bench.models.check_models import Row, line, main
from bench.models.examine import Examination, by_operator, examine
from bench.models.examine import main as examine_here
from gtco.compiler import compile_to_file
from gtco.models.export import export_onnx
from gtco.support.errors import OptionError, VerificationError

PHASES = (("read", 1.0), ("fuse", 0.5), ("generate", 2.0))


def tiny() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


def member(name: str, **more) -> family.Member:
    return family.Member(name, tiny, ((2, 8),), ("dynamo",), **more)


def run(tmp_path: Path, *flags: str) -> tuple[int, list[dict]]:
    report = tmp_path / "report.json"
    code = main([*flags, "--folder", str(tmp_path), "--json", str(report), "--threads", "2"])
    return code, json.loads(report.read_text())["rows"]


@pytest.fixture
def faked(monkeypatch, tmp_path):
    """Three models; their builds, examinations and races are made up."""
    for name in ("good", "broken", "wrong"):
        monkeypatch.setitem(family.FAMILY, name, member(name))
    monkeypatch.setattr(check_models, "export", lambda *_: None)

    def build(model: Path, library: Path, threads: int, precision: str) -> Build:
        assert precision == "fp32"
        error = "UnsupportedError: no such operator" if "broken" in model.name else None
        return Build(str(library), 9.0, 0, phases=PHASES, stages=7, error=error)

    def examined(
        model: Path, library: Path, threads: int, only_random: bool, name: str
    ) -> Examination:
        reason = "y on random inputs: off by 1" if "wrong" in model.name else None
        return Examination(1e-6, reason, (("grid_sample", 0.2), ("sort", 0.05)))

    seconds = {"gtco": 2e-3, "onnxruntime": 3e-3, "openvino": 1e-3}
    measured = tuple(Measurement(n, rounds=((s,),)) for n, s in seconds.items())
    monkeypatch.setattr(check_models, "build", build)
    monkeypatch.setattr(check_models, "examine", examined)
    monkeypatch.setattr(check_models, "compare", lambda *_, **__: Comparison(measured))
    return tmp_path


def test_it_goes_on_after_a_failure_and_says_so_at_the_end(faked, capsys):
    code, rows = run(faked, "--models", "broken,wrong,good", "--exporters", "dynamo")
    assert code == 1
    assert [row["model"] for row in rows] == ["broken", "wrong", "good"]
    assert [bool(row["failure"]) for row in rows] == [True, True, False]
    good = rows[2]
    assert good["ratio"] == pytest.approx(0.5)  # OpenVINO's 1 ms over gtco's 2
    assert good["fallback_share"] == pytest.approx(0.25)
    assert (good["compile_seconds"], good["fuse_seconds"], good["stages"]) == (3.5, 0.5, 7)
    text = capsys.readouterr().out
    assert "broken (dynamo): not compiled: UnsupportedError: no such operator" in text
    assert "wrong (dynamo): disagrees: y on random inputs: off by 1" in text
    assert "good (dynamo): grid_sample 20.0%, sort 5.0%" in text
    assert "good (dynamo): 0.50" in text
    assert "1 of 3 compile and agree" in text


def test_all_good_is_status_0_and_no_peers_times_nothing(faked):
    code, rows = run(faked, "--models", "good", "--exporters", "dynamo", "--no-peers")
    assert code == 0
    assert rows[0]["medians"] == {} and rows[0]["ratio"] is None


def test_libraries_of_an_earlier_run_are_not_compiled_again(faked):
    (faked / "broken-dynamo.so").touch()
    _, rows = run(faked, "--models", "broken", "--exporters", "dynamo", "--reuse")
    assert rows[0]["failure"] is None and rows[0]["compile_seconds"] is None
    assert rows[0]["ratio"] == pytest.approx(0.5)


def test_parts_are_all_the_rows_once(faked):
    flags = ("--models", "broken,wrong,good", "--exporters", "dynamo", "--no-peers")
    parts = [run(faked, *flags, "--part", f"{k}/2")[1] for k in (1, 2)]
    assert [[row["model"] for row in part] for part in parts] == [["broken", "good"], ["wrong"]]


@pytest.mark.parametrize(
    "flags",
    [["--models", "vitt"], ["--exporters", "onnx"], ["--part", "3/2"], ["--part", "x"]],
)
def test_wrong_options(flags, capsys):
    assert main(flags) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_unknown_names_come_with_the_nearest():
    with pytest.raises(OptionError, match="Did you mean mobilevit"):
        family.find("mobilevitt")


def test_export_failures_are_rows(monkeypatch, tmp_path):
    def broken() -> nn.Module:
        raise ValueError("no such\nlayer")

    monkeypatch.setitem(
        family.FAMILY, "broken", family.Member("broken", broken, ((1, 8),), ("dynamo",))
    )
    code, rows = run(tmp_path, "--models", "broken", "--exporters", "dynamo", "--no-peers")
    assert code == 1
    assert rows[0]["failure"] == "not exported: no such layer"


def test_the_whole_way_and_a_library_of_other_weights(monkeypatch, tmp_path):
    monkeypatch.setitem(family.FAMILY, "tiny", member("tiny"))
    code, rows = run(tmp_path, "--models", "tiny", "--exporters", "dynamo", "--no-peers")
    assert code == 0, rows
    assert rows[0]["examination"]["difference"] < 1e-4
    assert rows[0]["compile_seconds"] > 0 and rows[0]["stages"] >= 1
    other = tmp_path / "other.onnx"
    tensors = family.find("tiny").inputs()
    export_onnx(family.find("tiny").create(seed=1), tensors, other, exporter="torchscript")
    seen = examine(other, tmp_path / "tiny-dynamo.so", 2)
    assert seen.error is None and seen.disagrees and "off by" in seen.disagrees
    assert "No such file" in (examine(other, tmp_path / "none.so", 2).error or "")


@pytest.fixture
def examined_tiny(monkeypatch, tmp_path):
    """Examines a library of ``tiny`` in this process."""
    monkeypatch.setitem(family.FAMILY, "tiny", member("tiny"))
    module, inputs = family.find("tiny").create(), family.find("tiny").inputs()
    model, library = tmp_path / "tiny.onnx", tmp_path / "tiny.so"
    export_onnx(module, inputs, model, exporter="torchscript")
    compile_to_file(model, library)
    job, answer = tmp_path / "job.json", tmp_path / "answer.json"

    def seen(**more) -> dict:
        names = {"model": str(model), "library": str(library), "member": "tiny"}
        flags = {"threads": 2, "only_random": False, "answer": str(answer)}
        job.write_text(json.dumps(names | flags | more))
        assert examine_here([str(job)]) == 0
        return json.loads(answer.read_text())

    return seen


@pytest.mark.parametrize(
    ("said", "where", "words"),
    [
        ({"judged": True, "reference_error": 0.2}, "judged", "ONNX Runtime is off by 2e-01"),
        ({"judged": True, "unstable": True}, "unsettled", "within the error of rounding there"),
        ({"failure": "off by 3"}, "disagrees", "off by 3"),
    ],
)
def test_what_verification_said_is_told(examined_tiny, monkeypatch, said, where, words):
    verify = gtco.verification.verify

    def changed(*arguments, **more):
        report = verify(*arguments, **more)
        random, *others = report.differences
        assert random.case == "random"
        first = replace(random, relative=0.3, **said)
        return replace(report, differences=(first, *others))

    monkeypatch.setattr(gtco.verification, "verify", changed)
    seen = examined_tiny()
    assert seen["difference"] == 0.3
    told = seen.pop(where)
    assert "on random inputs" in told and words in told
    assert [seen[k] for k in ("judged", "unsettled", "disagrees") if k != where] == [None, None]


def test_a_model_that_onnx_runtime_cannot_run_is_held_to_its_module(examined_tiny, monkeypatch):
    verify = gtco.verification.verify

    def refusing(compiled, reference, **more):
        if isinstance(reference, str):
            raise VerificationError("no such operator")
        return verify(compiled, reference, **more)

    monkeypatch.setattr(gtco.verification, "verify", refusing)
    seen = examined_tiny()
    assert seen["judged"] == "no such operator" and seen["disagrees"] is None
    assert seen["difference"] < 1e-4
    assert examined_tiny(member=None)["disagrees"] == "no such operator"
    create = family.Member.create
    monkeypatch.setattr(family.Member, "create", lambda self: create(self, seed=1))
    seen = examined_tiny()  # a module of other weights proves nothing
    assert "off by" in seen["disagrees"] and seen["judged"] is None


def test_what_nothing_settles_is_named(faked, monkeypatch, capsys):
    unsettled = "y on spike inputs: differs by 3e-01, and so does the reference itself"
    monkeypatch.setattr(check_models, "examine", lambda *_: Examination(0.3, unsettled=unsettled))
    code, rows = run(faked, "--models", "good", "--exporters", "dynamo", "--no-peers")
    assert code == 0 and rows[0]["examination"]["unsettled"] == unsettled
    text = capsys.readouterr().out
    assert "not settled" in text and f"good (dynamo): {unsettled}" in text


def test_a_precision_is_gtcos_and_its_peers(monkeypatch, tmp_path):
    """All systems run the library of that precision, which is written beside the library of the
    other one.
    """
    raced: list[dict] = []

    def race(systems, *_, **__) -> Comparison:
        raced.extend(system.job for system in systems)
        return Comparison(())

    monkeypatch.setitem(family.FAMILY, "tiny", member("tiny"))
    monkeypatch.setattr(check_models, "compare", race)
    flags = ("--models", "tiny", "--exporters", "dynamo", "--precision", "bf16")
    code, rows = run(tmp_path, *flags)
    assert code == 0, rows
    assert {job["precision"] for job in raced} == {"bf16"} and len(raced) > 2
    library = tmp_path / "tiny-dynamo.bf16.so"
    assert {job["library"] for job in raced} == {str(library)}
    with gtco.load(library) as loaded:
        assert loaded.metadata["precision"] == "bf16"
    assert json.loads((tmp_path / "report.json").read_text())["precision"] == "bf16"


def test_fallbacks_are_summed_by_operator():
    stages = [
        {"schedule": {"sketch": sketch}, "operators": [operator]}
        for sketch, operator in (
            ("fallback", "sort"),
            ("gemm", "matmul"),
            ("fallback", "scan"),
            ("fallback", "sort"),
        )
    ]
    assert by_operator(stages, [1.0, 5.0, 3.0, 1.0]) == [("scan", 0.3), ("sort", 0.2)]


def test_a_row_shows_what_is_missing_as_missing():
    text = line(Row("vit", "dynamo", "not compiled: x"))
    assert text.split()[:4] == ["vit", "dynamo", "-", "!"]
