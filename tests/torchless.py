"""``python -m tests.torchless MODULE ARGUMENTS`` is ``python -m MODULE ARGUMENTS`` in a process
without torch and sympy. TVM and onnxsim import them where they are installed, which takes 2 s of
CPU.
"""

from __future__ import annotations

import runpy
import sys

if __name__ == "__main__":
    sys.modules["torch"] = sys.modules["sympy"] = None  # type: ignore[assignment]
    from gtco.support.torchless import import_tvm

    import_tvm()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
