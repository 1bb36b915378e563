"""The model as it was given: opened, and read as Relax by the importer for its kind."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gtco.driver.sizes.shared import Shared
from gtco.frontend.source import is_onnx, source_of
from gtco.support.errors import OptionError
from gtco.support.options import CompileOptions

if TYPE_CHECKING:
    from gtco.frontend.imported import ImportedModel


class Source:
    """A model and the inputs that it is exported with, or a ``partial`` that makes them.
    ``shared``: what it has in common with the other variants of its library.
    """

    def __init__(self, model: Any, example_inputs: Any, shared: Shared | None) -> None:
        self.model, self._examples, self.shared = source_of(model), example_inputs, shared
        self._opened: Any = None  # between opening and reading it

    @property
    def example_inputs(self) -> Any:
        return self._examples() if isinstance(self._examples, partial) else self._examples

    def opened(self, options: CompileOptions) -> Any:
        """The model as its frontend opens it: an ``OnnxSource``, or for PyTorch what ``export``
        gives. It is kept until the model is read.
        """
        if self._opened is not None:
            return self._opened
        if is_onnx(self.model):
            from gtco.frontend.onnx import read_onnx

            if self.example_inputs is not None:
                raise OptionError(
                    "example_inputs is for PyTorch modules; an ONNX model has its inputs' shapes, "
                    "and shapes gives symbolic ones their values"
                )
            open_onnx = partial(read_onnx, self.model)
            self._opened = self.shared.read(open_onnx) if self.shared else open_onnx()
        else:
            from gtco.frontend.pytorch.export import export, load_program

            if isinstance(path := self.model, Path):
                read = partial(load_program, path)
                self.model = self.shared.read(read) if self.shared else read()
            self._opened = export(self.model, self.example_inputs, shapes=options.shapes)
        return self._opened

    def close(self) -> None:
        """Lets go of an opened model."""
        self._opened = None

    def read(self, options: CompileOptions, float16: bool) -> ImportedModel:
        """Model -> Relax. Without ``float16``, float16 becomes float32."""
        opened = self.opened(options)
        self.close()
        load: Callable[..., ImportedModel]
        if is_onnx(self.model):
            from gtco.frontend.onnx import load_onnx

            load = load_onnx
        else:
            from gtco.frontend.pytorch.load import load_pytorch

            load = load_pytorch
        return load(
            opened,
            shapes=options.shapes,
            simplify=options.simplify,
            simplify_timeout=options.simplify_timeout,
            float16=float16,
        )
