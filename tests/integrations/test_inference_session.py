"""gtco.InferenceSession beside ONNX Runtime's: one script with either import gives the same."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import threading
import warnings

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

import gtco
from gtco.integrations import inference_session, session_options, session_values
from gtco.integrations.session_options import NotHere
from gtco.support.errors import GtcoError, InputError, OptionError
from tests.driver.test_compiler import mlp

RNG = np.random.default_rng(0)


def two_ends(rows: int | str) -> onnx.ModelProto:
    """Two inputs (float, int64), and three outputs: one of no axes and one of int64."""
    weight = RNG.standard_normal((6, 6)).astype(np.float32)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["y"]),
        helper.make_node("ReduceSum", ["y"], ["sum"], keepdims=0),
        helper.make_node("Add", ["n", "n"], ["twice"]),
    ]
    tensor = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "two_ends",
        [tensor("x", TensorProto.FLOAT, [rows, 6]), tensor("n", TensorProto.INT64, [3])],
        [
            tensor("y", TensorProto.FLOAT, [rows, 6]),
            tensor("sum", TensorProto.FLOAT, []),
            tensor("twice", TensorProto.INT64, [3]),
        ],
        [onnx.numpy_helper.from_array(weight, "w")],
    )
    made = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10, producer_name="tests"
    )
    made.metadata_props.add(key="task", value="none")
    return made


def feeds(rows=2):
    return {
        "x": RNG.standard_normal((rows, 6)).astype(np.float32),
        "n": np.arange(3, dtype=np.int64),
    }


@pytest.fixture(scope="module")
def model():
    return two_ends(2)


@pytest.fixture(scope="module")
def sessions(model):
    """A session of each, with one thread."""

    def session(runtime):
        options = runtime.SessionOptions()
        options.intra_op_num_threads = 2
        options.inter_op_num_threads = 1
        options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_ALL
        options.execution_mode = runtime.ExecutionMode.ORT_SEQUENTIAL
        options.log_severity_level = 3
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"
        return runtime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )

    return session(gtco), session(onnxruntime)


def check_same(ours, theirs):
    assert type(ours) is type(theirs) is list
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == other.dtype and mine.shape == other.shape
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-5)


def test_the_same_script_describes_the_same_model(sessions):
    def described(session):
        meta = session.get_modelmeta()
        nodes = [*session.get_inputs(), *session.get_outputs()]
        return (
            [(node.name, node.type, node.shape) for node in nodes],
            session.get_providers(),
            session.get_overridable_initializers(),
            session.get_session_options().intra_op_num_threads,
            session.get_provider_options(),
            (meta.graph_name, meta.producer_name, dict(meta.custom_metadata_map)),
        )

    ours, theirs = map(described, sessions)
    assert ours == theirs


def test_the_same_script_runs(sessions):
    given = feeds()

    def runs(session, runtime):
        every = session.run(None, given)
        some = session.run(["twice", "y"], given, None)
        none = session.run([], given, runtime.RunOptions())
        lists = session.run(["y"], {"x": given["x"].tolist(), "n": given["n"]})
        wrapped = {name: runtime.OrtValue.ortvalue_from_numpy(v) for name, v in given.items()}
        values = session.run_with_ort_values(["y"], wrapped)
        assert values[0].data_type() == "tensor(float)" and values[0].shape() == [2, 6]
        return [*every, *some, *none, *lists, values[0].numpy(), *session.run(["sum"], wrapped)]

    ours, theirs = sessions
    check_same(runs(ours, gtco), runs(theirs, onnxruntime))


def test_the_same_script_binds(sessions):
    given = feeds()

    def binds(session, runtime):
        binding = session.io_binding()
        binding.bind_cpu_input("x", given["x"])
        binding.bind_ortvalue_input("n", runtime.OrtValue.ortvalue_from_numpy(given["n"]))
        binding.bind_output("y")
        memory = runtime.OrtValue.ortvalue_from_shape_and_type([3], np.int64)
        binding.bind_ortvalue_output("twice", memory)
        binding.synchronize_inputs()
        session.run_with_iobinding(binding)
        binding.synchronize_outputs()
        first = [value.numpy().copy() for value in binding.get_outputs()]
        copies = binding.copy_outputs_to_cpu()
        memory.numpy()[:] += 1  # the copies are the caller's
        first += [memory.numpy().copy(), *copies]
        # every output into memory of the caller's
        binding.clear_binding_outputs()
        x = np.ascontiguousarray(given["x"] + 1)
        binding.bind_input("x", "cpu", 0, np.float32, [2, 6], x.ctypes.data)
        places = np.empty((2, 6), np.float32), np.empty((), np.float32), np.empty(3, np.int64)
        for name, place in zip(("y", "sum", "twice"), places, strict=True):
            kind = place.dtype.type
            binding.bind_output(name, "cpu", 0, kind, list(place.shape), place.ctypes.data)
        session.run_with_iobinding(binding)
        binding.clear_binding_inputs()
        return [*first, *places]

    ours, theirs = sessions
    check_same(binds(ours, gtco), binds(theirs, onnxruntime))


def test_the_same_script_runs_asynchronously(sessions):
    given = feeds()

    def asynchronous(session):
        done, found = threading.Event(), []

        def callback(results, user_data, error):
            found.append((results, user_data, error, threading.get_ident()))
            done.set()

        session.run_async(["y", "twice"], given, callback, "mine")
        assert done.wait(60)
        ((results, user_data, error, thread),) = found
        assert user_data == "mine" and not error and thread != threading.get_ident()
        return results

    check_same(*map(asynchronous, sessions))
    done, errors = threading.Event(), []

    def failed(results, user_data, error):
        errors.append((results, error))
        done.set()

    sessions[0].run_async(None, {"x": given["x"]}, failed, None)
    assert done.wait(60)
    assert errors[0][0] == [] and "missing input 'n'" in errors[0][1]


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"x": feeds()["x"]},
        {**feeds(), "x": np.zeros((3, 6), np.float32)},
        {**feeds(), "x": np.zeros((2, 6))},
        {**feeds(), "x": [[1.0, 2.0], [3.0]]},
        {**feeds(), "more": np.zeros(1)},
    ],
)
def test_what_onnxruntime_refuses_is_refused(sessions, wrong):
    ours, theirs = sessions
    with pytest.raises(Exception):  # noqa: B017 (its errors have no base of their own)
        theirs.run(None, wrong)
    with pytest.raises(InputError):
        ours.run(None, wrong)
    with pytest.raises(ValueError, match="no output 'none'"):
        ours.run(["none"], feeds())


def test_a_library_as_a_file_and_as_bytes(model, tmp_path):
    path = tmp_path / "m.so"
    gtco.compile_to_file(model, path)
    given = feeds()
    expected = onnxruntime.InferenceSession(model.SerializeToString()).run(None, given)
    for source in (path, str(path), path.read_bytes()):
        session = gtco.InferenceSession(source)
        check_same(session.run(None, given), expected)
        assert [i.type for i in session.get_inputs()] == ["tensor(float)", "tensor(int64)"]
    with pytest.raises(OptionError, match="precision: that is of a compile"):
        gtco.InferenceSession(path, precision="bf16")
    # nothing heavy is imported to open one
    heavy = ["tvm", "onnx", "torch"]
    script = (
        f"import gtco as ort, sys\nort.InferenceSession({str(path)!r}).get_inputs()\n"
        f"print(*[m for m in {heavy} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stdout.strip(), done.stderr + done.stdout


def test_open_sizes_are_compiled_when_they_are_run(tmp_path, monkeypatch):
    model = two_ends("rows")
    onnx.save(model, tmp_path / "m.onnx")
    ours = gtco.InferenceSession(tmp_path / "m.onnx", threads=1)
    theirs = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    for session in (ours, theirs):
        assert session.get_inputs()[0].shape == ["rows", 6]
    for rows in (1, 4, 1):
        given = feeds(rows)
        check_same(ours.run(None, given), theirs.run(None, given))
    assert len(ours._models) == 2
    with pytest.raises(InputError, match=r"shape \(2, 7\), and the model takes \['rows', 6\]"):
        ours.run(None, {**feeds(), "x": np.zeros((2, 7), np.float32)})
    with pytest.raises(InputError, match="missing input 'n'"):
        ours.run(None, {"x": feeds()["x"]})
    with pytest.raises(InputError, match=r"'x' .*\(0, 6\), which has no elements"):
        ours.run(None, feeds(0))
    options = gtco.SessionOptions()
    options.add_free_dimension_override_by_name("rows", 4)
    fixed = gtco.InferenceSession(model.SerializeToString(), options)
    assert fixed.get_inputs()[0].shape == [4, 6]
    assert fixed._source is None and ours._source is not None  # weights are kept once
    given = feeds(4)
    check_same(fixed.run(None, given), theirs.run(None, given))


@pytest.mark.parametrize("gone", [True, False])
def test_a_session_stays_with_the_model_that_it_read(tmp_path, gone):
    """Whatever becomes of the file; ONNX Runtime does so too."""
    path = tmp_path / "m.onnx"
    onnx.save(two_ends("rows"), path)
    ours = gtco.InferenceSession(path, threads=1)
    theirs = onnxruntime.InferenceSession(path)
    for rows in (1, 4):
        given = feeds(rows)
        check_same(ours.run(None, given), theirs.run(None, given))
        if gone:
            path.unlink(missing_ok=True)
        else:
            onnx.save(two_ends("rows"), path)


def test_a_forked_child_runs_asynchronously(model):
    session = gtco.InferenceSession(model.SerializeToString(), threads=1)
    done = threading.Event()

    def run():
        done.clear()
        session.run_async(None, feeds(), lambda results, data, error: done.set(), None)
        return done.wait(60)

    assert run()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there are threads
        child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if run() else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert run()


def test_what_is_no_tensor_is_said():
    tensor = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])
    kind = helper.make_sequence_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, [2]))
    node = helper.make_node("SequenceConstruct", ["x"], ["y"])
    output = helper.make_value_info("y", kind)
    file = helper.make_model(helper.make_graph([node], "g", [tensor], [output]), ir_version=9)
    with pytest.raises(GtcoError, match=r"'y' is not a tensor \(sequence_type\)"):
        gtco.InferenceSession(file.SerializeToString())


@pytest.mark.parametrize("sizes", [(-1, "?", "?"), ("?", None, -1)])
def test_sizes_that_exporters_write_for_unknown_are_open(sizes):
    """PaddlePaddle's write -1, and ``?`` for sizes that differ."""
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"])],
        "relu",
        [info("x", TensorProto.FLOAT, sizes)],
        [info("y", TensorProto.FLOAT, sizes)],
    )
    opset = [helper.make_opsetid("", 17)]
    file = helper.make_model(graph, opset_imports=opset, ir_version=9).SerializeToString()
    ours, theirs = gtco.InferenceSession(file, threads=1), onnxruntime.InferenceSession(file)
    assert ours.get_inputs()[0].shape == theirs.get_inputs()[0].shape
    for shape in ((2, 3, 4), (2, 5, 4)):  # of one batch
        given = {"x": np.random.default_rng(0).normal(size=shape).astype(np.float32)}
        check_same(ours.run(None, given), theirs.run(None, given))


