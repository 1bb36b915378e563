"""Writes a table of rates that is wrong, into a cache folder: each rate of this machine times a
factor that is drawn.

A table that is measured beside other processes is wrong like that. No test may depend on the
picks that follow from one; :func:`tests.by_constants.by_constants` is for those that count kernels.

    python -m tests.wrong_rates SEED FOLDER
    GTCO_CACHE=FOLDER python -m pytest tests
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

from gtco.machine.target import cpu_target
from gtco.search.calibration import profile

# The spread of the factors' logarithms, of the speeds of kernels and of memory. Factors of the
# barrier between stages, which other processes make ten times as long.
KERNELS, MEMORY, BARRIERS = 0.25, 0.5, (1.0, 10.0, 50.0)


def main() -> None:
    seed, folder = int(sys.argv[1]), Path(sys.argv[2])
    machine, draw = cpu_target(), random.Random(seed)
    table = profile.machine_table(machine, print)
    if table.rates is None:
        sys.exit(table.note)
    data = profile.table_json(table.rates, machine)
    spread = {"rates": KERNELS, "bandwidths": MEMORY, "handed": MEMORY, "kept": MEMORY}
    for part, sigma in spread.items():
        data[part] = {k: v * draw.lognormvariate(0, sigma) for k, v in data[part].items()}
    data["launch"] *= draw.choice(BARRIERS)
    # measured often enough: no process measures again
    data |= {"others": 0.0, "times": profile.MOST_TIMES}
    os.environ["GTCO_CACHE"] = str(folder)
    path = profile.cache_file(f"rates-{machine.mcpu}", profile.machine_key(machine))
    if wrong := profile.save(path, data):
        sys.exit(wrong)
    if profile.cached(machine) is None:
        sys.exit(f"{path} is not read as a table of this machine")
    print(path)


if __name__ == "__main__":
    main()
