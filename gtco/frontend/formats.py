"""Other formats of models, by the endings of their file names, and advice for each."""

from __future__ import annotations

from pathlib import Path

_SOURCE = "give gtco the ONNX file that it was made from"
_ADVICE = {
    ".pt .pth .bin .ckpt .safetensors": "PyTorch's weights, without the graph: load them into the "
    "module and give that to gtco.compile_model, or export it with torch.onnx.export (.onnx) or "
    "torch.export.save (.pt2)",
    ".tflite .h5 .keras .pb": "TensorFlow's: convert it with tf2onnx",
    ".xml": f"OpenVINO's: {_SOURCE}",
    ".engine .plan": f"TensorRT's: {_SOURCE}",
    ".ort": f"ONNX Runtime's own: {_SOURCE}",
    ".mlmodel .mlpackage": f"Core ML's: {_SOURCE}",
}


def advice(path: Path | None) -> str:
    """What a file that is not ONNX seems to be by its name, and what to do; "" if the name tells
    nothing.
    """
    suffix = "" if path is None else path.suffix.lower()
    for suffixes, said in _ADVICE.items():
        if suffix in suffixes.split():
            return f"'{suffix}' is {said}"
    return ""
