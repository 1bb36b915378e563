"""Makes the libraries of one call: what goes over all of its models, around the steps of each."""

from __future__ import annotations

import resource
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

from gtco.codegen.workers import Workers
from gtco.driver.backend import backend_of
from gtco.driver.cache.caching import Caching, cache_of
from gtco.driver.checks import check_dump, check_output
from gtco.driver.compilation import Compilation
from gtco.driver.library import Library
from gtco.driver.phases import Built
from gtco.frontend.source import check_source, is_onnx
from gtco.machine.target import Machine, Target, target
from gtco.runtime.publish import publish, staging
from gtco.runtime.writing.c_objects import made_early
from gtco.runtime.writing.cross import compiler_for
from gtco.search.records.records import Record, Records
from gtco.search.records.shipped import shipped
from gtco.support.alone import alone
from gtco.support.environment import cache_bytes
from gtco.support.errors import REPORT, InternalError, RecordError, VerificationError
from gtco.support.options import CompileOptions, Tune

if TYPE_CHECKING:
    from gtco.tuning.farm.runner import FarmRunner


def make_libraries(libraries: Sequence[Library], options: CompileOptions) -> None:
    """Makes the libraries, or takes them from the cache, and puts all of them in place."""
    with alone(), ExitStack() as stack:
        machine, runner = target(options.target), None
        if options.farm:
            machine, runner = stack.enter_context(_farm(options))
        backend = backend_of(machine)
        effort = backend.effort(options.tune)
        backend.check(options)
        compiler = compiler_for(backend.isa)
        _check(libraries, options)
        records = None
        if options.records is not None:
            records = stack.enter_context(Records(options.records, write=effort is not None))
        elif effort is not None:
            records = stack.enter_context(Records(":memory:"))
        known = [] if effort is None else _shipped(libraries[0].compilations[0])
        folders = [stack.enter_context(staging(library.output)) for library in libraries]
        left = list(zip(libraries, folders, strict=True))
        caching = None
        if (cache := cache_of(options, effort)) is not None:
            followed = records if options.records is not None else None
            caching = Caching(cache, libraries, options, machine, followed, effort)
            left = caching.missing(folders, stack)
        made: dict[Compilation, Built] = {}
        if left:
            sources, folder = backend.c_sources, left[0][1]
            stack.enter_context(made_early(sources, folder, compiler, backend.isa))
            with Workers(options.workers or backend.builders) as workers:
                making = [library for library, _ in left]
                made = _prepare(making, machine, records, known, effort, runner, workers)
        for library, folder in left:
            library.finish(made, folder)
            if caching is not None:
                caching.keep(library, folder)
        for library, folder in zip(libraries, folders, strict=True):
            publish(folder, library.output)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    for library in libraries:
        for compilation in library.compilations:
            compilation.report.peak_memory_bytes = peak
        if library.fetched is not None:
            library.fetched.peak_memory_bytes = peak


def _check(libraries: Sequence[Library], options: CompileOptions) -> None:
    """Says what is missing or impossible before the work is done."""
    cache_bytes()  # raises if the environment does not say a number
    for compilation in (c for library in libraries for c in library.compilations):
        model = compilation.source.model
        check_source(model)
        check_output(compilation.output)
        check_dump(compilation.options.dump)
        if options.verify and is_onnx(model) and find_spec("onnxruntime") is None:
            raise VerificationError("verifying needs ONNX Runtime: pip install onnxruntime")


def _prepare(
    libraries: Sequence[Library],
    machine: Machine,
    records: Records | None,
    known: Sequence[Record],
    effort: Tune | None,
    runner: FarmRunner | None,
    workers: Workers,
) -> dict[Compilation, Built]:
    """The steps up to the kernels; those that measure go over all models and variants at once."""
    made: dict[Compilation, Built] = {}
    for library in libraries:
        made |= library.prepare(machine, records, workers, known)
    if known:
        for compilation, built in made.items():
            _say_followed(compilation, built)
    if effort is not None:
        from gtco.driver.measuring import measure

        assert records is not None
        made = measure(made, workers, records, known, effort, runner)
    if runner is not None:
        for compilation in made:
            compilation.report.notes += runner.notes
    return made


@contextmanager
def _farm(options: CompileOptions) -> Iterator[tuple[Target, FarmRunner]]:
    """The farm's machines that measure, and what code for them is built for."""
    from gtco.tuning.farm.connection import Farm
    from gtco.tuning.farm.runner import FarmRunner, wanted

    with Farm(options.farm) as farm:
        kind, machine = wanted(farm, options.farm_kind)
        yield machine, FarmRunner(farm, kind)


def _shipped(compilation: Compilation) -> list[Record]:
    """The records that come with gtco, which measuring begins with; none, and a note, where they
    are damaged.
    """
    try:
        return shipped()
    except RecordError as error:
        what = f"the records that come with gtco cannot be read: {error}. {REPORT}"
        compilation.worked_around(InternalError(what))
        return []


def _say_followed(compilation: Compilation, built: Built) -> None:
    """A note, where stages follow records that come with gtco."""
    policy = built.policy
    different = {stage.key: stage for stage in built.model.partition.stages}.values()
    if followed := sum(policy.follows_shipped(stage) for stage in different):
        compilation.report.notes.append(
            f"{followed} of {len(different)} different kernels come from the tuning records for "
            "this CPU that ship with gtco; --tune off leaves these out"
        )
