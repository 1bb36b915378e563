"""The quantizers whose files ``bench int8`` times. Each takes a float ONNX file and samples, and
writes a file with QuantizeLinear and DequantizeLinear.

``gtco`` and ``onnxruntime`` write what every engine reads. ``nncf`` writes the ONNX file that
OpenVINO's own documentation tells its users to make. All use what each quantizer does by default
for transformers on a CPU: weights of int8 with a scale for each channel, activations of 8 bits.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from gtco.driver.cache.key import own_digest
from gtco.support.errors import ModelError
from gtco.support.version import installed as package_version

from . import kept
from .workload import make_inputs

Samples = Sequence[Mapping[str, np.ndarray]]


def samples(model: Path, count: int) -> Samples:
    """Seeded inputs of the model, as a benchmark's own inputs are drawn. The weights of benchmarks
    are random, so the samples serve for speed alone.
    """
    return [make_inputs(model, {}, seed=1 + number) for number in range(count)]


def by_gtco(model: Path, data: Samples, made: Path) -> None:
    import gtco

    onnx.save(gtco.quantize(str(model), list(data)).model, made)


def by_onnxruntime(model: Path, data: Samples, made: Path) -> None:
    """``quantize_static`` after its own preprocessing, in QDQ format."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.rest: Iterator[Mapping[str, np.ndarray]] = iter(data)

        def get_next(self) -> dict[str, np.ndarray] | None:
            found = next(self.rest, None)
            return None if found is None else dict(found)

    with tempfile.TemporaryDirectory(prefix="gtco-bench-") as folder:
        ready = Path(folder, "ready.onnx")
        quant_pre_process(str(model), str(ready), skip_symbolic_shape=True)
        quantize_static(
            str(ready),
            str(made),
            Reader(),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=["MatMul", "Gemm", "Conv"],
            per_channel=True,
        )


def by_nncf(model: Path, data: Samples, made: Path) -> None:
    """NNCF's post-training quantization of the ONNX file, told that the model is a transformer."""
    import nncf

    found: Any = nncf.quantize(
        onnx.load(model),
        nncf.Dataset([dict(one) for one in data]),
        model_type=nncf.ModelType.TRANSFORMER,
        subset_size=len(data),
    )
    onnx.save(found, made)


QUANTIZERS: dict[str, Callable[[Path, Samples, Path], None]] = {
    "gtco": by_gtco,
    "onnxruntime": by_onnxruntime,
    "nncf": by_nncf,
}


def installed(name: str) -> bool:
    """True if the quantizer's package is there."""
    return find_spec(name) is not None


def made(quantizer: str, model: Path, folder: Path) -> Path:
    """The place of the file of ``quantizer`` for ``model``."""
    return folder / f"{model.stem}.{quantizer}-int8.onnx"


def quantize(quantizer: str, model: Path, count: int, folder: Path) -> Path:
    """The file of ``quantizer`` for ``model``, made of ``count`` samples; kept in ``folder`` until
    the model, the number or the quantizer's version is another one. Where the quantizer is not
    installed, the file that is there is taken, whatever made it. Raises ``ModelError`` with the
    quantizer's own words if it fails.
    """
    file = made(quantizer, model, folder)
    if file.exists() and not installed(quantizer):
        return file
    version = own_digest() if quantizer == "gtco" else package_version(quantizer)
    about = {"model": kept.digest(model), "samples": count, "version": version}
    if not kept.current(file, about):
        part = file.with_suffix(".part.onnx")
        try:
            QUANTIZERS[quantizer](model, samples(model, count), part)
            part.replace(file)
            kept.note(file, about)
        except Exception as error:  # of whatever kind the quantizer raises
            raise ModelError(f"{quantizer} cannot quantize {model}: {error}") from error
        finally:
            part.unlink(missing_ok=True)
    return file
