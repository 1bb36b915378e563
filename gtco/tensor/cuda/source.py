"""A kernel's whole file: headers, a comment, its signature, the stage's lambdas, one call."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gtco.tensor.cuda.arguments import BETWEEN_BLOCKS, arguments
from gtco.tensor.cuda.spelling import indented
from gtco.tensor.stage import Stage

WIDTH = 100  # columns of a line that people read
BLOCK = "const int block = blockIdx.x;"  # the part of the stage that a block does
# Nothing of another kernel is read or written before it. Templates that have something to do until
# then call it themselves.
AFTER_PREVIOUS = "gtco::after_previous();"
PRODUCER_GROUP = "gtco::ProducerGroup"  # roles.cuh defines it
BOUNDS = r"__launch_bounds__\((\d+)(?:, \d+)?\)"  # the text that launch_bounds gives


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
    waits: bool = False,
) -> str:
    """The translation unit.

    - ``headers``: names such as ``gemm.cuh``;
    - ``lambdas``, ``call``: statements of the kernel's body, each of one line or several;
    - ``about``: text for the comment, after the stage's operators;
    - ``side_by_side``: if given, the number of blocks on a multiprocessor for which a thread's
      registers must leave room;
    - ``shares``: True if the kernel has ``scratch`` and ``counters``;
    - ``waits``: True if ``call`` itself waits for the kernel before (:data:`AFTER_PREVIOUS`).
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
            *([] if waits else [f"  {AFTER_PREVIOUS}"]),
            *(part for line in indented(body) for part in wrapped(line)),
            "}",
            "",
        ]
    )


def launch_bounds(threads: int, side_by_side: int = 0) -> str:
    """The launch bounds of a kernel: the threads of a block and, if it is given, the number of
    blocks on a multiprocessor for which a thread's registers must leave room. If it is not given,
    the compiler chooses that number itself.
    """
    blocks = f", {side_by_side}" if side_by_side else ""
    return f"__launch_bounds__({threads}{blocks})"


def bounded(text: str, side_by_side: int) -> str:
    """A translation unit whose launch bounds name so many blocks side by side, in the place of its
    own number. The text is unchanged if its kernel has no launch bounds, or if its warps hand over
    registers, because they hand over as many as the given bounds leave.
    """
    if has_roles(text):
        return text
    return re.sub(BOUNDS, lambda found: launch_bounds(int(found[1]), side_by_side), text)


def has_roles(text: str) -> bool:
    """True if the kernel of a translation unit has warps of different roles, which hand over
    registers. Then it is launched alone: in one kernel with other stages, there is no single number
    of registers with which every block begins.
    """
    return PRODUCER_GROUP in text


def wrapped(line: str) -> list[str]:
    """A line of code in parts of at most ``WIDTH`` columns, if it has spaces at which to break."""
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
    """Each item, with the number of those that follow."""
    return [(len(items) - 1 - n, item) for n, item in enumerate(items)]
