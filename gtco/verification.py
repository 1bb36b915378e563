"""Is the compiled model right? Its outputs against a reference, on random and on adversarial
inputs.

The reference is ONNX Runtime on the model's ONNX, or the PyTorch module itself. The inputs that
find errors are not the friendly ones: large activations (overflow in exp and in variances), zeros
and constants (a variance of zero), and a single spike (one row that dominates a softmax or a
maximum).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gtco.errors import VerificationError

Array = NDArray[Any]
Reference = Callable[[Mapping[str, Array]], Sequence[Array]]

TOLERANCE = 1e-3  # of the output's largest magnitude: fp32 against fp32, sums in another order
LARGE, SPIKE, INTEGERS = 30.0, 100.0, 4  # scale of large inputs, height of the spike, ids in [0, 4)


class Spec(Protocol):
    """An input or output of a compiled model."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class Difference:
    """One output in one case.

    ``absolute``: max |a - e|; ``relative``: that over max |e| (over 1 where e is all zeros); both
    over the finite elements. ``failure`` says why this output is wrong, None where it is right.
    """

    case: str
    output: str
    absolute: float
    relative: float
    failure: str | None = None


@dataclass(frozen=True)
class VerificationReport:
    """All outputs in all cases, against ``reference`` (its name), with the tolerance on
    ``relative``.
    """

    reference: str
    tolerance: float
    differences: tuple[Difference, ...]

    @property
    def failures(self) -> tuple[Difference, ...]:
        return tuple(d for d in self.differences if d.failure)

    @property
    def passed(self) -> bool:
        return not self.failures

    @property
    def worst(self) -> Difference | None:
        """The largest relative difference."""
        return max(self.differences, key=lambda d: d.relative, default=None)

    def check(self) -> None:
        """Raise ``VerificationError`` that lists every failure."""
        if self.failures:
            lines = [f"  {d.output} on {d.case} inputs: {d.failure}" for d in self.failures]
            raise VerificationError(
                f"the compiled model differs from {self.reference} in {len(lines)} of "
                f"{len(self.differences)} comparisons:\n" + "\n".join(lines) + "\nThis is a bug "
                "of gtco or an ill-conditioned model: compile with --no-simplify, and with "
                "--dump DIR, to find the phase that is wrong.",
                self,
            )

    def __str__(self) -> str:
        verdict = "agrees with" if self.passed else "differs from"
        text = f"{verdict} {self.reference} in {len(self.differences)} comparisons"
        if self.worst is None:
            return text
        worst = f"{self.worst.relative:.1e} ({self.worst.output} on {self.worst.case} inputs)"
        return f"{text}, largest relative error {worst}"

    def to_json(self) -> dict[str, Any]:
        return {"passed": self.passed, **asdict(self)}


def verify(
    compiled: Any,
    reference: Any,
    *,
    tolerance: float = TOLERANCE,
    seed: int = 0,
    check: bool = True,
) -> VerificationReport:
    """Compare a compiled model with its reference on every case of :func:`cases`.

    ``compiled`` is a ``CompiledModel`` or a loaded ``Model`` (``inputs``, ``outputs``, ``run(dict)
    -> dict``). ``reference`` is an ONNX path, bytes or ``ModelProto`` (run by ONNX Runtime), an
    ``nn.Module`` or ``ExportedProgram`` (run by PyTorch), or a function from inputs by name to
    outputs in order. Raises ``VerificationError`` when an output is wrong (unless ``check`` is
    false) or the reference cannot be run.
    """
    model = getattr(compiled, "model", compiled)
    differences: list[Difference] = []
    with ExitStack() as stack:
        name, run = open_reference(reference, stack, [spec.name for spec in model.inputs])
        for case, inputs in cases(model.inputs, seed).items():
            try:
                expected = run(inputs)
            except Exception as error:
                raise VerificationError(
                    f"{name} cannot run the model on {case} inputs: {error}"
                ) from error
            actual = model.run(inputs)
            if len(expected) != len(model.outputs):
                raise VerificationError(
                    f"{name} gives {len(expected)} outputs, the compiled model has "
                    f"{len(model.outputs)}: not the same model"
                )
            differences += [
                compare(case, spec.name, actual[spec.name], e, tolerance)
                for spec, e in zip(model.outputs, expected, strict=True)
            ]
    report = VerificationReport(name, tolerance, tuple(differences))
    if check:
        report.check()
    return report