def test_a_session_says_why_it_cannot_be_pickled(sessions):
    for made in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match="Make it in the process that runs it"):
            made(sessions[0])


def test_providers(sessions):
    ours, _ = sessions
    assert gtco.get_available_providers() == ["CPUExecutionProvider"]
    assert gtco.get_device() == onnxruntime.get_device() == "CPU"
    ours.set_providers(["CPUExecutionProvider"])
    ours.disable_fallback(), ours.enable_fallback()
    with pytest.warns(UserWarning, match="gtco has no CUDAExecutionProvider"):
        ours.set_providers([("CUDAExecutionProvider", {"device_id": 0}), "CPUExecutionProvider"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours.set_providers(["CPUExecutionProvider", "AzureExecutionProvider"])
    with pytest.raises(OptionError, match="target='cuda"):
        ours.set_providers(["CUDAExecutionProvider"])


def public(thing):
    return {name for name in dir(thing) if not name.startswith("_")}


@pytest.mark.parametrize(
    "name", ["InferenceSession", "SessionOptions", "RunOptions", "IOBinding", "OrtValue"]
)
def test_every_name_of_onnxruntimes_is_here_or_says_what_to_do(sessions, name):
    value = {
        "InferenceSession": lambda: sessions[0],
        "SessionOptions": gtco.SessionOptions,
        "RunOptions": gtco.RunOptions,
        "IOBinding": lambda: sessions[0].io_binding(),
        "OrtValue": lambda: gtco.OrtValue.ortvalue_from_numpy(np.zeros(2)),
    }[name]()
    lacking = 0
    for member in public(getattr(onnxruntime, name)):
        try:
            getattr(value, member)
        except NotHere as error:
            lacking += 1
            assert str(error).startswith(f"{name}.{member} is ONNX Runtime's, and gtco has none: ")
    assert lacking
    assert not hasattr(value, "no_such_thing")
    with pytest.raises(AttributeError):
        value.no_such_thing()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("graph_optimization_level", gtco.GraphOptimizationLevel.ORT_DISABLE_ALL),
        ("enable_profiling", True),
        ("use_per_session_threads", False),
        ("optimized_model_filepath", "m.onnx"),
        ("intra_op_num_threads", -1),
        ("intra_op_num_threads", "2"),
    ],
)
def test_options_that_do_not_fit(name, value):
    options = gtco.SessionOptions()
    with pytest.raises(OptionError, match=name):
        setattr(options, name, value)
    with pytest.raises(AttributeError):
        options.no_such_option = 1


