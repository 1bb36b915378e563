"""``python -m bench helix``: its products and convolutions, and its table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnxruntime
import pytest

from bench.harness.process import WorkerError
from bench.kernels import helix, helix_systems
from bench.kernels.helix import Case, Reading


@pytest.mark.parametrize(
    "kind, count, groups",
    [("products", 1213, set(helix.GROUPS)), ("convolutions", 1318, {"cnn", "deepbench"})],
)
def test_cases_are_those_of_the_paper_but_for_large_ones_that_are_sampled(
    kind: str, count: int, groups: set[str]
) -> None:
    with Path(helix.__file__).with_name(helix.SHAPES[kind]).open() as file:
        assert len(file.readlines()) - 1 == count
    every = helix.cases(kind)
    assert len(set(every)) == len(every) < count
    assert {case.group for case in every} == groups
    assert all(case.group == "cnn" for case in helix.cases(kind, ["cnn"], 5))
    assert helix.cases(kind, sample=20) == every[:20]
    assert 1 <= sum(case.flops > helix.LARGE for case in every) <= count // helix.EVERY


def test_a_convolution_is_the_product_of_its_windows() -> None:
    one = Case((2, 5, 9, 11, 7, 3, 4, 2, 1), "cnn")
    assert one.product == (2 * 5 * 5, 7, 3 * 4 * 5) and one.flops == 2 * 50 * 7 * 60
    x, (w, *_) = helix_systems.operands(one.sizes, 2)
    assert x.shape == (2, 9, 11, 5) and w.shape == (3, 4, 5, 7)


def test_a_wrong_pixel_is_seen() -> None:
    sizes = (1, 3, 6, 6, 4, 3, 3, 1, 1)
    x, (w,) = helix_systems.operands(sizes, 1)
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (1, 2))
    y = np.einsum("bhwcij,ijcn->bhwn", windows, w)
    c = helix_systems.convolution_of(sizes)
    helix_systems.checked_pixels(c, x, w, y)
    y[0, 0, 0, 1] += 0.1
    with pytest.raises(ValueError, match="wrong"):
        helix_systems.checked_pixels(c, x, w, y)


def test_a_reading_is_a_line() -> None:
    seconds = {"gtco": 1e-6, "onednn": 2e-6, "onnxruntime": 3e-6}
    one = Reading(Case((1, 2, 3), "cnn"), seconds, choice=2e-9)
    assert Reading.from_json(json.loads(json.dumps(one.to_json()))) == one
    assert "takes 0.20% of a run" in helix.choices([one])


class Stub:
    """A worker, or gtco's library, that is only ended."""

    made: ClassVar[list[Stub]] = []

    def __init__(self, *_: Any) -> None:
        self.ended = False
        self.made.append(self)

    def kill(self) -> None:
        self.ended = True

    close = kill


def test_a_worker_that_fails_costs_its_case_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After it all workers are new, because one may have ended or may still answer that case. A
    run goes on where the file ends, even if its last line was cut off.
    """
    (tmp_path / "products.so").touch()
    monkeypatch.setattr(Stub, "made", [])
    for name in ("Worker", "Products"):
        monkeypatch.setattr(helix, name, Stub)
    monkeypatch.setattr(helix, "compile_products", lambda _: tmp_path / "products.so")
    monkeypatch.setattr(helix.helix_picks, "choosing", lambda *_: 1e-9)
    wanted, timed = helix.cases(sample=4), []

    def read(case: Case, workers: dict[str, Any], *_: Any) -> Reading:
        assert not any(worker.ended for worker in workers.values())
        timed.append(case)
        if case == wanted[1]:
            raise WorkerError("no answer in 300 s")
        return Reading(case, dict.fromkeys(helix.SYSTEMS, 1e-6))

    monkeypatch.setattr(helix, "read", read)
    out = tmp_path / "readings.jsonl"
    assert helix.main(["--sample", "4", "--out", str(out)]) == 0
    assert timed == wanted and all(stub.ended for stub in Stub.made)
    kept = [wanted[0], *wanted[2:]]
    assert [reading.case for reading in helix.load(out)] == kept
    out.write_text(out.read_text()[:-9])
    timed.clear()
    helix.main(["--sample", "4", "--out", str(out)])
    assert timed == [wanted[1], wanted[3]]
    assert [reading.case for reading in helix.load(out)] == kept


@pytest.mark.parametrize("sizes", [(4, 5, 6), (1, 3, 6, 6, 4, 3, 3, 1, 1)])
def test_threads_of_other_copies_do_not_spin(
    sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    made = onnxruntime.InferenceSession

    def session(model: bytes, options: Any, **more: Any) -> Any:
        asked.append(options.get_session_config_entry("session.force_spinning_stop"))
        return made(model, options, **more)

    monkeypatch.setattr(onnxruntime, "InferenceSession", session)
    job = {"sizes": sizes, "copies": 2, "threads": 1}
    system = helix_systems.open_onnxruntime(job)
    system.call()
    assert asked == ["1", "1"]


def test_large_products_count_for_those_that_are_left_out() -> None:
    small, large = Case((1, 2, 3), "cnn"), Case((10**4, 10**4, 10**3), "cnn")
    assert large.flops > helix.LARGE
    readings = [
        Reading(small, {"gtco": 1.0, "onednn": 4.0, "onnxruntime": 4.0}),
        Reading(large, {"gtco": 1.0, "onednn": 0.5, "onnxruntime": 1.0}),
    ]
    rows = {line.split(" | ")[0].strip("| "): line for line in helix.table(readings).splitlines()}
    assert "| 4.00 | 100% |" in rows["cnn"] and "| 0.50 | 0% |" in rows["cnn, large"]
    mean = (4.0 * 0.5**helix.EVERY) ** (1 / (helix.EVERY + 1))
    ahead = 1 / (helix.EVERY + 1)
    assert f"| {mean:.2f} | {ahead:.0%} |" in rows["all"]


@pytest.mark.parametrize("bytes_of_one, copies", [(64e6, 1), (1e9, 1), (16e6, 4), (4.0, 8)])
def test_large_weights_have_fewer_copies(bytes_of_one: float, copies: int) -> None:
    assert Case((1, round(bytes_of_one / 4), 1), "cnn").copies == copies
