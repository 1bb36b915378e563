"""Makes the program that the runtime can call from a sketch's loops."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gtco.machine.target import Target
from gtco.tensor.emit.emitter import Emitter, KernelArguments, kernel
from gtco.tensor.emit.scratch import Scratch
from gtco.tensor.loops import Line
from gtco.tensor.packing import Packing, packed_types
from gtco.tensor.space import Program
from gtco.tensor.stage import Stage


def program(
    symbol: str,
    stage: Stage,
    target: Target,
    tasks: int,
    emit: Callable[[Emitter, KernelArguments], None],
    scratch: Scratch | None = None,
    packings: Mapping[str, Packing] | None = None,
    lines: tuple[Line, ...] = (),
) -> Program:
    """The kernel of the stage over ``tasks`` tasks. ``emit`` writes its body, and constants have
    the layout that ``packings`` gives. ``lines``: as in :class:`gtco.tensor.space.Program`.
    """
    packed, workspace = packings or {}, scratch.nbytes if scratch else 0
    types = packed_types(stage, packed)
    function = kernel(symbol, types, stage.output.type, workspace, target.lanes, emit, stage.wide)
    return Program(function, tasks, workspace, packed, lines=lines)
