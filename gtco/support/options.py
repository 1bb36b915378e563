"""What a caller may ask of a compile, of tuning and of quantizing, checked when it is made."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from numbers import Real
from pathlib import Path
from typing import Any, Literal, TypedDict

from gtco.support.errors import OptionError
from gtco.support.pipes import standard_stream
from gtco.support.sizes import Range, check_dims

PRECISIONS = {"fp32": "float32", "bf16": "bfloat16"}  # and the dtype that products multiply
GPU_PRECISIONS = {**PRECISIONS, "fp16": "float16"}
ALL_PRECISIONS = (*GPU_PRECISIONS, "int8")  # int8 is for CPUs, and needs samples
LAUNCHES = ("graph", "persistent", "auto")
OBSERVERS = ("auto", "minmax", "percentile", "entropy", "mse")
FLAGS = ("simplify", "verify", "verify_layers", "strict", "cache", "ptx", "fast_algorithms")
MOST_SIZE = 1 << 40  # the largest dimension; no tensor has more elements
MOST_THREADS = 1024  # threads of a library (MAX_THREADS of runtime/csrc/api.c)
MOST_SECONDS = 1e9  # seconds of tuning: 30 years


def whole_number(least: int, most: int | None = None) -> str:
    """The wanted number, in words."""
    wanted = f"of {least} or more" if most is None else f"from {least} to {most}"
    return f"a whole number {wanted}"


def check_whole(name: str, value: Any, least: int, most: int | None = None) -> None:
    """Raises :class:`OptionError` if the option ``name`` is not a whole number from ``least`` to
    ``most``.
    """
    whole = hasattr(value, "__index__") and value >= least and (most is None or value <= most)
    if not whole:
        raise OptionError(f"{name}={value!r}: give {whole_number(least, most)}")


def check_flag(name: str, value: Any) -> None:
    """Raises :class:`OptionError` if the option ``name`` is neither true nor false: "no" would
    count as true.
    """
    if not (isinstance(value, bool) or type(value).__name__ in ("bool_", "bool")):
        raise OptionError(f"{name}={value!r}: give True or False")


def check_number(name: str, value: Any) -> None:
    if not isinstance(value, Real):
        raise OptionError(f"{name}={value!r}: give a number")


def path_of(name: str, value: Any) -> Path:
    """The value given for the option ``name``, as a path."""
    try:
        return Path(value)
    except TypeError:
        raise OptionError(f"{name}={value!r}: give a path") from None


def check_apart(
    output: Path | None, *others: Path | None, what: str = "the model itself"
) -> None:
    """Raises :class:`OptionError` if what is written would replace one of the ``others``, which are
    read or written too. ``what`` names them.
    """
    for other in others:
        if output and other and _same(output, other):
            raise OptionError(f"the output '{output}' is {what}: give another name")


def _same(one: Path, other: Path) -> bool:
    """Whether two paths lead to one file. It need not exist yet."""
    try:
        return one.samefile(other)
    except OSError:
        return os.path.realpath(one) == os.path.realpath(other)


def check_place(path: Path) -> None:
    """Raises :class:`OptionError` if the file's folder does not exist or may not be entered, or the
    file would replace a folder. Called before the work is done.
    """
    if standard_stream(path) is not None:
        return
    try:
        is_folder, has_folder = path.is_dir(), path.parent.is_dir()
        is_device = path.exists() and not path.is_file()
    except OSError as error:
        raise OptionError(
            f"the output '{path}' cannot be written: {error.strerror or error}. Choose another "
            "place"
        ) from error
    if is_folder:
        raise OptionError(f"the output '{path}' is a folder: give the name of a file")
    if not has_folder:
        raise OptionError(f"the folder '{path.parent}' does not exist: make it first")
    if not is_device and not os.access(path.parent, os.W_OK | os.X_OK):
        raise OptionError(
            f"the folder '{path.parent}' cannot be written, so '{path.name}' cannot be made in it: "
            "choose another place"
        )


# who picks kernels and proposes candidates
POLICIES = ("analytic", "language-model", "closed-form")


def check_policy(policy: str) -> None:
    """Raises :class:`OptionError` for a policy that is not there."""
    if policy not in POLICIES:
        raise OptionError(f"unknown policy {policy!r}: choose from {', '.join(POLICIES)}")


@dataclass(frozen=True)
class Tune:
    """How much a compile may measure.

    - ``trials``: at most so many; each is a candidate of a stage
    - ``seconds``: at most so long
    - ``patience``: a stage is done when so many slots in a row have gained nothing
    - ``latency``: a model is done when its stages' times add up to at most so many seconds
    - ``again``: without it, a stage that was measured before, by the records, keeps the config
      found best
    - ``learned``: a cost model that learns from the measurements proposes the candidates, once it
      knows enough (needs XGBoost: the extra ``tune``); without it the analytic policy does
    - ``fusion``: partitions of the graph are measured beside the predicted one, and the best is
      kept
    - ``policy``: who proposes candidates first: ``analytic``, the search that begins at the prices
      of the analytic policy; or ``language-model``, a trained model that writes them as sentences
      (``docs/papers/tlm.md``), or ``closed-form``, trained polynomials that give a product's
      (``docs/papers/dygen.md``), before the search goes on from them
    - ``weights``: a file with the language model, in place of the one that ships with gtco
    """

    trials: int = 1 << 30
    seconds: float = 600.0
    patience: int = 2
    latency: float = 0.0
    again: bool = True
    learned: bool = True
    fusion: bool = False
    policy: str = "analytic"
    weights: str = ""

    def __post_init__(self) -> None:
        check_policy(self.policy)
        if self.weights and self.policy != "language-model":
            raise OptionError(
                f"weights={self.weights!r} are of a language model: give policy='language-model', "
                "which takes them"
            )
        if self.weights:
            path_of("weights", self.weights)
        for flag in ("again", "learned", "fusion"):
            check_flag(flag, getattr(self, flag))
        for name in ("trials", "patience"):
            check_whole(name, getattr(self, name), 1)
        check_number("seconds", self.seconds)
        if not 0 < self.seconds <= MOST_SECONDS:
            raise OptionError(
                f"seconds={self.seconds:g}: give the seconds that tuning may take, at most "
                f"{MOST_SECONDS:g}; tune='off' measures nothing"
            )
        check_number("latency", self.latency)
        if not 0 <= self.latency < inf:
            raise OptionError(f"latency={self.latency:g}: give the seconds that a run may take")


EFFORTS = {
    "quick": Tune(seconds=10.0, patience=2, again=False, learned=False),
    "full": Tune(fusion=True),
}


@dataclass(frozen=True)
class Quantization:
    """How a model is quantized.

    - ``exclude``: products that stay in float, by the name of the node, of its output, of its
      weights or its bias, by a part of such a name (``head``, ``blocks.0``), or by a pattern
      (``blocks.*.fc1``)
    - ``observer``: how the ranges of activations are found: ``minmax``, ``percentile``,
      ``entropy``, ``mse``, or ``auto``, the one with the least error on the samples
    - ``smooth``: ``off``; a strength between 0 and 1, by which the size of activations is moved
      into the weights (SmoothQuant; 0.5 is usual); or ``auto``, the strength with the least error
      on the samples
    - ``max_drop``: how far the outputs may be from the float model's on the held-out samples, in
      percent: the root mean square of the difference over that of the float output. The most
      sensitive products stay in float until it holds. None is no limit
    """

    exclude: Sequence[str] = ()
    observer: str = "auto"
    smooth: str | float = "off"
    max_drop: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.exclude, str) or not all(isinstance(n, str) for n in self.exclude):
            raise OptionError(f"exclude={self.exclude!r}: give a list of names, such as ['head']")
        if self.observer not in OBSERVERS:
            raise OptionError(
                f"unknown observer {self.observer!r}: choose from {', '.join(OBSERVERS)}"
            )
        given = self.smooth
        if given not in ("off", "auto") and not (isinstance(given, Real) and 0 < given < 1):
            raise OptionError(f"smooth={given!r}: give off, auto, or a number between 0 and 1")
        if self.max_drop is not None:
            check_number("max_drop", self.max_drop)
            if not 0 < self.max_drop < inf:
                raise OptionError(
                    f"max_drop={self.max_drop:g}: give a percentage above 0, such as 5"
                )


@dataclass(frozen=True)
class CompileOptions:
    """How to compile.

    - ``target``: ``native`` or a name of ``gtco.machine.target.TARGETS``; for GPUs ``cuda:`` and
      one or several of ``gtco.machine.gpu.ARCHITECTURES``, as ``cuda:sm_80,sm_90a``, or a GPU's
      name
    - ``precision``: ``fp32``, or ``bf16``, which rounds the operands of products, convolutions and
      attention to bfloat16; on GPUs also ``fp16``; on CPUs also ``int8``, which quantizes the model
      first, by ``data``. Everything else stays fp32, including inputs and outputs
    - ``data``, ``exclude``, ``observer``, ``smooth``, ``max_drop``: of ``int8``, the samples and
      how to quantize; see ``gtco.quantize``
    - ``launches``: how a model for GPUs is launched: ``graph``, a CUDA graph with one kernel for
      each stage; ``persistent``, one kernel that goes through all stages (the library has the
      graph's too); or ``auto``, whichever is predicted to be faster. A library of several shapes
      has a graph for each
    - ``ptx``: for GPUs, add the kernels' PTX for one of the architectures to the machine code; a
      newer GPU's driver compiles it when it opens the library
    - ``threads``: of the compiled model, 0 for all allowed cores; only for CPUs
    - ``fast_algorithms``: allow kernels that multiply less than the definition does, Winograd's for
      3x3 convolutions and Strassen's for large products. Without them weights take less memory, and
      results round as a plain sum of products does. Kernels for GPUs have none
    - ``shapes``: sizes of symbolic dimensions by name (``batch``, or by input and axis ``x.0``), or
      an input's whole shape
    - ``dims``: lists of sizes of symbolic dimensions, by the same names, such as
      ``{"batch": [1, 4, 16]}``. Each choice of sizes (the product of the lists) becomes a variant
      in the library, and the shapes of a call's inputs pick the variant. Of a PyTorch module the
      names are by input and axis: ``{"x.0": [1, 4, 16]}``. ``"x.0,y.0"`` are axes of one size. A
      dimension may have a range instead: ``"1..64"``, ``"32..320:32"`` or a
      :class:`gtco.support.sizes.Range`. Along one of them, at which the model computes each sample
      by itself, any size runs as a sum of a few that are compiled, at every choice of the other
      sizes. Every other range is a list
    - ``simplify``, ``simplify_timeout``: run onnxsim, and for how many seconds at most
    - ``workers``: processes that generate code, 0 for one per core
    - ``dump``: the folder for one readable file per phase
    - ``verify``: compare with the source model
    - ``verify_layers``: compare the output of every stage with the graph in float32, through a
      second library that gives them all; each variant of a library of several shapes has its own
      losses. Only for CPUs. With ``int8`` the report has what each product loses without this, and
      it does nothing
    - ``strict``: a failure that gtco would work around (of a rewrite, a sketch or a build) is an
      error instead of a note
    - ``tune``: ``off``; ``quick`` times the best few candidates of the heaviest stages on this
      machine, in some seconds; ``full`` continues until none is better, 10 minutes at most; or a
      :class:`Tune`
    - ``policy``: who picks kernels that were not measured: ``analytic``, the prices of a model of
      the machine; ``language-model``, a trained model that writes them (``docs/papers/tlm.md``);
      or ``closed-form``, trained polynomials that give the products' in constant time
      (``docs/papers/dygen.md``)
    - ``records``: a file of measurements. Configs that stood on this machine are picked, and
      measurements of ``tune`` are added; the file is made if it does not exist. For GPUs a file
      with answers of ``gtco measure``
    - ``farm``: the address of a tuning farm, ``ray://HOST:10001``, whose machines measure instead
      of this one (``docs/farm.md``)
    - ``farm_kind``: the kind of the farm's machines to measure on and to compile for, as ``gtco
      farm check`` names it; "" is the kind of this machine
    - ``cache``: take the library from the cache if the same compile was done before, and keep it
      there if not (``docs/cache.md``)
    """

    target: str = "native"
    precision: str = "fp32"
    launches: str = "graph"
    ptx: bool = True
    threads: int = 0
    fast_algorithms: bool = True
    shapes: Mapping[str, int | Sequence[int]] = field(default_factory=dict)
    dims: Mapping[str, int | str | Sequence[int] | Range] = field(default_factory=dict)
    simplify: bool = True
    simplify_timeout: float = 120.0
    workers: int = 0
    dump: Path | None = None
    verify: bool = False
    verify_layers: bool = False
    strict: bool = False
    tune: str | Tune = "off"
    policy: str = "analytic"
    records: Path | None = None
    farm: str = ""
    farm_kind: str = ""
    cache: bool = True
    data: Any = None
    exclude: Sequence[str] = ()
    observer: str = "auto"
    smooth: str | float = "off"
    max_drop: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.target, str):
            raise OptionError(f"target={self.target!r}: give a name, such as 'native'")
        check_policy(self.policy)
        for name in FLAGS:
            check_flag(name, getattr(self, name))
        check_whole("threads", self.threads, 0, MOST_THREADS)
        check_whole("workers", self.workers, 0)
        check_number("simplify_timeout", self.simplify_timeout)
        if not 0 < self.simplify_timeout < inf:
            raise OptionError(
                f"simplify_timeout={self.simplify_timeout:g}: give seconds above 0; simplify=False "
                "leaves onnxsim out"
            )
        if not isinstance(self.shapes, Mapping):
            raise OptionError(f"shapes={self.shapes!r}: give a dictionary, such as {{'batch': 1}}")
        for name, size in self.shapes.items():
            whole = hasattr(size, "__len__") and not isinstance(size, str)
            for one in size if whole else [size]:  # type: ignore[union-attr]
                check_whole(f"shapes[{name!r}]", one, 1, MOST_SIZE)
        check_dims(self.dims, self.shapes)
        if self.precision not in ALL_PRECISIONS:
            raise OptionError(
                f"unknown precision {self.precision!r}: choose from {', '.join(ALL_PRECISIONS)}"
            )
        if self.precision != "int8" and (self.data is not None or self.quantization != _DEFAULT):
            raise OptionError(
                "data, exclude, observer, smooth and max_drop are of precision int8, and precision "
                f"is {self.precision}: leave them out, or compile for int8"
            )
        for name in ("farm", "farm_kind"):
            if not isinstance(getattr(self, name), str):
                raise OptionError(f"{name}={getattr(self, name)!r}: give a text")
        if self.farm_kind and not self.farm:
            raise OptionError(f"farm_kind={self.farm_kind!r} is of a farm: give farm too")
        if self.farm and self.target != "native":
            raise OptionError(
                f"farm={self.farm!r}, target={self.target!r}: a farm's machines say what code is "
                "for; farm_kind (--kind) names their kind"
            )
        if self.farm and self.tune == "off":
            raise OptionError(f"farm={self.farm!r} is for measuring, and tune is off: leave it out")
        if self.launches not in LAUNCHES:
            raise OptionError(
                f"unknown launches {self.launches!r}: choose from {', '.join(LAUNCHES)}"
            )

    @property
    def quantization(self) -> Quantization:
        """How ``int8`` is made."""
        return Quantization(tuple(self.exclude), self.observer, self.smooth, self.max_drop)


_DEFAULT = Quantization()


class CompileKeywords(TypedDict, total=False):
    """The fields of :class:`CompileOptions` as keyword arguments, for editors and type checkers.
    None is the default. An option that accepts only some strings also has the type ``str``, for
    callers whose strings come from elsewhere; its value is checked when the options are made.
    """

    target: str | None
    precision: Literal["fp32", "bf16", "fp16", "int8"] | str | None
    launches: Literal["graph", "persistent", "auto"] | str | None
    ptx: bool | None
    threads: int | None
    fast_algorithms: bool | None
    shapes: Mapping[str, int | Sequence[int]] | None
    dims: Mapping[str, int | str | Sequence[int] | Range] | None
    simplify: bool | None
    simplify_timeout: float | None
    workers: int | None
    dump: str | os.PathLike[str] | None
    verify: bool | None
    verify_layers: bool | None
    strict: bool | None
    tune: Literal["off", "quick", "full"] | str | Tune | None
    policy: Literal["analytic", "language-model", "closed-form"] | str | None
    records: str | os.PathLike[str] | None
    farm: str | None
    farm_kind: str | None
    cache: bool | None
    data: Any
    exclude: Sequence[str] | None
    observer: Literal["auto", "minmax", "percentile", "entropy", "mse"] | str | None
    smooth: Literal["off", "auto"] | str | float | None
    max_drop: float | None


class QuantizeKeywords(TypedDict, total=False):
    """The fields of :class:`Quantization` as keyword arguments; None is the default."""

    exclude: Sequence[str] | None
    observer: Literal["auto", "minmax", "percentile", "entropy", "mse"] | str | None
    smooth: Literal["off", "auto"] | str | float | None
    max_drop: float | None
