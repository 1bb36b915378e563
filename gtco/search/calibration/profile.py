"""This machine's table of rates. It is measured once (:mod:`gtco.search.calibration.measure`) and
kept in the user's cache folder (``GTCO_CACHE``), under a key of everything that it depends on.

If the machine cannot be measured, because memory or time is short, there is no table, and the
constants of the target are used. It is tried again when others are not busy, or some minutes later.

A table that was measured beside busy processes is wrong: a barrier takes ten times as long, and
the rates are too low, each by another factor. So the file says which share of the CPUs the others
had. A later process in which they clearly have less measures again, a few times at most.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tvm

from gtco.machine.load import share_of_others
from gtco.machine.target import Target, cpu_identity
from gtco.search.calibration.measure import MachineRates, NotMeasured, handed_levels, measure
from gtco.search.calibration.rates import WORK, RateTable
from gtco.support.cache_file import write_cache_file
from gtco.support.environment import cache_folder
from gtco.support.version import __version__
from gtco.tensor.intrinsics.table import every_micro_kernel

VERSION = 18  # the version of the cached file
# No machine is outside these bounds: vector operations and bytes per second of one core, and
# seconds of a barrier.
RATE_BOUNDS, BANDWIDTH_BOUNDS = (1e6, 1e11), (1e6, 1e14)
LAUNCH_BOUNDS = (0.0, 1e-2)
OTHERS_BOUNDS = (0.0, 1.0)
# A table is measured again if others had at least this share of the CPUs, and now have less than
# half of what they had. Rounds of a measurement find the idle moments of a smaller share. Where
# others come and go all the time, some tries are enough: each takes seconds of a compile.
BUSY, SAMPLE_SECONDS = 0.2, 0.2
MOST_TIMES = 3
TIMES_BOUNDS = (1, MOST_TIMES)
LATER = 600.0  # seconds after a failure in which no compile measures while others are busy


@dataclass(frozen=True)
class MachineTable:
    """The table of a machine.

    - ``rates``: None if the machine could not be measured;
    - ``note``: tells the user that it could not be measured, or that the table could not be kept.
    """

    rates: RateTable | None
    note: str = ""


_unkept: dict[Path, MachineTable] = {}  # tables of this process that could not be cached
_again: dict[Path, bool] = {}  # whether this process measures again what is cached


def machine_table(target: Target, say: Callable[[str], None] = lambda what: None) -> MachineTable:
    """This machine's table: the cached one, or a new measurement that is then cached. ``say``
    receives the progress.
    """
    path, before = _path(target), cached_rates(target)
    if before is not None and not _measures_again(path, before):
        return MachineTable(table_of(target, before))
    if before is None and (failed := _failed(path, machine_key(target))):
        return MachineTable(None, failed)
    if path not in _unkept:
        _again[path] = False
        try:
            measured = measure(target, say)
        except (NotMeasured, OSError) as why:  # OSError: no threads can be started
            if before is not None:
                return MachineTable(table_of(target, before))
            note = (
                f"this machine was not measured: {why}. Kernels are chosen by the constants of "
                f"{target.mcpu}; a later compile measures again"
            )
            if save(path, {"key": machine_key(target), "failed": note, "at": time.time()}):
                _unkept[path] = MachineTable(None, note)
            return MachineTable(None, note)
        if before is not None:
            better = measured if measured.others < before.others else before
            measured = replace(better, times=before.times + 1)
        table = table_of(target, measured)
        told = {"others": measured.others, "times": measured.times}
        if wrong := save(path, _as_json(table, machine_key(target)) | told):
            note = "the measurements of this machine are not kept: each process measures again"
            _unkept[path] = MachineTable(table, f"{note}. {wrong}")
        else:
            return MachineTable(table)
    return _unkept[path]


def known(target: Target) -> bool:
    """True if :func:`machine_table` has a table without measuring."""
    path, before = _path(target), cached_rates(target)
    if before is not None:
        return path in _unkept or not _measures_again(path, before)
    return path in _unkept or bool(_failed(path, machine_key(target)))


def _failed(path: Path, key: Mapping[str, Any]) -> str:
    """The note of a process that failed to measure the machine a short time ago; "" if none did, or
    if other processes are not busy now. This process reads how busy they are only once.
    """
    try:
        data = json.loads(path.read_text())
        recent = 0 <= time.time() - float(data["at"]) < LATER
        if not recent or data["key"] != key:
            return ""
        note = str(data["failed"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return ""
    if path not in _again:
        _again[path] = share_of_others(SAMPLE_SECONDS) < BUSY
    return "" if _again[path] else note


def _measures_again(path: Path, before: MachineRates) -> bool:
    """Whether others had much of the CPUs when this was measured, and have clearly less now. Each
    process asks once. A file that cannot be replaced stays.
    """
    if path not in _again:
        busy = before.others >= BUSY and before.times < MOST_TIMES
        busy = busy and os.access(path.parent, os.W_OK)
        _again[path] = busy and share_of_others(SAMPLE_SECONDS) < before.others / 2
    return _again[path]


def cached(target: Target) -> RateTable | None:
    """The cached table of this machine; None if there is none (:func:`cached_rates`)."""
    measured = cached_rates(target)
    return None if measured is None else table_of(target, measured)


def cached_rates(target: Target) -> MachineRates | None:
    """The cached measurements of this machine. None if there are none, or if the file is damaged,
    was measured under other circumstances, or holds impossible values.
    """
    try:
        data = json.loads(_path(target).read_text())
        if data["key"] != machine_key(target):
            return None
        names = {*(tile.kernel for tile in every_micro_kernel(target)), *WORK}
        rates = _checked(data["rates"], names, RATE_BOUNDS)
        bandwidths = _checked(data["bandwidths"], {m.name for m in target.memory}, BANDWIDTH_BOUNDS)
        between = _checked({"launch": data["launch"]}, {"launch"}, LAUNCH_BOUNDS)
        handed, kept = (
            _checked(data[name], handed_levels(target), BANDWIDTH_BOUNDS)
            for name in ("handed", "kept")
        )
        others = _checked({"others": data["others"]}, {"others"}, OTHERS_BOUNDS)
        times = int(_checked({"times": data["times"]}, {"times"}, TIMES_BOUNDS)["times"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    return MachineRates(rates, bandwidths, between["launch"], handed, kept, others["others"], times)


def _checked(
    values: Mapping[str, Any], names: set[str], bounds: tuple[float, float]
) -> dict[str, float]:
    """The values, if each name has a number within the bounds; else raises ``ValueError``."""
    if values.keys() != names:
        raise ValueError("its names are not those that this version measures")
    for value in values.values():
        if type(value) not in (int, float) or not bounds[0] <= value <= bounds[1]:
            raise ValueError(f"{value!r} cannot be")
    return {name: float(value) for name, value in values.items()}


def machine_key(target: Target) -> dict[str, Any]:
    """Everything that a table depends on. The target holds features, cores and caches."""
    return {
        "version": VERSION,
        "gtco": __version__,
        "tvm": tvm.__version__,
        "cpu": cpu_identity(),
        "target": target.to_json(),
    }


def table_of(target: Target, measured: MachineRates) -> RateTable:
    memory = tuple(replace(m, bandwidth=measured.bandwidths[m.name]) for m in target.memory)
    products = [rate for name, rate in measured.rates.items() if name.startswith("fma:")]
    frequency = max(products) / target.fma_ports
    known = replace(target, memory=memory, frequency=frequency)
    rates, handed, kept = (
        tuple(sorted(x.items())) for x in (measured.rates, measured.handed, measured.kept)
    )
    return RateTable(known, rates, measured.launch, handed, kept)


# the cached file ----------------------------------------------------------------------------------
def _path(target: Target) -> Path:
    return cache_file(f"rates-{target.mcpu}", machine_key(target))


def cache_file(name: str, key: Mapping[str, Any]) -> Path:
    """The path of a cached file. Each key has its own, so machines, or settings of one machine, may
    share the folder.
    """
    text = json.dumps(key, sort_keys=True).encode()
    return cache_folder() / f"{name}-{hashlib.sha256(text).hexdigest()[:16]}.json"


def _as_json(table: RateTable, key: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "key": key,
        "rates": dict(table.measured),
        "bandwidths": {m.name: m.bandwidth for m in table.target.memory},
        "launch": table.launch,
        "handed": dict(table.handed),
        "kept": dict(table.kept),
    }


def table_json(table: RateTable, target: Target) -> dict[str, Any]:
    """The table of this machine, for :func:`table_from_json` on any machine. ``target`` is the one
    that was measured.
    """
    return _as_json(table, machine_key(target))


def table_from_json(data: Mapping[str, Any]) -> RateTable:
    """The table of the machine on which :func:`table_json` was called."""
    between = data["handed"], data.get("kept", {})  # a table of another time has no ``kept``
    measured = MachineRates(data["rates"], data["bandwidths"], data["launch"], *between)
    return table_of(Target.from_json(data["key"]["target"]), measured)


def save(path: Path, data: Mapping[str, Any]) -> str:
    """Writes a cached file as a whole. Returns what went wrong and what to do about it, or ""."""
    try:
        write_cache_file(path, json.dumps(data, indent=1).encode())
    except OSError as error:
        return (
            f"The folder {path.parent} cannot be written ({error.strerror or error}): set "
            "GTCO_CACHE to one that can be"
        )
    return ""
