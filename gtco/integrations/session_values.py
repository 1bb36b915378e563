"""What a session shows and takes: its inputs and outputs, tensors in ONNX Runtime's form, and
tensors that are bound to a session's inputs and outputs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from gtco.integrations.session_options import refuse
from gtco.support.dtypes import numpy_dtype
from gtco.support.errors import InputError

# numpy's name of a dtype, and what is in the brackets of ONNX Runtime's "tensor(...)"
_TYPES = {"float32": "float", "float64": "double"}
# ONNX's numbers of element types
_NUMBERS = {
    1: "float32",
    2: "uint8",
    3: "int8",
    4: "uint16",
    5: "int16",
    6: "int32",
    7: "int64",
    9: "bool",
    10: "float16",
    11: "float64",
    12: "uint32",
    13: "uint64",
    16: "bfloat16",
}


def type_of(dtype: str) -> str:
    """``tensor(float)`` for float32, and so on."""
    return f"tensor({_TYPES.get(dtype, dtype)})"


def dtype_of(kind: str) -> str:
    """numpy's name of the dtype, from :func:`type_of`."""
    name = kind.removeprefix("tensor(").removesuffix(")")
    return next((dtype for dtype, said in _TYPES.items() if said == name), name)


@dataclass(frozen=True)
class NodeArg:
    """An input or an output: its name, its type (``tensor(float)``), and its shape, in which a size
    that is open is the dimension's name, or None if it has none.
    """

    name: str
    type: str
    shape: list[int | str | None]


@dataclass(frozen=True)
class ModelMetadata:
    """What the model's file says about itself; empty for a library."""

    producer_name: str = ""
    graph_name: str = ""
    domain: str = ""
    description: str = ""
    graph_description: str = ""
    version: int = 0
    custom_metadata_map: Mapping[str, str] = field(default_factory=dict)


_DEVICES = "a session's tensors are in the CPU's memory; gtco.load takes tensors on GPUs"


def check_cpu(device_type: str) -> None:
    if device_type != "cpu":
        raise InputError(f"device_type={device_type!r}: {_DEVICES}")


class OrtValue:
    """A tensor in the CPU's memory. It shares the memory of the array that it was made from."""

    _ADVICE = {  # noqa: RUF012
        "as_sparse_tensor": "tensors are dense",
        "ort_value_from_sparse_tensor": "tensors are dense",
        "ortvalue_from_numpy_with_onnx_type": "use ortvalue_from_numpy; numpy has bfloat16 by "
        "way of ml_dtypes",
        "from_dlpack": "use ortvalue_from_numpy(numpy.from_dlpack(x)); a session's run takes "
        "tensors with DLPack as they are",
    }

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def __getattr__(self, name: str) -> Any:
        refuse("OrtValue", self._ADVICE, name)

    @staticmethod
    def ortvalue_from_numpy(
        numpy_obj: np.ndarray, device_type: str = "cpu", device_id: int = 0
    ) -> OrtValue:
        check_cpu(device_type)
        return OrtValue(numpy_obj)

    @staticmethod
    def ortvalue_from_shape_and_type(
        shape: Sequence[int], element_type: Any, device_type: str = "cpu", device_id: int = 0
    ) -> OrtValue:
        check_cpu(device_type)
        return OrtValue(np.empty(tuple(shape), _dtype(element_type)))

    def numpy(self) -> np.ndarray:
        return self._array

    def shape(self) -> list[int]:
        return list(self._array.shape)

    def data_type(self) -> str:
        return type_of(self._array.dtype.name)

    def element_type(self) -> int:
        return next(n for n, name in _NUMBERS.items() if name == self._array.dtype.name)

    def device_name(self) -> str:
        return "cpu"

    def data_ptr(self) -> int:
        return int(self._array.ctypes.data)

    def tensor_size_in_bytes(self) -> int:
        return int(self._array.nbytes)

    def has_value(self) -> bool:
        return True

    def is_tensor(self) -> bool:
        return True

    def is_sparse_tensor(self) -> bool:
        return False

    def is_tensor_sequence(self) -> bool:
        return False

    def update_inplace(self, np_arr: np.ndarray) -> None:
        """Copies the array, of the same dtype and shape, into this tensor."""
        if np_arr.shape != self._array.shape or np_arr.dtype != self._array.dtype:
            raise InputError(
                f"update_inplace takes {self._array.dtype} of shape {self._array.shape}, and got "
                f"{np_arr.dtype} of shape {np_arr.shape}"
            )
        np.copyto(self._array, np_arr)


