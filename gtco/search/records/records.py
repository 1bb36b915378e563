"""Records: every candidate that was measured, a row each, in one SQLite file. A row is never
changed and never lost.

Several processes may write to the file, and may be killed at any moment: each trial of a stage is
one transaction. A record is found by the stage's program and by its *circumstances*: the machine,
target, thread count and versions that it was measured with. Records of other circumstances are
kept and shown, and never applied. As text, a file is a line of JSON for each record.

The outcome of a candidate is one word:

- ``kept``: the pick was compared with rivals and none beat it;
- ``taken``: the candidate beat the pick and became the pick;
- ``beaten``: it was the pick until the one that is ``taken`` beat it;
- ``slower``: it was no faster than the pick;
- ``noisy``: the machine was too noisy, or the time too short, to compare it;
- ``wrong``: it computed something else than the pick;
- ``failed``: it could not be built or run;
- ``chosen``: when the tuning of a model ended, the model had this stage with this config. Each
  stage of the model gets such a row, whether it was timed or not.

A config *stands* if its newest outcome is ``kept``, ``taken`` or ``chosen`` and it was never
``wrong``. The rows ``chosen`` of one model at one time are an *end*: what that tuning cut the model
into.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from math import inf
from os.path import exists, isdir
from pathlib import Path
from typing import Any, Literal, get_args

from gtco.machine.target import Machine, cpu_identity, cpu_target
from gtco.support.errors import RecordError
from gtco.support.version import __version__
from gtco.tensor.space import Config, Pick
from gtco.tensor.stage import Stage

APPLICATION, VERSION = 0x6774636F, 1  # "gtco"; version of the table below
WAIT_SECONDS = 30.0  # seconds of waiting for another writer
Outcome = Literal["kept", "taken", "beaten", "slower", "noisy", "wrong", "failed", "chosen"]
STANDING = ("kept", "taken", "chosen")
COLUMNS = {
    "stage": "TEXT NOT NULL",
    "label": "TEXT NOT NULL",
    "circumstances": "TEXT NOT NULL",
    "config": "TEXT NOT NULL",
    "outcome": "TEXT NOT NULL",
    "predicted": "REAL",
    "seconds": "REAL",
    "ratio": "REAL",
    "noise": "REAL",
    "reason": "TEXT NOT NULL",
    "time": "TEXT NOT NULL",
    "machine": "TEXT NOT NULL DEFAULT ''",
}
# How lines begin of records, and of the programs of stages, in a text (its keys are in order).
LINES = (b'{"circumstances": ', b'{"program": ')
LATER = ("machine",)  # columns that files and texts from before do not have
STAGES = "stages (key TEXT PRIMARY KEY, stage TEXT NOT NULL)"  # what they compute, as JSON


@dataclass(frozen=True)
class Record:
    """One candidate of one stage.

    ``stage`` is the stage's key, ``label`` its operators; ``config`` the JSON of a
    :class:`~gtco.tensor.space.Config`; ``predicted`` the policy's seconds; ``seconds`` the median
    of its readings; ``ratio`` the median of its time over the pick's time in the same round;
    ``noise`` the difference between two readings of the pick, as a share. These three are None if
    it was not timed. ``reason`` says why a candidate failed. In a row ``chosen`` it is the key of
    the model (:attr:`~gtco.graph.graph.Graph.key`), and empty in rows from before models had keys.
    The rows of one end have the same ``time``. ``machine`` says which machine of a farm measured
    it, as the JSON of a :class:`gtco.machine.identity.Identity`; it is empty if the machine that
    compiled did.
    """

    stage: str
    label: str
    circumstances: str
    config: str
    outcome: Outcome
    predicted: float | None = None
    seconds: float | None = None
    ratio: float | None = None
    noise: float | None = None
    reason: str = ""
    time: str = ""
    machine: str = ""

    @staticmethod
    def of(
        stage: Stage,
        pick: Pick,
        circumstances: str,
        outcome: Outcome,
        measured: tuple[float | None, float | None, float | None] = (None, None, None),
        reason: str = "",
        machine: str = "",
    ) -> Record:
        """A record of a pick, made now; ``measured`` is its seconds, ratio and noise."""
        config = json.dumps(pick.config.to_json())
        return Record(
            stage.key,
            stage.label,
            circumstances,
            config,
            outcome,
            pick.seconds,
            *measured,
            reason,
            now(),
            machine,
        )

    @property
    def parsed(self) -> Config:
        """The config; raises :class:`RecordError` if the text is not a config."""
        try:
            config = Config.from_json(_object(self.config))
            hash(config)  # not of lists
        except TypeError as error:
            raise RecordError(f"a record's config is none: {self.config[:200]!r}") from error
        return config

    @property
    def known(self) -> dict[str, Any]:
        """The circumstances; raises :class:`RecordError` if the text is not a JSON object."""
        return _object(self.circumstances)


def circumstances(machine: Machine) -> str:
    """What a reading depends on besides the stage, as JSON: the CPU, the instruction sets and
    algorithms that code may use, the number of threads, and the versions.
    """
    target = cpu_target(machine)
    known = {
        "cpu": dict(target.cpu) or cpu_identity(),
        "mcpu": target.mcpu,
        "features": list(target.features),
        "threads": target.cores,
        "gtco": __version__,
        "tvm": version("apache-tvm"),
        **({} if target.fast_algorithms else {"fast_algorithms": False}),
    }
    return json.dumps(known, sort_keys=True)


def cpu_known(metadata: Mapping[str, Any]) -> str:
    """The circumstances of this CPU, from the ``metadata`` of a library that was measured here and
    made elsewhere.
    """
    target = metadata["target"]
    known = {
        "cpu": cpu_identity(),
        "mcpu": target["mcpu"],
        "features": target["features"],
        "threads": target["cores"],
        **{name: metadata[name] for name in ("gtco", "tvm")},
        **{name: target[name] for name in ("fast_algorithms",) if name in target},
    }
    return json.dumps(known, sort_keys=True)


def measured_cpu(records: Records, machine: Machine) -> str:
    """The circumstances of the CPU elsewhere that ``records`` were measured on, for this target,
    its number of threads and these versions; "" if there is none. Raises :class:`RecordError` if
    there are several.
    """
    wanted = _object(circumstances(machine))
    found = {}
    for known in records.circumstances():
        own = _object(known)
        if "cpu" in own and {**own, "cpu": wanted["cpu"]} == wanted and own["cpu"] != wanted["cpu"]:
            found[json.dumps(own["cpu"])] = known
    if len(found) > 1:
        raise RecordError(
            f"{records.path} holds measurements of several CPUs for this target: give a file that "
            "has those of one, as gtco records import makes of that machine's answers alone"
        )
    return next(iter(found.values()), "")


def gpu_circumstances(metadata: Mapping[str, Any], gpu: str) -> str:
    """The circumstances of a GPU with this name, from the ``metadata`` of the library that was
    measured there.
    """
    known = {
        "gpu": gpu,
        "target": metadata["target"]["name"],
        **{name: metadata[name] for name in ("gtco", "tvm", "nvrtc")},
    }
    return json.dumps(known, sort_keys=True)


def measured_gpu(records: Records, metadata: Mapping[str, Any]) -> str:
    """The circumstances of the GPU that ``records`` were measured on with the target and versions
    of ``metadata``; "" if there is no such GPU. Raises :class:`RecordError` if there are several,
    because the user must say which one is meant.
    """
    found = {}
    for known in records.circumstances():
        gpu = _object(known).get("gpu")
        if gpu is not None and known == gpu_circumstances(metadata, gpu):
            found[gpu] = known
    if len(found) > 1:
        raise RecordError(
            f"{records.path} holds measurements of {' and of '.join(found)} for this target: give "
            "a file that has those of one GPU, as gtco records import makes of that GPU's answers "
            "alone"
        )
    return next(iter(found.values()), "")


def now() -> str:
    """The moment, finely enough to tell apart two tunings that end one after the other."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