def cases(inputs: Sequence[Spec], seed: int = 0) -> dict[str, dict[str, Array]]:
    """Inputs by case: ``random``, and ``large``, ``zeros``, ``constant`` and ``spike`` where an
    input is a float.

    Integers (ids, masks) are random in [0, 4) and booleans random in every case.
    """
    rng = np.random.default_rng(seed)
    base = {spec.name: _random(rng, spec) for spec in inputs}
    floats = {name: value for name, value in base.items() if value.dtype.kind == "f"}
    if not floats:
        return {"random": base}

    def changed(change: Callable[[Array], Array]) -> dict[str, Array]:
        return base | {name: change(value).astype(value.dtype) for name, value in floats.items()}

    return {
        "random": base,
        "large": changed(lambda x: x * LARGE),
        "zeros": changed(np.zeros_like),
        "constant": changed(np.ones_like),
        "spike": changed(_spike),
    }


def compare(case: str, output: str, actual: Array, expected: Array, tolerance: float) -> Difference:
    """One output against its reference. Other shapes, or infinities and NaNs in other places, are
    failures.
    """
    if actual.shape != expected.shape:
        return Difference(
            case,
            output,
            np.inf,
            np.inf,
            f"shape {actual.shape}, the reference's is {expected.shape}",
        )
    a, e = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    finite = np.isfinite(e)
    if (
        not np.array_equal(a[~finite], e[~finite], equal_nan=True)
        or not np.isfinite(a[finite]).all()
    ):
        wrong = int((np.isfinite(a) != finite).sum()) or int((~finite).sum())
        return Difference(
            case,
            output,
            np.inf,
            np.inf,
            f"{wrong} elements are infinite or NaN where the reference's are not so",
        )
    if not finite.any():
        return Difference(case, output, 0.0, 0.0)
    absolute = float(np.abs(a[finite] - e[finite]).max())
    relative = absolute / (float(np.abs(e[finite]).max()) or 1.0)
    failure = None
    if relative > tolerance:
        failure = (
            f"off by {absolute:.3g}, {relative:.3g} of the largest magnitude "
            f"(tolerance {tolerance:g})"
        )
    return Difference(case, output, absolute, relative, failure)


def open_reference(reference: Any, stack: ExitStack, names: Sequence[str]) -> tuple[str, Reference]:
    """The reference's name and a function that runs it; ``stack`` holds what must stay alive."""
    if isinstance(reference, str | Path | bytes) or hasattr(reference, "SerializeToString"):
        return "ONNX Runtime", _onnxruntime(reference, stack)
    if hasattr(reference, "graph_module") and callable(getattr(reference, "module", None)):
        return "PyTorch", _torch(reference.module(), names)  # an ExportedProgram
    if hasattr(reference, "named_parameters"):
        return "PyTorch", _torch(reference, names)
    if callable(reference):
        return "the reference", reference
    raise VerificationError(
        f"cannot verify against a {type(reference).__name__}: "
        "give an ONNX model or a PyTorch module"
    )


def _onnxruntime(model: Any, stack: ExitStack) -> Reference:
    try:
        import onnxruntime as ort
    except ImportError:
        raise VerificationError("verifying needs ONNX Runtime: pip install onnxruntime") from None
    options = ort.SessionOptions()
    options.log_severity_level = 3
    try:
        source = str(model) if isinstance(model, Path) else model
        if not isinstance(source, str | bytes):
            source = _serialized(source, stack)
        session = ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise VerificationError(
            f"ONNX Runtime cannot open the model, so it cannot be verified: {error}"
        ) from error
    return lambda inputs: session.run(None, dict(inputs))


def _serialized(model: Any, stack: ExitStack) -> str | bytes:
    """A ModelProto as bytes, or as a file with external data where it passes protobuf's 2 GB."""
    try:
        return bytes(model.SerializeToString())
    except Exception:  # protobuf's error type differs between its implementations
        import onnx

        path = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="gtco-verify-")), "model.onnx"
        )
        copy = onnx.ModelProto()
        copy.CopyFrom(model)  # saving moves the weights out of the proto it is given
        onnx.save(copy, path, save_as_external_data=True, location="model.data")
        return str(path)


def _torch(module: Any, names: Sequence[str]) -> Reference:
    import torch

    def run(inputs: Mapping[str, Array]) -> Sequence[Array]:
        with torch.inference_mode():
            result = module(*(torch.from_numpy(inputs[name].copy()) for name in names))
        return [tensor.numpy() for tensor in _flatten(result)]

    return run


def _flatten(value: Any) -> list[Any]:
    if value is None:
        return []
    if isinstance(value, Mapping):
        value = list(value.values())
    return (
        [t for item in value for t in _flatten(item)]
        if isinstance(value, list | tuple)
        else [value]
    )


def _random(rng: np.random.Generator, spec: Spec) -> Array:
    dtype = np.dtype(spec.dtype)
    if dtype.kind == "f":
        return rng.standard_normal(spec.shape).astype(dtype)
    return rng.integers(0, 2 if dtype.kind == "b" else INTEGERS, spec.shape).astype(dtype)


def _spike(x: Array) -> Array:
    spiked = np.zeros_like(x)
    if x.size:
        spiked.flat[x.size // 3] = SPIKE
    return spiked
