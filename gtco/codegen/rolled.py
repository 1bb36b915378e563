"""Loops whose bodies LLVM does not copy (:meth:`gtco.tensor.emit.emitter.Emitter.loop`).

LLVM writes out a loop of a few iterations as so many copies of its body, up to some 150
instructions. Of other inner loops it makes up to eight copies, in a loop that is followed by one
for the rest. TVM has no way to say that it should not. So such a loop has an empty piece of
assembly in it, which LLVM may not duplicate. It is said to use no memory of the kernel's, so that
loads still move out of the loop: parameters of the quantizations behind a product, for instance.
"""

from __future__ import annotations

from typing import Any

from gtco.tensor.emit.emitter import CALLED, ROLLED
from gtco.tensor.emit.llvm_source import with_source

SOURCE = f"""\
define internal i32 @{ROLLED}() alwaysinline {{
  call void asm sideeffect "", ""()
      noduplicate nounwind willreturn memory(inaccessiblemem: readwrite)
  ret i32 0
}}
"""


def bound(function: Any) -> Any:
    """The kernel with the function that marks its rolled loops."""
    if ROLLED not in map(str, (function.attrs or {}).get(CALLED, ())):
        return function
    return with_source(function, SOURCE)
