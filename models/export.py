"""PyTorch module -> ONNX file, with either of torch's exporters, quietly and atomically."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import onnx
import torch
from torch import Tensor, nn

from gtco.frontend.pytorch.translations import truths
from gtco.support.errors import ModelError, OptionError

EXPORTERS = ("dynamo", "torchscript")

# A protobuf message ends at 2 GiB; the graph itself needs some of that.
EMBEDDED_BYTES_MAX = 2_000_000_000


def export_onnx(
    model: nn.Module,
    inputs: Sequence[Tensor],
    path: str | Path,
    *,
    opset: int = 20,
    exporter: str = "dynamo",
    simplify: bool = False,
    open_axes: Mapping[int, str] = MappingProxyType({}),
) -> Path:
    """Export ``model``, called on ``inputs`` of the shapes the graph will have; returns ``path``.

    ``open_axes``: the axes of every input that are symbolic dimensions, with their names, such as
    ``{0: "batch"}``; ``inputs`` have a size of 2 or more there. ``exporter`` is ``"dynamo"``
    (``torch.export``) or ``"torchscript"`` (tracing); ``simplify`` runs onnxsim on the result. A
    single input is named ``image``; outputs are named by the model's ``output_names`` where it has
    that. Weights beyond protobuf's 2 GB go to ``path`` + ``.data`` beside it. The files appear
    under their names only when they are whole. Raises :class:`OptionError` for an unknown exporter
    and :class:`ModelError` when the export fails.
    """
    if exporter not in EXPORTERS:
        raise OptionError(f"unknown exporter {exporter!r}; choose one of: {', '.join(EXPORTERS)}")
    path = Path(path)
    names: dict[str, Any] = {}
    if len(inputs) == 1:
        names["input_names"] = ["image"]
    if open_axes:
        names |= _any_size(exporter, len(inputs), getattr(model, "output_names", None), open_axes)
    output_names: Any = getattr(model, "output_names", None)
    if output_names:
        names["output_names"] = list(output_names)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that the last step is a rename on one file system.
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        try:
            with _quiet(), torch.no_grad():
                proto = _EXPORTERS[exporter](
                    model, tuple(inputs), Path(folder) / "raw.onnx", opset, names
                )
        except Exception as error:
            raise ModelError(
                f"{type(model).__name__} cannot be exported with the {exporter} exporter at "
                f"opset {opset}: {error}"
            ) from error
        if simplify:
            proto = _simplify(proto)
        _write(proto, path, Path(folder))
    return path


def _any_size(
    exporter: str, count: int, outputs: Sequence[str] | None, axes: Mapping[int, str]
) -> dict[str, Any]:
    """How each exporter is told which sizes are open."""
    if exporter == "dynamo":
        return {"dynamic_shapes": tuple(dict(axes) for _ in range(count))}
    inputs = ["image"] if count == 1 else []
    named: dict[str, dict[int, str]] = {name: dict(axes) for name in inputs}
    # Other axes of an output may be of another size than the input's; the exporter names them.
    named |= {name: {0: axes[0]} for name in outputs or () if 0 in axes}
    return {"dynamic_axes": named}


def _export_dynamo(
    model: nn.Module, inputs: tuple[Tensor, ...], raw: Path, opset: int, names: dict[str, Any]
) -> onnx.ModelProto:
    program = torch.onnx.export(
        model,
        inputs,
        dynamo=True,
        opset_version=opset,
        verbose=False,
        custom_translation_table=truths(torch),
        **names,
    )
    assert program is not None  # what the dynamo exporter answers when it is given no file
    return program.model_proto


def _export_torchscript(
    model: nn.Module, inputs: tuple[Tensor, ...], raw: Path, opset: int, names: dict[str, Any]
) -> onnx.ModelProto:
    # Beyond 2 GB torch writes one file for each tensor beside ``raw``; loading gathers them.
    torch.onnx.export(model, inputs, str(raw), dynamo=False, opset_version=opset, **names)
    return onnx.load(raw)


_EXPORTERS = {"dynamo": _export_dynamo, "torchscript": _export_torchscript}


def _simplify(proto: onnx.ModelProto) -> onnx.ModelProto:
    try:
        import onnxsim
    except ImportError as error:
        raise ModelError("simplifying needs onnxsim: pip install onnxsim") from error
    try:
        with _quiet():
            simplified, same = onnxsim.simplify(proto)
    except Exception as error:
        raise ModelError(f"onnxsim failed: {error}; export without simplifying") from error
    if not same:
        raise ModelError("onnxsim's own check of its result failed; export without simplifying")
    return simplified


def _write(proto: onnx.ModelProto, path: Path, folder: Path) -> None:
    """Write ``proto`` in ``folder``, then move it (and its weights file first) to ``path``."""
    data = path.name + ".data"
    if sum(len(tensor.raw_data) for tensor in proto.graph.initializer) > EMBEDDED_BYTES_MAX:
        onnx.save(proto, folder / path.name, save_as_external_data=True, location=data)
        # onnx makes this file readable by its owner alone; the graph's file has the usual mode.
        os.chmod(folder / data, (folder / path.name).stat().st_mode)
        os.replace(folder / data, path.with_name(data))
    else:
        onnx.save(proto, folder / path.name)
    os.replace(folder / path.name, path)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hold back the exporters' progress lines, warnings and log records; errors still raise."""
    disabled = logging.root.manager.disable
    sink = io.StringIO()
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(sink),
        contextlib.redirect_stderr(sink),
    ):
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(disabled)
