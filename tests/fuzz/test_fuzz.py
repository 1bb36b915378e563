"""Mutated models and libraries: each works or is refused with a GtcoError, without a crash, a
traceback or a hang. ``make check-fuzz`` runs it for minutes with a new seed, which it prints.
"""

from __future__ import annotations

import json
import random
import select
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import onnx
import pytest

from gtco.compiler import compile_to_file
from gtco.runtime.publish import weights_beside
from tests.fuzz.models import SEEDS
from tests.fuzz.mutate import mutated_library, mutated_model

PATIENCE = 300  # seconds after which a trial hangs; most take less than one


@dataclass
class Trials:
    """A child process that tries files; it is replaced if one ends it."""

    root: Path
    child: subprocess.Popen[str] | None = None
    outcomes: Counter[str] = field(default_factory=Counter)

    def __call__(self, path: Path, simplify: bool = False) -> tuple[str, str]:
        if self.child is None:
            self.child = subprocess.Popen(
                [sys.executable, "-m", "tests.fuzz.trial"],
                cwd=self.root,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                start_new_session=True,
            )
        assert self.child.stdin and self.child.stdout
        self.child.stdin.write(json.dumps({"path": str(path), "simplify": simplify}) + "\n")
        self.child.stdin.flush()
        ready, _, _ = select.select([self.child.stdout], [], [], PATIENCE)
        line = self.child.stdout.readline() if ready else ""
        if line:
            said = json.loads(line)
            outcome, text = said["outcome"], said["text"]
        elif ready:
            code = self.child.wait()
            outcome, text = "crash", signal.Signals(-code).name if code < 0 else f"exit {code}"
        else:
            outcome, text = "hang", f"over {PATIENCE} s"
        if not line:
            self.close()
        self.outcomes[outcome] += 1
        return outcome, text

    def close(self) -> None:
        if self.child is not None:
            self.child.kill()
            self.child.communicate()
            self.child = None


@pytest.fixture
def trials(root: Path) -> Iterator[Trials]:
    made = Trials(root)
    yield made
    made.close()


def faults(
    trials: Trials, folder: Path, seed: int, numbers: Iterator[int], libraries: list[Path]
) -> list[str]:
    """Runs trial after trial; gives the faults, with the files that caused them."""
    models = [make() for make in SEEDS]
    place = folder / "trial"
    found = []
    for number in numbers:
        rng = random.Random(f"{seed}:{number}")
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        simplify = False
        if libraries and number % 4:  # a library takes a hundredth of a model's time
            source = rng.choice(libraries)
            path = place / "m.so"
            weights = weights_beside(source)
            path.write_bytes(source.read_bytes())
            damaged = path
            for file in weights:
                copy = place / (path.name + file.name.removeprefix(source.name))
                copy.write_bytes(file.read_bytes())
                damaged = rng.choice((path, copy))
            damaged.write_bytes(mutated_library(damaged.read_bytes(), rng))
        else:
            path = place / "m.onnx"
            path.write_bytes(mutated_model(rng.choice(models), rng))
            simplify = rng.random() < 0.1
        outcome, text = trials(path, simplify)
        if outcome not in ("works", "refused"):
            kept = folder / f"trial-{seed}-{number}{path.suffix}"
            shutil.copy(path, kept)
            found.append(f"seed {seed}, trial {number} ({kept}): {outcome}: {text}")
            print(found[-1])
    return found


@pytest.fixture
def libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A library with its weights inside, and one with its weights beside it."""
    from gtco.runtime.writing import linking

    made = []
    for number, limit in enumerate((10**9, 0)):
        build = linking.build_artifact
        monkeypatch.setattr(
            "gtco.driver.linking.finishing.build_artifact",
            lambda *given, limit=limit, build=build: build(*given, weights_inside_limit=limit),
        )
        made.append(tmp_path / f"library{number}.so")
        compile_to_file(SEEDS[0](), made[-1], target="x86-64-v3", threads=1)
    return made


def test_the_models_themselves_work(trials: Trials, tmp_path: Path) -> None:
    for number, make in enumerate(SEEDS):
        onnx.save(make(), tmp_path / f"{number}.onnx")
        assert trials(tmp_path / f"{number}.onnx") == ("works", "")


def test_some_mutations(trials: Trials, tmp_path: Path, libraries: list[Path]) -> None:
    found = faults(trials, tmp_path, 0, iter(range(80)), libraries)
    assert not found, "\n".join(found)
    assert trials.outcomes["works"] and trials.outcomes["refused"]


@pytest.mark.scheduled
def test_mutations(
    trials: Trials, tmp_path: Path, libraries: list[Path], request: pytest.FixtureRequest
) -> None:
    seed = request.config.getoption("--fuzz-seed", default=None)
    seed = random.SystemRandom().randrange(2**32) if seed is None else seed
    end = time.monotonic() + request.config.getoption("--fuzz-seconds", default=240)
    only = request.config.getoption("--fuzz-trial", default=None)
    print(f"\nseed {seed}")

    def numbers() -> Iterator[int]:
        number = 0
        while time.monotonic() < end:
            yield number
            number += 1

    found = faults(trials, tmp_path, seed, numbers() if only is None else iter([only]), libraries)
    print(f"seed {seed}: {dict(trials.outcomes)}")
    assert not found, "\n".join(found)
