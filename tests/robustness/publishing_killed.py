"""``python -m tests.robustness.publishing_killed FOLDER SECONDS SEED``: a process publishes two
models alternately to one path. It is killed at a random moment, again and again. After each time
the path has one of the two models, complete.

FOLDER has one.so and two.so, with weights beside one and inside the other. Prints the number of
kills, and how often each model was found.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path

from gtco.runtime.module import load
from tests.runtime.test_models import example_inputs

NAMES = ("one.so", "two.so")


def publish_for_ever(folder: Path, target: Path, ready: int) -> None:
    models = [load(folder / name, threads=1) for name in NAMES]
    os.write(ready, b"r")
    while True:
        for model in models:
            model.save(target)


def found(folder: Path, target: Path) -> str:
    """The model whose outputs the library at ``target`` gives; its header must be one of the
    two.
    """
    inputs = example_inputs()
    with load(target, threads=1) as model:
        outputs = [y.tobytes() for y in model(*inputs)]
    headers = {(folder / name).with_suffix(".h").read_text() for name in NAMES}
    assert target.with_suffix(".h").read_text() in headers
    for name in NAMES:
        with load(folder / name, threads=1) as model:
            if outputs == [y.tobytes() for y in model(*inputs)]:
                return name
    raise AssertionError("neither model's outputs")


def main(folder: Path, seconds: float, seed: int) -> None:
    rng = random.Random(seed)
    target = folder / "out" / "m.so"
    target.parent.mkdir()
    begin = time.monotonic()
    for name in (NAMES[1], NAMES[0]):
        with load(folder / name, threads=1) as model:
            model.save(target)
    both = time.monotonic() - begin  # disks differ: each write must be cut short
    seen: Counter[str] = Counter()
    end = time.monotonic() + seconds
    while time.monotonic() < end or sum(seen.values()) < 20:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            publish_for_ever(folder, target, write)
        os.read(read, 1)
        time.sleep(rng.uniform(0, 2 * both))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(read)
        os.close(write)
        try:
            seen[found(folder, target)] += 1
        except Exception:
            print(
                f"seed {seed}, kill {sum(seen.values()) + 1}: {sorted(os.listdir(target.parent))}"
            )
            raise
    with load(folder / NAMES[0], threads=1) as model:
        model.save(target)
    print(sum(seen.values()), *(seen[name] for name in NAMES))


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
