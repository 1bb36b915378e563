"""Candidates for a GPU elsewhere: they are made here and timed on the fake driver. Their answers
are imported, and the next compile follows them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gtco.cli import main
from gtco.codegen.jobs import Failure, GpuKernel, Job, Kernel
from gtco.driver.candidates import bundle
from gtco.driver.compilation import Compilation, silent
from gtco.driver.compiled import CompileReport
from gtco.machine.gpu import gpu_target
from gtco.runtime.library import read_metadata
from gtco.runtime.module import load
from gtco.runtime.publish import staging
from gtco.runtime.writing.linking import publish_alone
from gtco.search.records.records import Records
from gtco.search.records.text import from_lines, to_lines
from gtco.support.errors import ArtifactError, OptionError, RecordError
from gtco.support.options import CompileOptions
from gtco.tuning.offline import disagreeing, measure, records
from tests.cuda.emulate import faults_of
from tests.cuda.fake_driver import FakeDriver
from tests.cuda.models.test_whole_models import block
from tests.cuda.whole import Emulating, prepared

PER_STAGE = 3
TARGET = "cuda:sm_80"
# a process without TVM, NVRTC or a compiler, on one fake GPU
ALONE = """
import ctypes, sys
for name in ("tvm", "cuda", "onnx", "torch", "networkx"):
    sys.modules[name] = None
ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL).fake_reset(1, 8, 0, 1)
from gtco.cli import main
sys.exit(main(["measure", *sys.argv[2:]]))
"""


def model() -> bytes:
    data: bytes = block(tokens=5, width=32, heads=2).SerializeToString()
    return data


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Emulating]:
    """A transformer's block as candidates, in a folder with nothing else in it."""
    folder = tmp_path_factory.mktemp("candidates")
    workers = Emulating(folder / "kernels.so")
    return bundled(folder, workers), workers


def bundled(folder: Path, workers: Emulating) -> Path:
    options = CompileOptions(target=TARGET, precision="fp16")
    run = Compilation(model(), folder / "made" / "block.bundle", None, options, silent)
    fused = run.to_stages(gpu_target(TARGET))
    artifact = bundle(run, fused, PER_STAGE, workers)  # type: ignore[arg-type]
    workers.link(800)
    with staging(run.output) as staged:
        publish_alone(staged, artifact, run.output)
    return run.output


