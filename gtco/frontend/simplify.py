"""Runs onnxsim in a process of its own, because it can hang, crash or use up memory, and this must
not end a compile.

The child imports nothing of gtco. No file is written: models are passed in memory. So a full disk
does no harm, and no files remain if either process is killed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import BinaryIO

import google.protobuf.message
import onnx

# Two passes of onnxsim are skipped. Fused attention is an operator of ONNX Runtime's domain; gtco
# finds attention by itself. A softmax over a single element would become 1, which is wrong for NaN
# and infinities: softmax(-inf) is NaN.
SKIPPED = ["fuse_attention", "eliminate_nop_softmax"]
# onnxsim imports these if they are installed. This takes seconds, and only its quantization and its
# formulas of symbolic sizes need them.
_CHILD = """
import sys
sys.modules["torch"] = sys.modules["sympy"] = None
import onnx, onnxsim
model = onnx.load_model_from_string(open(sys.argv[1], "rb").read())
count = None
while count != len(model.graph.node):
    count = len(model.graph.node)
    model, _ = onnxsim.simplify(model, skipped_optimizers=sys.argv[3:])
    if not any(node.op_type == "Shape" for node in model.graph.node):
        break  # else one pass found shapes that another can fold
open(sys.argv[2], "wb").write(model.SerializeToString())
"""


def simplify(model: onnx.ModelProto, timeout: float) -> tuple[onnx.ModelProto, str]:
    """The simplified model and "", or the unchanged model and the reason. ``timeout`` is in
    seconds.
    """
    with _memory_file() as source, _memory_file() as target:
        source.write(model.SerializeToString())
        source.flush()
        files = [source.fileno(), target.fileno()]
        command = [sys.executable, "-c", _CHILD, *(f"/proc/self/fd/{file}" for file in files)]
        command += SKIPPED
        try:
            # It has a session of its own, so it does not report Ctrl-C. It runs in "/", so that it
            # imports nothing from the user's current folder.
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout,
                check=False,
                stdin=subprocess.DEVNULL,
                cwd="/",
                pass_fds=files,
                start_new_session=True,
            )
        except subprocess.TimeoutExpired:
            return (
                model,
                f"onnxsim did not finish in {timeout:g} s; the model is compiled unsimplified",
            )
        target.seek(0)
        written = target.read()
    if done.returncode != 0 or not written:
        last = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
        return model, f"onnxsim failed ({last}); the model is compiled unsimplified"
    try:
        simplified = onnx.load_model_from_string(written)
    except google.protobuf.message.DecodeError:
        return model, "onnxsim wrote no model; the model is compiled unsimplified"
    if [v.name for v in simplified.graph.output] != [v.name for v in model.graph.output]:
        return model, "onnxsim changed the model's outputs; the model is compiled unsimplified"
    if new := _domains(simplified) - _domains(model):
        return model, (
            f"onnxsim brought in operators of {', '.join(sorted(new))}; the model is compiled "
            "unsimplified"
        )
    return simplified, ""


def _domains(model: onnx.ModelProto) -> set[str]:
    return {node.domain for node in model.graph.node} - {"ai.onnx"}


def _memory_file() -> BinaryIO:
    """A file without a name, in memory."""
    return os.fdopen(os.memfd_create("gtco"), "w+b")
