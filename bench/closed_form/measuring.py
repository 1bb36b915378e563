"""Kernels of a product's candidates: built beforehand into a folder, and timed where nothing else
runs, so that a quiet machine is held for as long as timing takes and no longer.

The readings are those of ``bench readings`` (:mod:`bench.harness.readings`): times relative to the
product's first candidate, whose own readings stand at both ends of each round.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gtco.codegen.jobs import Job, Kernel
from gtco.codegen.processes import python
from gtco.codegen.workers import Workers
from gtco.machine.load import Others
from gtco.machine.target import Target
from gtco.runtime.publish import temporary
from gtco.runtime.writing.linking import write_artifact
from gtco.search.closed_form.products import Product
from gtco.support.errors import OptionError
from gtco.tensor.space import Pick
from gtco.tuning.local import LocalRunner
from gtco.tuning.measure import Timed
from gtco.tuning.runner import Budget
from gtco.tuning.timing import LEAST_ROUNDS
from gtco.tuning.trial import REPEATS, Trial, artifact

from ..harness.process import Worker
from .shapes import name_of, stage_of

ONEDNN = "gtco.bench.closed_form.onednn"
CANDIDATE = "candidate"  # the part of what no policy in question picked
SECONDS = 0.8  # of the readings of a product's candidates
QUIET = 0.05  # share of the cores that other processes may take meanwhile
CALLS_SECONDS = 0.15  # of oneDNN's calls before the candidates, and again after them


@dataclass(frozen=True)
class Built:
    """A product with its candidates as a trial, and each candidate's part: who picked it."""

    product: Product
    trial: Trial
    roles: tuple[str, ...]


def build(
    folder: Path,
    wanted: Iterable[tuple[Product, Sequence[tuple[str, Pick]]]],
    workers: Workers,
    target: Target,
    say: Callable[[str], None],
) -> None:
    """Builds the candidates of each product, which are given by role, and writes a file for the
    product in the folder. Kernels that the file has already are not built again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for product, candidates in wanted:
        file = file_of(folder, product)
        known = pickle.loads(file.read_bytes()) if file.exists() else None
        one = _with(known, product, candidates, workers, target)
        if one != known:
            whole = file.with_suffix(".part")
            whole.write_bytes(pickle.dumps(one))
            whole.rename(file)
            say(f"{name_of(product)}: {len(one.trial.picks)} candidates")


def file_of(folder: Path, product: Product) -> Path:
    return folder / f"{name_of(product).replace(' ', '_')}.pickle"


def _with(
    known: Built | None,
    product: Product,
    candidates: Sequence[tuple[str, Pick]],
    workers: Workers,
    target: Target,
) -> Built:
    """The product with these candidates beside those that were built before. What these picked
    keeps its part only if it is picked again, but for the first one.
    """
    picks = list(known.trial.picks) if known else []
    kernels = (
        dict(zip([p.config for p in picks], known.trial.kernels, strict=True)) if known else {}
    )
    distinct = {pick.config: pick for _, pick in candidates}
    new = [pick for config, pick in distinct.items() if config not in kernels]
    jobs = [Job(f"k_{p.config.key}", stage_of(product), p.config, target) for p in new]
    built = {k.symbol: k for k in workers.build(jobs) if isinstance(k, Kernel)}
    kernels |= {p.config: built[s] for p in new if (s := f"k_{p.config.key}") in built}
    picks += [pick for pick in new if pick.config in kernels]
    if not picks or (known is None and picks[0].config != candidates[0][1].config):
        raise OptionError(
            f"{name_of(product)}: its first candidate could not be built, and the others are "
            "compared with that one"
        )
    roles = {p.config: "" for p in picks}
    if known and any(known.roles):
        roles = {p.config: CANDIDATE for p in picks}
        roles[picks[0].config] = known.roles[0].split("+")[0]
    for config in roles:
        named = [role for role, pick in candidates if pick.config == config]
        first = [roles[config]] if known and config == picks[0].config else []
        roles[config] = "+".join(dict.fromkeys([*first, *named])) or roles[config]
    trial = Trial(stage_of(product), tuple(picks), tuple(kernels[p.config] for p in picks))
    return Built(product, trial, tuple(roles.values()))


def built(folder: Path) -> Iterator[Built]:
    """The products of the folder with their kernels, the first that was built first."""
    for file in sorted(folder.glob("*.pickle"), key=lambda f: (f.stat().st_mtime, f.name)):
        yield pickle.loads(file.read_bytes())


@dataclass(frozen=True)
class Read:
    """The readings of a product: its candidates' and, if asked for, oneDNN's seconds of one product
    before and after them. ``others``: the share of the cores that other processes took.
    """

    timed: Timed
    onednn: tuple[float, ...] = ()
    others: float = 0.0

    def beside(self, one: Built) -> dict[str, object]:
        """What a line of the file of readings has beside the times: roles, and oneDNN's seconds."""
        found: dict[str, object] = {"others": round(self.others, 3)}
        if any(one.roles):
            found["roles"] = [r for n, r in enumerate(one.roles) if n not in self.timed.wrong]
        if self.onednn:
            found["onednn"] = [round(seconds, 9) for seconds in self.onednn]
        return found


def read(one: Built, target: Target, peer: Worker | None = None) -> Read:
    """Times the candidates of a product on all cores of ``target``, between two turns of the
    ``peer`` if there is one.
    """
    first = _turn(peer, _job(one, target.cores)) if peer else []
    timed, others = timed_here(one.trial, target)
    last = _turn(peer) if peer else []
    return Read(timed, (*first, *last), others)


def timed_here(trial: Trial, target: Target) -> tuple[Timed, float]:
    """As :class:`gtco.tuning.measure.Measurer` times a trial, without processes that build; and the
    share of the cores that other processes took while it was timed.
    """
    made = artifact([trial], target, target.cores)
    with temporary("trials") as folder:
        library = folder / "trials.so"
        write_artifact(made, library)
        busy = Others()
        found = LocalRunner().read([library], Budget(LEAST_ROUNDS, SECONDS))
        others = busy.share()
    if found.failed:
        return Timed(trial, failed=found.failed), others
    columns = made.metadata["trials"][0][1:]  # the first one brought in the activations
    wrong = frozenset(n for n, step in enumerate(columns) if step in found.wrong)
    return Timed(trial, found.seconds[0][:, columns], wrong), others


def onednn() -> Worker:
    """The process in which oneDNN multiplies; it sleeps until it is asked."""
    return Worker(python(ONEDNN))


def _job(one: Built, threads: int) -> dict[str, object]:
    product = one.product
    return {
        "system": "onednn",
        "sizes": [product.m, product.n, product.k],
        "dtype": product.kind.split()[0],
        "copies": len(one.trial.kernels) + REPEATS,
        "threads": threads,
    }


def _turn(worker: Worker, job: Mapping[str, object] | None = None) -> list[float]:
    """The median seconds of a product over calls of all copies; ``job`` opens a new product."""
    if job is not None:
        worker.ask(do="open", job=dict(job))
    seconds = float(worker.ask(do="warm", seconds=CALLS_SECONDS)["seconds"])
    worker.stop()
    return [seconds]
