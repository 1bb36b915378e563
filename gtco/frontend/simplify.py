"""Runs onnxsim in a process of its own, because it can hang, crash or use up memory, and this must
not end a compile.

The child imports nothing of gtco. No file is written: models are passed in memory. So a full disk
does no harm, and no files remain if either process is killed.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextvars import ContextVar
from typing import BinaryIO

import google.protobuf.message
import onnx

# Five passes of onnxsim are skipped. Fused attention is an operator of ONNX Runtime's domain; gtco
# finds attention by itself. A softmax over a single element would become 1, which is wrong for NaN
# and infinities: softmax(-inf) is NaN. A vector divided by its norm would become LpNormalization,
# which makes zeros of a vector of zeros, where the division makes NaN. A factor of more axes than a
# convolution's weights would give these more axes; gtco folds factors by itself. Two factors would
# be multiplied though their product may be infinite or 0; gtco looks.
SKIPPED = """fuse_attention eliminate_nop_softmax fuse_lp_normalization fuse_mul_into_conv
    fuse_consecutive_mul""".split()
# onnxsim imports these if they are installed. This takes seconds, and only its quantization and its
# formulas of symbolic sizes need them.
_IMPORTS = """
import sys
sys.modules["torch"] = sys.modules["sympy"] = None
import onnx, onnxsim
"""
_SIMPLIFY = """
count = None
while count != len(model.graph.node):
    count = len(model.graph.node)
    model, _ = onnxsim.simplify(model, skipped_optimizers=skipped)
    if not any(node.op_type == "Shape" for node in model.graph.node):
        break  # else one pass found shapes that another can fold
"""
_CHILD = f"""{_IMPORTS}
model = onnx.load_model_from_string(open(sys.argv[1], "rb").read())
skipped = sys.argv[3:]
{_SIMPLIFY}
open(sys.argv[2], "wb").write(model.SerializeToString())
"""
# The process of several models: each is a number of bytes and these, and so is each answer, behind
# the exit code. A fork does the work, so that a crash is that of one model.
_SERVER = f"""{_IMPORTS}
import os, struct, traceback
skipped, source, answers = sys.argv[1:], sys.stdin.buffer, sys.stdout.buffer
while head := source.read(8):
    given = source.read(*struct.unpack("<Q", head))
    with os.fdopen(os.memfd_create("gtco"), "w+b") as made:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                model = onnx.load_model_from_string(given)
{_SIMPLIFY.replace(chr(10), chr(10) + " " * 16)}
                made.write(model.SerializeToString())
                made.flush()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)  # at once: threads of onnxsim are not in the fork
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        made.seek(0)
        answer = made.read()
    answers.write(struct.pack("<qQ", code, len(answer)) + answer)
    answers.flush()
"""


class _Process:
    """A process that has imported onnxsim and simplifies one model after the other. It is started
    when it is asked first. It has a session of its own, so it does not report Ctrl-C, and it ends
    when this process ends.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._said: BinaryIO | None = None

    def ask(self, model: bytes, timeout: float) -> tuple[int, str, bytes]:
        """The exit status, what was said, and the simplified model. Raises
        ``subprocess.TimeoutExpired``, and then the process has ended.
        """
        deadline = time.monotonic() + timeout
        if self._process is None:
            self._start()
        process, said = self._process, self._said
        assert process is not None and process.stdin and process.stdout and said
        said.seek(0)
        said.truncate()
        try:
            process.stdin.write(struct.pack("<Q", len(model)) + model)
            process.stdin.flush()
            code, length = struct.unpack("<qQ", self._read(16, deadline, timeout))
            answer = self._read(length, deadline, timeout)
        except subprocess.TimeoutExpired:
            self.close()
            raise
        except (EOFError, BrokenPipeError):  # it ended itself
            process.wait()
            code, answer = process.returncode or 1, b""
        said.seek(0)
        words = said.read().decode(errors="replace")
        if code:
            self.close()
        return code, words, answer

    def _start(self) -> None:
        self._said = _memory_file()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVER, *SKIPPED],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            cwd="/",
            start_new_session=True,
        )

    def _read(self, count: int, deadline: float, timeout: float) -> bytes:
        assert self._process is not None and self._process.stdout
        file, read = self._process.stdout.fileno(), bytearray()
        while len(read) < count:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([file], [], [], left)[0]:
                raise subprocess.TimeoutExpired("onnxsim", timeout)
            some = os.read(file, count - len(read))
            if not some:
                raise EOFError
            read += some
        return bytes(read)

    def close(self) -> None:
        """Ends the process and its fork. It is started again if it is asked again."""
        process, said = self._process, self._said
        self._process = self._said = None
        if process is not None and process.stdin and process.stdout and said:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for pipe in (process.stdin, process.stdout, said):
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