def _dtype(element_type: Any) -> np.dtype[Any]:
    """The dtype that a numpy type or ONNX's number of it means."""
    if isinstance(element_type, int):
        if element_type not in _NUMBERS:
            raise InputError(f"gtco has no tensors of ONNX's element type {element_type}")
        return numpy_dtype(_NUMBERS[element_type])
    return np.dtype(element_type)


def at_address(element_type: Any, shape: Sequence[int], address: int) -> np.ndarray:
    """The array that is at this address. The caller keeps the memory."""
    dtype = _dtype(element_type)
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    buffer: Any = (ctypes.c_char * size).from_address(address)  # a buffer, which ctypes' types hide
    return np.ndarray(tuple(shape), dtype, buffer)


class Binder(Protocol):
    """The session of an :class:`IOBinding`."""

    def get_inputs(self) -> list[NodeArg]: ...
    def get_outputs(self) -> list[NodeArg]: ...


class IOBinding:
    """Tensors for the inputs and outputs of ``session.run_with_iobinding``. An output that is bound
    without memory gets an array of its own in each run.
    """

    _ADVICE = {  # noqa: RUF012
        "get_outputs_as_ortvaluevector": "use get_outputs",
    }

    def __init__(self, session: Binder) -> None:
        self._inputs_known = [i.name for i in session.get_inputs()]
        self._outputs_known = [o.name for o in session.get_outputs()]
        self.inputs: dict[str, Any] = {}
        self.outputs: dict[str, np.ndarray | None] = {}
        self.results: dict[str, np.ndarray] = {}

    def __getattr__(self, name: str) -> Any:
        refuse("IOBinding", self._ADVICE, name)

    def bind_cpu_input(self, name: str, arr_on_cpu: Any) -> None:
        _check_known("input", name, self._inputs_known)
        self.inputs[name] = arr_on_cpu

    def bind_input(
        self,
        name: str,
        device_type: str,
        device_id: int,
        element_type: Any,
        shape: Sequence[int],
        buffer_ptr: int,
    ) -> None:
        check_cpu(device_type)
        self.bind_cpu_input(name, at_address(element_type, shape, buffer_ptr))

    def bind_ortvalue_input(self, name: str, ortvalue: OrtValue) -> None:
        self.bind_cpu_input(name, ortvalue.numpy())

    def bind_output(
        self,
        name: str,
        device_type: str = "cpu",
        device_id: int = 0,
        element_type: Any = None,
        shape: Sequence[int] | None = None,
        buffer_ptr: int | None = None,
    ) -> None:
        check_cpu(device_type)
        _check_known("output", name, self._outputs_known)
        if buffer_ptr is None:
            self.outputs[name] = None
        elif element_type is None or shape is None:
            raise InputError("memory for an output needs its element_type and its shape")
        else:
            self.outputs[name] = at_address(element_type, shape, buffer_ptr)

    def bind_ortvalue_output(self, name: str, ortvalue: OrtValue) -> None:
        _check_known("output", name, self._outputs_known)
        self.outputs[name] = ortvalue.numpy()

    def get_outputs(self) -> list[OrtValue]:
        return [OrtValue(array) for array in self.results.values()]

    def copy_outputs_to_cpu(self) -> list[np.ndarray]:
        return [
            array if self.outputs.get(name) is None else array.copy()  # bound memory is reused
            for name, array in self.results.items()
        ]

    def clear_binding_inputs(self) -> None:
        self.inputs.clear()

    def clear_binding_outputs(self) -> None:
        self.outputs.clear()
        self.results.clear()

    def synchronize_inputs(self) -> None:
        """Nothing is under way on a CPU."""

    def synchronize_outputs(self) -> None:
        """Nothing is under way on a CPU."""


def _check_known(kind: str, name: str, known: Sequence[str]) -> None:
    if name not in known:
        raise InputError(f"there is no {kind} '{name}'; the {kind}s are {', '.join(known)}")