class Records:
    """A file of records, made where there is none. Opening a file that is there takes no lock and
    writes nothing, so it may be read-only, or in another writer's hands. With ``write`` something
    will be added, and it is an error now if nothing can be. Raises :class:`RecordError` where it is
    no such file, is of a newer version, is damaged, or cannot be read or written.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, create: bool = True, write: bool = False
    ) -> None:
        self.path = Path(path)
        if not create and not exists(self.path):
            raise RecordError(f"there is no file of records {self.path}")
        if str(path) != ":memory:" and (isdir(self.path) or not isdir(self.path.parent)):
            wrong = (
                "is a folder"
                if isdir(self.path)
                else "is in a folder that does not exist or may not be entered"
            )
            raise RecordError(f"the records {self.path} could not be opened: the path {wrong}")
        self._check_no_lines()
        with self._errors("opened"):
            self._base = sqlite3.connect(self.path, timeout=WAIT_SECONDS, isolation_level=None)
            try:
                self._prepare()
                if write:
                    # A transaction begins on a read-only file too; only the write fails there.
                    with self._transaction():
                        self._base.execute(f"PRAGMA user_version = {VERSION}")
            except BaseException:
                self._base.close()
                raise

    def _check_no_lines(self) -> None:
        """Raises :class:`RecordError` for a text of records, which users mistake for the file."""
        try:
            with self.path.open("rb") as file:
                begins = file.read(max(map(len, LINES)))
        except OSError:
            return  # SQLite says more
        if begins.startswith(LINES):
            raise RecordError(
                f"{self.path} is a text of records, as gtco measure and gtco records export write: "
                f"gtco records import {self.path.with_suffix('.records')} {self.path} makes a file "
                "of it that --records takes"
            )

    def _prepare(self) -> None:
        if self._empty():
            with self._transaction():
                if self._empty():  # still, now that no other process can fill it
                    columns = ", ".join(f"{name} {kind}" for name, kind in COLUMNS.items())
                    self._base.execute(f"CREATE TABLE records (id INTEGER PRIMARY KEY, {columns})")
                    self._base.execute("CREATE INDEX of_stage ON records (stage, circumstances)")
                    self._base.execute(f"PRAGMA application_id = {APPLICATION}")
                    self._base.execute(f"PRAGMA user_version = {VERSION}")
        if self._number("application_id") != APPLICATION:
            raise RecordError(f"{self.path} is an SQLite file of something else than gtco")
        if (written := self._number("user_version")) != VERSION:
            raise RecordError(
                f"{self.path} has version {written} of the format, this gtco reads {VERSION}: "
                "use the gtco that wrote it, and gtco records export to carry it over"
            )

    def _empty(self) -> bool:
        tables = self._base.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        return not tables and not self._number("user_version")

    def __enter__(self) -> Records:
        return self

    def __exit__(self, *_: object) -> None:
        self._base.close()

    def add(self, records: Iterable[Record]) -> None:
        """Adds all of these records, or none of them if this raises."""
        names = ", ".join(COLUMNS)
        marks = ", ".join("?" * len(COLUMNS))
        with self._errors("written"), self._transaction():
            for name in LATER:
                if name not in self._columns():
                    self._base.execute(f"ALTER TABLE records ADD COLUMN {name} {COLUMNS[name]}")
            self._base.executemany(
                f"INSERT INTO records ({names}) VALUES ({marks})",
                [tuple(asdict(record)[name] for name in COLUMNS) for record in records],
            )

    def remember(self, stages: Iterable[Stage]) -> None:
        """Keeps the programs of these stages, so that other models can use their records too."""
        rows = [(stage.key, json.dumps(stage.to_json())) for stage in stages]
        with self._errors("written"), self._transaction():
            self._base.execute(f"CREATE TABLE IF NOT EXISTS {STAGES}")
            self._base.executemany("INSERT OR IGNORE INTO stages VALUES (?, ?)", rows)

    def stages(self) -> dict[str, Stage]:
        """The kept stages that this version can read, by key."""
        with self._errors("read"):
            tables = "SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name = 'stages'"
            if not self._base.execute(tables).fetchone()[0]:
                return {}
            rows = list(self._base.execute("SELECT key, stage FROM stages ORDER BY key"))
        found = {}
        for key, text in rows:
            # The stages of another version may not be readable.
            with suppress(ValueError, TypeError, KeyError, AttributeError):
                stage = Stage.from_json(json.loads(text))
                if stage.key == key:
                    found[key] = stage
        return found

    def all(self) -> list[Record]:
        """Every record, in the order they were added."""
        return self._select("")

    def of(self, stage: str, circumstances: str) -> list[Record]:
        """The records of a stage under these circumstances, in the order they were added."""
        return self._select("WHERE stage = ? AND circumstances = ?", stage, circumstances)

    def under(self, circumstances: str) -> list[Record]:
        """All records under these circumstances, in the order they were added."""
        return self._select("WHERE circumstances = ?", circumstances)

    def circumstances(self) -> list[str]:
        """All circumstances that the file has records of, the oldest first."""
        query = "SELECT circumstances FROM records GROUP BY circumstances ORDER BY min(id)"
        with self._errors("read"):
            return [row[0] for row in self._base.execute(query)]

    def merge(self, records: Iterable[Record]) -> int:
        """Adds the records that the file does not have yet; gives their number."""
        known = set(self.all())
        new = [record for record in dict.fromkeys(records) if record not in known]
        self.add(new)
        return len(new)

    def _select(self, where: str, *values: str) -> list[Record]:
        with self._errors("read"):
            there = self._columns()
            wanted = ", ".join(n if n in there or n not in LATER else "''" for n in COLUMNS)
            query = f"SELECT {wanted} FROM records {where} ORDER BY id"
            rows = list(self._base.execute(query, values))
        try:
            return [checked(dict(zip(COLUMNS, row, strict=True))) for row in rows]
        except (ValueError, OverflowError) as error:
            raise RecordError(
                f"{self.path} is damaged: a row of it is not a record ({error}). Merge what is "
                "sound of older copies or exports into a new file"
            ) from error

    def _columns(self) -> set[str]:
        return {row[1] for row in self._base.execute("PRAGMA table_info(records)")}

    def _number(self, pragma: str) -> int:
        return int(self._base.execute(f"PRAGMA {pragma}").fetchone()[0])

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._base.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            if self._base.in_transaction:  # if the disk is full, SQLite has rolled back by itself
                self._base.execute("ROLLBACK")
            raise
        self._base.execute("COMMIT")

    @contextmanager
    def _errors(self, done: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            what = (
                f"the records {self.path} could not be {done}: {error}. What was in the file "
                "before is still there"
            )
            if "readonly" in str(error):
                what += (
                    ". A compile that measures nothing (--tune off) only reads it; to measure, "
                    "copy the file to a place that can be written"
                )
            raise RecordError(what) from error


def checked(data: Mapping[str, Any]) -> Record:
    """The record of these columns, or ValueError: texts are UTF-8, numbers finite and not negative.
    """
    found: dict[str, Any] = {}
    for name, kind in COLUMNS.items():
        value = data[name]
        if kind.startswith("TEXT"):
            right = isinstance(value, str) and value.encode() is not None
        elif right := value is None or (type(value) in (int, float) and 0 <= value < inf):
            value = None if value is None else float(value)
        if not right:
            raise ValueError(f"{name} cannot be {value!r}")
        found[name] = value
    if found["outcome"] not in get_args(Outcome):
        raise ValueError(f"outcome cannot be {found['outcome']!r}")
    return Record(**found)


def _object(text: str) -> dict[str, Any]:
    """The JSON object that a text of a record holds."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"a record's {text[:200]!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise RecordError(f"a record's {text[:200]!r} is not a JSON object")
    return value