class Breaking(Emulating):
    """The second candidate of one stage leaves out a block, and so does the first candidate of
    another stage.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.broken: dict[str, int] = {}  # the candidate, by stage

    def build(self, jobs: Iterable[Job]) -> Iterator[Kernel | Failure]:
        for answer in super().build(jobs):
            if isinstance(answer, GpuKernel) and answer.grid[0] > 1 and len(self.broken) < 2:
                key, rival = answer.symbol.removeprefix("gtco_").rsplit("_", 1)
                if key not in self.broken and int(rival) == 1 - len(self.broken):
                    self.broken[key] = int(rival)
                    answer = replace(answer, grid=(answer.grid[0] - 1, 1, 1))
            yield answer


def test_a_candidate_that_computes_something_else_is_never_picked(
    driver: FakeDriver, tmp_path: Path
) -> None:
    workers = Breaking(tmp_path / "kernels.so")
    path = bundled(tmp_path, workers)
    assert sorted(workers.broken.values()) == [0, 1]
    driver.reset(1, 8, 0, 1)
    found = measure(path, rounds=8)
    wrong = {(r.stage, r.config): r.reason for r in found if r.outcome == "wrong"}
    steps = [s for s in read_metadata(path)["steps"] if s["rival"] is not None]
    assert set(wrong) == {
        (s["key"], json.dumps(s["schedule"]))
        for s in steps
        if workers.broken.get(s["key"]) == s["rival"]
    }
    assert all("not that of most" in reason for reason in wrong.values())
    without_first = next(key for key, rival in workers.broken.items() if rival == 0)
    assert [r.outcome for r in found if r.stage == without_first].count("taken") == 1

    base = tmp_path / "gpu.records"
    options = CompileOptions(target=TARGET, precision="fp16", records=base)
    with Records(base) as kept:
        kept.add(r for r in found if r.outcome == "wrong")  # and no pick
        run = Compilation(model(), tmp_path / "model.so", None, options, silent)
        fused = run.to_stages(gpu_target(TARGET), kept)
        for stage in fused.partition.stages:
            pick = fused.policy.choose(stage)
            assert pick is not None
            assert (stage.key, json.dumps(pick.config.to_json())) not in wrong


def test_of_two_results_that_differ_neither_is_trusted() -> None:
    one, other = np.ones(8, np.float32), np.zeros(8, np.float32)
    compared = [{"key": "a", "first": 0, "count": 2, "tolerance": 1e-3}]
    assert disagreeing(compared, [one, other]) == {"a": frozenset({0, 1})}
    assert disagreeing(compared, [one, one * np.float32(1.0001)]) == {"a": frozenset()}
    compared[0]["count"] = 3
    assert disagreeing(compared, [one, other, one]) == {"a": frozenset({1})}
    assert disagreeing(compared, [one, other, other]) == {"a": frozenset({0})}
    bits = (other + 1).view(np.uint32) >> 16
    assert disagreeing(compared, [a.astype(np.uint16) for a in (bits, bits + 64, bits)]) == {
        "a": frozenset({1})
    }


def test_candidates_are_one_file(made: tuple[Path, Emulating]) -> None:
    path, _ = made
    assert [file.name for file in path.parent.iterdir()] == ["block.bundle"]
    steps = read_metadata(path)["steps"]
    rivals: dict[str, list[Any]] = {}
    for step in steps:
        if step["rival"] is not None:
            rivals.setdefault(step["key"], []).append(step)
    assert len(rivals) > 2
    for of in rivals.values():
        numbers = [step["rival"] for step in of]
        assert numbers == [*range(len(of) - 1), 0] and 2 <= len(of) - 1 <= PER_STAGE
        assert of[0]["kernel"] == of[-1]["kernel"]
        schedules = [json.dumps(step["schedule"]) for step in of[:-1]]
        assert len(set(schedules)) == len(schedules)
        predicted = [step["predicted_seconds"] for step in of[:-1]]
        assert predicted == sorted(predicted)


def test_kernels_run_without_a_fault(driver: FakeDriver, made: tuple[Path, Emulating]) -> None:
    path, workers = made
    driver.reset(1, 8, 0, 1)
    found = measure(path, rounds=2)
    assert not (faults := faults_of(workers.path.resolve())), "\n".join(faults)
    assert found and all(record.outcome == "noisy" for record in found)  # two rounds tell nothing
    driver.check()


def test_measuring_needs_a_driver_alone(
    driver: FakeDriver, made: tuple[Path, Emulating], tmp_path: Path
) -> None:
    """Then the answers are imported, and a compile follows them."""
    answers, base = tmp_path / "answers.jsonl", tmp_path / "gpu.records"
    library = Path(driver.library)
    environment = {**os.environ, "PATH": "", "LD_LIBRARY_PATH": str(library.parent)}
    command = [sys.executable, "-c", ALONE, str(library), str(made[0]), "-o", str(answers)]
    done = subprocess.run(
        [*command, "--rounds", "8"], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    found = from_lines(answers.read_text(), "answers")
    known = json.loads(found[0].circumstances)
    assert known["gpu"] == "Fake GPU 0 (sm_80)" and known["target"] == TARGET
    assert main(["records", "import", str(base), str(answers)]) == 0
    with Records(base) as imported:
        assert imported.all() == found


def answered(path: Path, best: int, gpu: str = "Some GPU") -> str:
    """Answers in which the candidate of this number takes half the time of the first one, for each
    stage.
    """
    from gtco.search.records.records import gpu_circumstances

    metadata = read_metadata(path)
    steps = metadata["steps"]
    readings = np.full((20, len(steps)), 1e-5)
    readings[:, [step["rival"] == best for step in steps]] = 5e-6
    return to_lines(records(steps, readings, gpu_circumstances(metadata, gpu)))


def test_a_compile_follows_the_answers(made: tuple[Path, Emulating], tmp_path: Path) -> None:
    (tmp_path / "answers.jsonl").write_text(answered(made[0], best=1))
    base = tmp_path / "gpu.records"
    assert main(["records", "import", str(base), str(tmp_path / "answers.jsonl")]) == 0
    _, plain, _ = prepared(tmp_path, model(), None, TARGET, precision="fp16")
    wanted = {
        step["key"]: step["schedule"]
        for step in read_metadata(made[0])["steps"]
        if step["rival"] == 1
    }
    options = CompileOptions(target=TARGET, precision="fp16", records=base)
    with Records(base) as kept:
        run = Compilation(model(), tmp_path / "model.so", None, options, silent)
        workers: Any = Emulating(tmp_path / "more.so")
        built = run.generate(run.to_stages(gpu_target(TARGET), kept), workers)
        other = Compilation(model(), tmp_path / "model.so", None, options, silent)
        other.to_stages(gpu_target("cuda:sm_90a"), kept)
    choices = built.generated.choices
    followed = {key: pick.config.to_json() for key, pick in choices.items() if key in wanted}
    assert followed and followed == {key: wanted[key] for key in followed}
    assert any(
        plain.generated.choices[key].config.to_json() != config
        for key, config in followed.items()
        if key in plain.generated.choices
    )
    some, every = len(followed), len(built.generated.choices)
    said = f"{some} of {every} different stages follow what {base} says of a Some GPU"
    assert any(note.startswith(said) for note in run.report.notes)
    assert any("holds nothing" in note for note in other.report.notes)  # of another target


def test_how_many_stages_follow_the_answers_is_said(
    made: tuple[Path, Emulating], tmp_path: Path
) -> None:
    found = from_lines(answered(made[0], best=1), "answers")
    base = tmp_path / "gpu.records"
    options = CompileOptions(target=TARGET, precision="fp16", records=base)
    other: bytes = block(tokens=3, width=64, heads=2).SerializeToString()
    with Records(base) as kept:
        kept.add(record for record in found if record.stage == found[0].stage)
        for source, said in (
            (model(), "1 of {} different stages follow what {} says of a Some GPU; the others'"),
            (other, "nothing of what {1} says of a Some GPU is of this model's stages"),
        ):
            run = Compilation(source, tmp_path / "model.so", None, options, silent)
            workers: Any = Emulating(tmp_path / f"{len(source)}.so")
            built = run.generate(run.to_stages(gpu_target(TARGET), kept), workers)
            (note,) = (note for note in run.report.notes if str(base) in note)
            assert note.startswith(said.format(len(built.generated.choices), base))


def test_records_of_two_gpus_are_not_mixed(made: tuple[Path, Emulating], tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).write_text(answered(made[0], best=1, gpu=f"GPU {name}"))
    base = tmp_path / "gpu.records"
    assert main(["records", "import", str(base), *(str(tmp_path / n) for n in ("one", "two"))]) == 0
    options = CompileOptions(target=TARGET, precision="fp16", records=base)
    run = Compilation(model(), tmp_path / "model.so", None, options, silent)
    with Records(base) as kept, pytest.raises(RecordError, match=r"one and of GPU two.*import"):
        run.to_stages(gpu_target(TARGET), kept)


@pytest.mark.parametrize("command", ["run", "inspect", "inspect --no-profile"])
def test_a_bundle_is_for_gtco_measure_alone(
    made: tuple[Path, Emulating], capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert main([*command.split(), str(made[0])]) == 1
    assert "is a bundle of candidates, which gtco measure times" in capsys.readouterr().err
    with pytest.raises(ArtifactError, match="is a bundle of candidates"):
        load(made[0])


def test_what_is_no_bundle_is_not_measured(
    made: tuple[Path, Emulating], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, content in (("model.onnx", model()), ("empty.bundle", b"")):
        (tmp_path / name).write_bytes(content)
        assert main(["measure", str(tmp_path / name)]) == 1
        said = capsys.readouterr().err
        assert "is not a bundle of candidates" in said and "'gtco candidates'" in said
    before = made[0].read_bytes()
    assert main(["measure", str(made[0]), "-o", str(made[0])]) == 1
    assert "is what is measured itself" in capsys.readouterr().err
    assert made[0].read_bytes() == before


def test_what_is_wrong_is_said(
    driver: FakeDriver, small_gpu: Path, made: tuple[Path, Emulating], tmp_path: Path
) -> None:
    from gtco.compiler import candidates_to_file

    with pytest.raises(ArtifactError, match="is a compiled model, not a file of candidates"):
        measure(small_gpu, 2)
    with pytest.raises(OptionError, match="candidates are for another machine"):
        candidates_to_file(model(), tmp_path / "x.bundle")
    driver.reset(0, 8, 0, 1)
    with pytest.raises(ArtifactError):
        measure(made[0], 2)


def test_a_user_makes_candidates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With NVRTC, by the command."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "block.onnx").write_bytes(model())
    command = f"candidates {tmp_path}/block.onnx --target cuda:sm_80 --per-stage 2 --workers 1"
    assert main(command.split()) == 0
    assert "gtco measure block.bundle" in capsys.readouterr().out
    assert read_metadata(tmp_path / "block.bundle")["candidates"]["stages"] > 2


def test_weights_beside_a_bundle_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def written(model: Path, output: Path, **_: object) -> CompileReport:
        for name in (output.name, f"{output.name}.weights-0123456789abcdef"):
            (tmp_path / name).write_bytes(b"x" * 1000)
        return CompileReport()

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("gtco.compiler.candidates_to_file", written)
    assert main(f"candidates m.onnx --target {TARGET}".split()) == 0
    said = capsys.readouterr().out
    assert "m.bundle (" in said and " and m.bundle.weights-0123456789abcdef (" in said


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ("model.onnx", "must end in .bundle"),  # the model itself
        ("vit.so", "must end in .bundle"),
        ("new/", "must end in .bundle"),
        ("a.bundle", "is a folder"),
        ("b.bundle", "is there already and is not a bundle that gtco made"),
        ("absent/a.bundle", "does not exist"),
        ("link.bundle", "is the model itself"),
        ("/proc/a.bundle", "cannot write"),
    ],
)
def test_what_is_no_place_for_candidates_is_said_at_once(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    output: str,
    reason: str,
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the work was begun")

    monkeypatch.setattr(Compilation, "to_stages", refuse)
    source = tmp_path / "model.onnx"
    source.write_bytes(model())
    (tmp_path / "vit.so").write_bytes(b"a library")
    (tmp_path / "a.bundle").mkdir()
    (tmp_path / "b.bundle").write_bytes(b"somebody's")
    (tmp_path / "link.bundle").symlink_to(source)
    command = ["candidates", str(source), "--target", TARGET, "--output", str(tmp_path / output)]
    assert main(command) == 1
    assert reason in capsys.readouterr().err
    assert source.read_bytes() == model() and (tmp_path / "vit.so").read_bytes() == b"a library"
    there = ["a.bundle", "b.bundle", "link.bundle", "model.onnx", "vit.so"]
    assert sorted(path.name for path in tmp_path.iterdir()) == there


def test_a_stage_has_rivals_or_there_is_nothing_to_measure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from gtco.compiler import candidates_to_file

    with pytest.raises(SystemExit) as exit:
        main(f"candidates m.onnx --target {TARGET} --per-stage 1".split())
    assert exit.value.code == 2
    assert "'1' is not a whole number of 2 or more" in capsys.readouterr().err
    with pytest.raises(OptionError, match="per_stage=1: give a whole number of 2 or more"):
        candidates_to_file(model(), tmp_path / "x.bundle", per_stage=1, target=TARGET)
