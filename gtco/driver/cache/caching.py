"""The libraries of one call of the compiler and the cache: which of them it has, and keeping the
others once they are made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from gtco.driver.cache.key import library_key
from gtco.driver.cache.library_cache import LibraryCache
from gtco.driver.compiled import CompileReport
from gtco.driver.library import Library
from gtco.machine.target import Machine
from gtco.search.records.records import Records
from gtco.support.environment import cache_bytes, cache_folder
from gtco.support.options import CompileOptions, Tune

# What of a report another compile of the same model would find too.
KEPT = "stages notes rejections predicted_seconds launches weights_bytes arena_bytes fusion".split()


def cache_of(options: CompileOptions, effort: Tune | None) -> LibraryCache | None:
    """The cache. None if the user wants none, or if the compile has other results beside the
    library: a dump, what its stages lose, or measurements that it adds to a file of records.
    """
    adds_records = effort is not None and options.records is not None
    beside = options.dump is not None or options.verify_layers or adds_records
    if not options.cache or beside:
        return None
    limit = cache_bytes()
    return LibraryCache(cache_folder() / "libraries", limit) if limit else None


class Caching:
    """The keys of the libraries; "" for one that cannot be kept."""

    def __init__(
        self,
        cache: LibraryCache,
        libraries: Sequence[Library],
        options: CompileOptions,
        machine: Machine,
        records: Records | None,
        effort: Tune | None,
    ) -> None:
        self.cache, self.libraries, self.together = cache, libraries, effort is not None
        self.keys: dict[Library, str] = {}
        rates = libraries[0].compilations[0].rates(machine)
        self._decides = options, machine, rates, records, effort

    def find_keys(self) -> None:
        """Sets ``keys``, for which the models are read."""
        libraries = self.libraries
        names = [library.output.name for library in libraries]
        digests = [library.digests() for library in libraries]
        for number, library in enumerate(libraries):
            # what is measured together depends on all of it
            part = slice(None) if self.together else slice(number, number + 1)
            if None in digests[part]:
                self.keys[library] = ""
                continue
            known = [f"{number}" if self.together else "", *(str(d) for d in digests[part])]
            self.keys[library] = library_key(names[part], known, *self._decides)

    def missing(self, folders: Sequence[Path], stack: ExitStack) -> list[tuple[Library, Path]]:
        """Puts the libraries that the cache has into their folders, and gives the others. ``stack``
        then holds the locks of these, so that other processes wait for them.
        """
        pairs = list(zip(self.libraries, folders, strict=True))
        with self.libraries[0].compilations[0].phase("look up") as say:
            self.find_keys()
            left = self._fetch(pairs)
            if left:
                for key in sorted({self.keys[library] for library, _ in left} - {""}):
                    stack.enter_context(self.cache.alone(key))
                left = self._fetch(left)  # another process may have been at it
            if left and self.together:
                for library, folder in pairs:
                    library.fetched = None
                    _empty(folder)
                left = pairs
            found = len(pairs) - len(left)
            say("in the cache" if found == len(pairs) else f"{found} of {len(pairs)} in the cache")
        for library, folder in pairs:
            if (library, folder) not in left:
                library.verify_fetched(folder)
        return left

    def _fetch(self, pairs: Sequence[tuple[Library, Path]]) -> list[tuple[Library, Path]]:
        left = []
        for library, folder in pairs:
            key = self.keys[library]
            known = self.cache.fetch(key, folder) if key else None
            try:
                library.fetched = report_of(known["report"], known["made"]) if known else None
            except (LookupError, TypeError, AttributeError):  # the entry is damaged: made again
                library.fetched = None
                _empty(folder)
            if library.fetched is None:
                left.append((library, folder))
        return left

    def keep(self, library: Library, folder: Path) -> None:
        """Keeps a library that was made in ``folder``, unless something went wrong that another
        compile may do better.
        """
        if (key := self.keys[library]) and not library.accidents:
            report = library.report()
            if wrong := self.cache.keep(key, folder / library.output.name, kept_of(report)):
                report.notes.append(wrong)


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def kept_of(report: CompileReport) -> dict[str, Any]:
    """The report as JSON; see :func:`report_of`."""
    kept = {name: getattr(report, name) for name in KEPT}
    return {**kept, "variants": {name: kept_of(one) for name, one in report.variants.items()}}


def report_of(data: Mapping[str, Any], made: str) -> CompileReport:
    """The report of a library that was made then."""
    variants = {name: report_of(one, made) for name, one in data["variants"].items()}
    return CompileReport(**{name: data[name] for name in KEPT}, variants=variants, cached=made)
