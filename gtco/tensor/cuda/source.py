"""A kernel's whole file: headers, what it is, its signature, the stage's lambdas, one call."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gtco.tensor.cuda.arguments import BETWEEN_BLOCKS, arguments
from gtco.tensor.cuda.spelling import indented
from gtco.tensor.stage import Stage

WIDTH = 100  # columns of a line that people read
BLOCK = "const int block = blockIdx.x;"  # which part of the stage a kernel does
PRODUCER_GROUP = "gtco::ProducerGroup"  # of roles.cuh
BOUNDS = r"__launch_bounds__\((\d+)(?:, \d+)?\)"  # as launch_bounds has them


def source(
    symbol: str,
    stage: Stage,
    headers: Sequence[str],
    lambdas: Sequence[str],
    call: str,
    threads: int,
    about: str = "",
    side_by_side: int = 0,
    shares: bool = False,
) -> str:
    """The translation unit. ``headers`` as ``gemm.cuh``; ``lambdas`` and ``call`` are statements of
    the kernel's body, each of one line or several; ``about`` goes into the comment, behind the
    stage's operators; ``side_by_side``, where it is given, the blocks of a multiprocessor that a
    thread's registers must leave room for; ``shares``: has it ``scratch`` and ``counters``?
    """
    includes = dict.fromkeys(("math.cuh", *headers))
    bounds = launch_bounds(threads, side_by_side)
    what = f"{stage.label} -> {stage.output.type}"
    *inputs, out = arguments(stage).declaration
    parameters = [*inputs, *(BETWEEN_BLOCKS if shares else ()), out]
    body = [line for text in (*lambdas, call) if text for line in text.splitlines()]
    return "\n".join(
        [
            *(f'#include "gtco/{header}"' for header in includes),
            "",
            f"// {what}{': ' if about else ''}{about}",
            f'extern "C" __global__ void {bounds} {symbol}(',
            *(
                f"    {parameter}{',' if n else ') {'}"
                for n, parameter in _countdown(parameters)
            ),
            f"  {BLOCK}",
            *(part for line in indented(body) for part in wrapped(line)),
            "}",
            "",
        ]
    )


def launch_bounds(threads: int, side_by_side: int = 0) -> str:
    """What the compiler is told of a kernel's blocks: their threads and, where it is given, how
    many of them a thread's registers must leave room for on a multiprocessor. Told of the threads
    alone, it has its own idea of a good number.
    """
    blocks = f", {side_by_side}" if side_by_side else ""
    return f"__launch_bounds__({threads}{blocks})"


def bounded(text: str, side_by_side: int) -> str:
    """A translation unit whose kernel is told of so many blocks side by side, whatever it was told
    before; as it stands where its kernel is told of no launch, and where its warps hand over
    registers, as many as they have by the bounds that it was given.
    """
    if has_roles(text):
        return text
    return re.sub(BOUNDS, lambda found: launch_bounds(int(found[1]), side_by_side), text)


def has_roles(text: str) -> bool:
    """Does a translation unit's kernel have warps of different roles, which hand over registers?
    Then it is launched by itself: beside other stages in one kernel there is no one number of
    registers that every block begins with.
    """
    return PRODUCER_GROUP in text


def wrapped(line: str) -> list[str]:
    """A line of code in parts of at most ``WIDTH`` columns, where it has spaces to break at."""
    if line.lstrip().startswith(("#", "//")):
        return [line]
    parts: list[str] = []
    margin = " " * (len(line) - len(line.lstrip()) + 4)
    while len(line) > WIDTH:
        least = len(line) - len(line.lstrip())
        cut = max(line.rfind(", ", least, WIDTH) + 1, line.rfind(" ", least + 1, WIDTH - 20))
        if cut <= least:
            break
        parts.append(line[:cut].rstrip())
        line = margin + line[cut:].lstrip()
    return [*parts, line]


def _countdown(items: Sequence[str]) -> list[tuple[int, str]]:
    """Each item, with how many follow."""
    return [(len(items) - 1 - n, item) for n, item in enumerate(items)]
