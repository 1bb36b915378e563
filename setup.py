"""Packaging of gtco: ``pip install .`` for the compiler, ``.[bench]`` and so on for its extras."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent

# The two halves of TVM are pinned together: apache-tvm 0.27.0.post1 by itself admits tvm-ffi
# 0.1.15, and that pair crashes the process (in tensorize, among others).
TVM = ["apache-tvm==0.27.0.post1", "apache-tvm-ffi==0.1.14.post1"]
# Pinned because an unpinned torch may bring gigabytes of CUDA where only the CPU build is wanted.
TORCH = ["torch==2.13.0", "onnxscript"]
PEERS = ["onnxruntime", "openvino"]
# XGBoost without the NCCL of its main wheel; with scipy, which it needs, 160 MB. Only a tuner that
# learns asks for it.
LEARNING = ["xgboost-cpu"]
# Scripts for shells, made from the command line's parsers.
COMPLETION = ["shtab"]
# docs/ as a site.
SITE = ["mkdocs-material"]
# Compiling for NVIDIA GPUs, with no toolkit and no GPU: NVRTC and its bindings, of one version, so
# that the code is the same everywhere. CUDA 13 starts at sm_75.
CUDA = ["cuda-bindings==13.0.*", "nvidia-cuda-nvrtc==13.0.*"]
# The HTML report: vl-convert-python draws charts (Vega-Lite is inside), fast-sugiyama lays out the
# graph, jinja2 puts the page together. 35 MB to download, nearly all of it vl-convert's.
REPORT = ["vl-convert-python", "fast-sugiyama; python_version >= '3.11'", "jinja2"]
# Tuning on several machines. 80 MB to download, 240 MB installed, and 7 s.
FARM = ["ray[client]>=2.52"]  # the first with tokens
# What reads machine code for GPUs, in tests alone.
CUDA_TOOLS = ["nvidia-cuda-nvcc", "nvidia-cuda-nvdisasm", "nvidia-cuda-cuobjdump"]

EXTRAS = {
    "torch": TORCH,
    "tune": LEARNING,
    "train": [*TORCH, "transformers"],  # for a language model of one's own: what it learns from too
    "completion": COMPLETION,
    "docs": SITE,
    "cuda": CUDA,
    "report": REPORT,
    "farm": FARM,
    "demo": [*TORCH, "onnxruntime", "safetensors"],
    "bench": [*TORCH, *PEERS, *LEARNING, "nncf", "psutil", "rich", "safetensors", "transformers"],
    "test": [
        *TORCH,
        "pytest",
        "pytest-timeout",
        "pytest-xdist",
        "hypothesis",
        "expecttest",  # torch's own samples of its operators need it
        "ruff",
        "mypy",
        *PEERS,
        *LEARNING,
        *COMPLETION,
        *SITE,
        "transformers",
        "psutil",
        "rich",
        "safetensors",
        "scikit-learn",  # its digits are what small models are trained on
        *CUDA,
        *CUDA_TOOLS,
        *REPORT,
        *FARM,
        "jsonschema",
    ],
}


BESIDE = ("bench", "models")


def version() -> str:
    """``__version__`` of gtco/support/version.py, read and not imported: gtco's
    requirements may be absent.
    """
    text = (ROOT / "gtco" / "support" / "version.py").read_text()
    found = re.search(r'^__version__ = "([^"]+)"', text, re.MULTILINE)
    if not found:
        raise SystemExit("setup.py: gtco/support/version.py has no line that sets __version__")
    return found.group(1)


def long_description() -> str:
    readme = ROOT / "README.md"
    return readme.read_text() if readme.is_file() else ""


setup(
    name="gtco",
    version=version(),
    description="Compiles vision transformers (ONNX, PyTorch) to one standalone shared library",
    long_description=long_description(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    # The folders models and bench would shadow a user's own: they are installed inside gtco.
    packages=[
        *find_packages(include=["gtco", "gtco.*"]),
        *(f"gtco.{name}" for name in find_packages(include=[*BESIDE, *(f"{n}.*" for n in BESIDE)])),
    ],
    package_dir={f"gtco.{name}": name for name in BESIDE},
    package_data={
        "gtco.runtime": ["csrc/*.*", "csrc/cpu/*", "csrc/cuda/*", "csrc/products/*"],
        "gtco.search.records": ["measured/*.jsonl"],
        "gtco.search.closed_form": ["*.json"],
        "gtco.search.language": ["*.npz"],
        "gtco.tensor.cuda": ["device/gtco/*.cuh"],
        "gtco.report": ["schema.json", "templates/*"],
        "gtco": ["py.typed"],
        "gtco.bench.closed_form": ["*.c", "*.csv"],
        "gtco.bench.kernels": ["*.c", "*.csv"],
    },
    install_requires=[*TVM, "numpy", "ml_dtypes", "onnx", "onnxsim", "networkx"],
    extras_require=EXTRAS,
    entry_points={
        "console_scripts": ["gtco=gtco.__main__:main"],
        "torch_dynamo_backends": ["gtco=gtco.integrations.torch_compile:backend"],
    },
    classifiers=[
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
    ],
)