_kept: ContextVar[_Process | None] = ContextVar("onnxsim", default=None)


@contextlib.contextmanager
def one_process() -> Iterator[None]:
    """While it is open, one process simplifies all models of this thread: to start it takes longer
    than a small model.
    """
    process = _Process()
    token = _kept.set(process)
    try:
        yield
    finally:
        _kept.reset(token)
        process.close()


def simplify(model: onnx.ModelProto, timeout: float) -> tuple[onnx.ModelProto, str]:
    """The simplified model and "", or the unchanged model and the reason. ``timeout`` is in
    seconds.
    """
    process = _kept.get()
    try:
        if process is not None:
            code, said, written = process.ask(model.SerializeToString(), timeout)
        else:
            code, said, written = _alone(model.SerializeToString(), timeout)
    except subprocess.TimeoutExpired:
        return (
            model,
            f"onnxsim did not finish in {timeout:g} s; the model is compiled unsimplified",
        )
    if code != 0 or not written:
        last = (said.strip() or f"exit status {code}").splitlines()[-1]
        return model, f"onnxsim failed ({last}); the model is compiled unsimplified"
    try:
        simplified = onnx.load_model_from_string(written)
    except google.protobuf.message.DecodeError:
        return model, "onnxsim wrote no model; the model is compiled unsimplified"
    if [v.name for v in simplified.graph.output] != [v.name for v in model.graph.output]:
        return model, "onnxsim changed the model's outputs; the model is compiled unsimplified"
    # Where an output is an element of a sequence of inputs, onnxsim gives the input its name.
    known = {value.name: value for value in model.graph.input}
    if any(value.name not in known for value in simplified.graph.input):
        return model, "onnxsim renamed an input of the model; the model is compiled unsimplified"
    if new := _domains(simplified) - _domains(model):
        return model, (
            f"onnxsim brought in operators of {', '.join(sorted(new))}; the model is compiled "
            "unsimplified"
        )
    # An input that was reshaped to its own shape has the result's type, whose sizes may be unknown.
    for value in simplified.graph.input:
        value.CopyFrom(known[value.name])
    return simplified, ""


def _alone(model: bytes, timeout: float) -> tuple[int, str, bytes]:
    """What :meth:`_Process.ask` gives, by a process for this model alone."""
    with _memory_file() as source, _memory_file() as target:
        source.write(model)
        source.flush()
        files = [source.fileno(), target.fileno()]
        command = [sys.executable, "-c", _CHILD, *(f"/proc/self/fd/{file}" for file in files)]
        # It has a session of its own, so it does not report Ctrl-C. It runs in "/", so that it
        # imports nothing from the user's current folder.
        done = subprocess.run(
            [*command, *SKIPPED],
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
        target.seek(0)
        return done.returncode, done.stderr, target.read()


def _domains(model: onnx.ModelProto) -> set[str]:
    return {node.domain for node in model.graph.node} - {"ai.onnx"}


def _memory_file() -> BinaryIO:
    """A file without a name, in memory."""
    return os.fdopen(os.memfd_create("gtco"), "w+b")
