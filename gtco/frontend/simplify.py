"""onnxsim in a process of its own: it can hang, crash or eat memory, and none of that may end a
compile.

The child runs in the temporary folder and imports nothing of gtco.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import onnx

_CHILD = """
import sys, onnx, onnxsim
model, _ = onnxsim.simplify(onnx.load(sys.argv[1]))
open(sys.argv[2], "wb").write(model.SerializeToString())
"""


def simplify(model: onnx.ModelProto, timeout: float) -> tuple[onnx.ModelProto, str]:
    """The simplified model and "", or the model as it was and the reason why. ``timeout`` in
    seconds."""
    with tempfile.TemporaryDirectory(prefix="gtco-") as folder:
        source, target = Path(folder, "in.onnx"), Path(folder, "out.onnx")
        source.write_bytes(model.SerializeToString())
        command = [sys.executable, "-c", _CHILD, source.name, target.name]
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=timeout,
                check=False,
                stdin=subprocess.DEVNULL,
                cwd=folder,
            )
        except subprocess.TimeoutExpired:
            return (
                model,
                f"onnxsim did not finish in {timeout:g} s; the model is compiled unsimplified",
            )
        if done.returncode != 0 or not target.is_file():
            last = (done.stderr.strip() or "no message").splitlines()[-1]
            return model, f"onnxsim failed ({last}); the model is compiled unsimplified"
        simplified = onnx.load_model_from_string(target.read_bytes())
    if [v.name for v in simplified.graph.output] != [v.name for v in model.graph.output]:
        return model, "onnxsim changed the model's outputs; the model is compiled unsimplified"
    return simplified, ""