def test_hints_that_change_no_result_are_accepted():
    """Published packages set them: rapidocr, magika."""
    for library in (gtco, onnxruntime):
        library.disable_telemetry_events()
        library.set_default_logger_severity(3)
        assert "CPUExecutionProvider" in library.get_all_providers()
        options = library.SessionOptions()
        options.enable_cpu_mem_arena = options.enable_mem_pattern = options.enable_mem_reuse = False
        options.inter_op_num_threads = 4
        options.execution_mode = library.ExecutionMode.ORT_PARALLEL
        options.add_session_config_entry("session.set_denormal_as_zero", "1")
        assert options.execution_mode == library.ExecutionMode.ORT_PARALLEL


def test_options_of_onnxruntime_and_other_mistakes(model):
    with pytest.raises(OptionError, match=r"gtco\.SessionOptions\(\)"):
        gtco.InferenceSession(model.SerializeToString(), onnxruntime.SessionOptions())
    with pytest.raises(OptionError, match=r"session\.disable_prepacking"):
        gtco.SessionOptions().add_session_config_entry("session.disable_prepacking", "1")
    with pytest.raises(GtcoError, match="unknown option presicion"):
        gtco.InferenceSession(mlp().SerializeToString(), presicion="bf16")
    with pytest.raises(GtcoError, match="unknown option presicion"):
        gtco.InferenceSession(two_ends("rows").SerializeToString(), presicion="bf16")
    for name in ("shapes", "dims"):
        with pytest.raises(OptionError, match="add_free_dimension_override_by_name"):
            gtco.InferenceSession(two_ends("rows").SerializeToString(), **{name: {"rows": 4}})
    with pytest.raises(InputError, match="device_type='cuda'"):
        gtco.OrtValue.ortvalue_from_numpy(np.zeros(2), "cuda")
    with pytest.raises(AttributeError, match=r"docs/onnxruntime\.md"):
        _ = gtco.set_seed


def test_all_is_what_gtco_has():
    for name in gtco.__all__:
        assert getattr(gtco, name) is not None
    homes = (inference_session, session_options, session_values)
    ours = {name for name in gtco._HOMES if any(hasattr(home, name) for home in homes)}
    assert ours & public(onnxruntime) >= {"InferenceSession", "SessionOptions", "OrtValue"}
