"""Options of a gtco.InferenceSession, its tensors, and memory that is bound to its outputs."""
# ruff: noqa: F401, F811 (fixtures are imported, and arguments of the same name)

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper

import gtco
from gtco.integrations.session_options import spinning_of
from gtco.integrations.session_values import _NUMBERS
from gtco.support.errors import InputError, OptionError
from tests.integrations.test_inference_session import feeds, model, sessions, two_ends


# options ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("entry", "milliseconds"), [(None, None), ("1", None), ("0", 0)])
def test_threads_sleep_at_once_if_they_may_not_spin(entry, milliseconds):
    """None is the library's own time."""
    options = gtco.SessionOptions()
    if entry is not None:
        options.add_session_config_entry("session.intra_op.allow_spinning", entry)
    assert spinning_of(options) == milliseconds


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("session.set_denormal_as_zero", "0"),  # they are zero
        ("session.intra_op.allow_spinning", "2"),
    ],
)
def test_config_entries_with_other_values_are_refused(key, value):
    with pytest.raises(OptionError, match=key.replace(".", r"\.") + f"='{value}'"):
        gtco.SessionOptions().add_session_config_entry(key, value)


@pytest.mark.parametrize("level", gtco.GraphOptimizationLevel)
def test_levels_below_the_extended_one_are_refused(level):
    """gtco always does more than they ask for."""
    options = gtco.SessionOptions()
    if level in (0, 1):
        with pytest.raises(OptionError, match="graph_optimization_level"):
            options.graph_optimization_level = level
    else:
        options.graph_optimization_level = level
        assert options.graph_optimization_level == level


def test_a_size_for_a_library_is_refused(tmp_path):
    """Its sizes are those that it was compiled for."""
    path = tmp_path / "m.so"
    gtco.compile_to_file(two_ends(2), path)
    options = gtco.SessionOptions()
    options.add_free_dimension_override_by_name("rows", 4)
    with pytest.raises(OptionError, match="rows: that is of a compile"):
        gtco.InferenceSession(path, options)


# tensors ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("number", _NUMBERS)
def test_numbers_of_element_types_are_onnxs(number):
    value = gtco.OrtValue.ortvalue_from_shape_and_type([2], number)
    assert value.numpy().dtype == helper.tensor_dtype_to_np_dtype(number)
    assert value.element_type() == number


def test_a_tensor_is_overwritten_by_one_of_its_shape_and_dtype_alone():
    value = gtco.OrtValue.ortvalue_from_numpy(np.zeros((2, 3), np.float32))
    for wrong in (np.ones((2, 3)), np.ones((1, 3), np.float32), np.float32(1)):
        with pytest.raises(InputError, match=r"update_inplace takes float32 of shape \(2, 3\)"):
            value.update_inplace(wrong)
    assert not value.numpy().any()
    value.update_inplace(np.ones((2, 3), np.float32))
    assert (value.numpy() == 1).all()


# memory -------------------------------------------------------------------------------------------
def bound(session, output=None):
    """A binding of both inputs and of the output y, into this memory if it is given."""
    binding = session.io_binding()
    for name, value in feeds().items():
        binding.bind_cpu_input(name, value)
    if output is None:
        binding.bind_output("y")
    else:
        binding.bind_ortvalue_output("y", gtco.OrtValue.ortvalue_from_numpy(output))
    return binding


@pytest.mark.parametrize(
    "memory",
    [np.zeros((2, 6)), np.zeros((2, 6), np.float16), np.zeros((3, 6), np.float32)],
    ids=lambda memory: f"{memory.dtype}{list(memory.shape)}",
)
def test_memory_of_another_dtype_or_shape_is_refused(sessions, memory):
    ours, _ = sessions
    said = rf"output 'y' is float32 of shape \(2, 6\), and memory is bound for {memory.dtype} of"
    with pytest.raises(InputError, match=said):
        ours.run_with_iobinding(bound(ours, memory))
    assert not memory.any()


def test_memory_needs_a_type_and_a_shape(sessions):
    binding, memory = sessions[0].io_binding(), np.zeros((2, 6), np.float32)
    for given in ({}, {"shape": [2, 6]}, {"element_type": np.float32}):
        with pytest.raises(InputError, match="needs its element_type and its shape"):
            binding.bind_output("y", buffer_ptr=memory.ctypes.data, **given)


def test_a_binding_that_is_cleared_has_no_results(sessions):
    binding = bound(sessions[0])
    sessions[0].run_with_iobinding(binding)
    assert len(binding.get_outputs()) == 1
    binding.clear_binding_outputs()
    assert binding.get_outputs() == [] == binding.copy_outputs_to_cpu()
