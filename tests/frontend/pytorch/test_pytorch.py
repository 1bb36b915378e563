"""Modules and ExportedPrograms: how they are called, what they give, what is refused, and that the
caller's module does not change.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gtco
from gtco.frontend.imported import ImportedModel
from gtco.frontend.pytorch import export as exporting
from gtco.frontend.pytorch.load import load_pytorch
from gtco.graph.lower.walk import lower
from gtco.support.errors import ModelError, OptionError, ShapeError, UnsupportedError
from gtco.support.nested import call_arguments, tensors
from gtco.verification.reference import open_reference

X = torch.linspace(-1, 1, 8).reshape(2, 4)
M = torch.linspace(0, 3, 8).reshape(2, 4)


class Module(nn.Module):
    """``function(x, other, scale)`` after a linear layer."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4), function
        with torch.no_grad():
            self.linear.weight.copy_(torch.eye(4))
            self.linear.bias.fill_(1)

    def forward(self, x: Tensor, other: Tensor | None = None, *, scale: float = 2.0) -> Any:
        return self.function(self.linear(x), other, scale)


@dataclass
class Plain:
    """A dataclass that is not registered with torch."""

    logits: Tensor
    states: list[Tensor | None]
    loss: Tensor | None = None


class Named(NamedTuple):
    a: Tensor
    b: Tensor


def exported(module: nn.Module, given: Any) -> tuple[Any, list[str] | None]:
    return exporting._export(torch, module, given)


def values(imported: ImportedModel, **inputs: Tensor) -> dict[str, np.ndarray]:
    """The imported model's outputs, computed by the numpy reference."""
    return lower(imported).check().evaluate({name: t.numpy() for name, t in inputs.items()})


@pytest.mark.parametrize("nothing", [None, (), [], {}])
def test_a_module_without_inputs_is_refused_with_what_to_give(nothing: Any) -> None:
    with pytest.raises(ModelError, match=r"example_inputs, and there are none.*torch\.randn"):
        gtco.compile_model(Module(lambda x, other, scale: x), nothing)


def test_what_does_not_go_together_is_refused() -> None:
    module = Module(lambda x, other, scale: x)
    with pytest.raises(OptionError, match="shapes is for symbolic dimensions, and a module has"):
        gtco.compile_model(module, (X,), shapes={"batch": 2})
    program = torch.export.export(module, (X,))
    with pytest.raises(OptionError, match="an ExportedProgram brings its own"):
        gtco.compile_model(program, (X,))
    with pytest.raises(OptionError, match="example_inputs is for PyTorch modules"):
        gtco.compile_model(b"", (X,))


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (X, ["x"]),
        (X.numpy(), ["x"]),
        ([X], ["x"]),
        ((X, M), ["x", "other"]),
        ({"x": X}, ["x"]),
        ({"other": M, "x": X}, ["other", "x"]),
        ({"x": X, "other": M, "scale": 3.0}, ["x", "other"]),
        ({"x": X, "other": None, "scale": 3.0}, ["x"]),
    ],
)
def test_inputs_by_position_and_by_keyword(given: Any, names: list[str]) -> None:
    module = Module(lambda x, other, scale: x * scale if other is None else x * scale + other)
    program, _ = exported(module, given)
    tensors = [a.name for a in map(attrgetter("arg"), program.graph_signature.input_specs)]
    weights = [n for n in tensors if n.startswith("p_")]
    assert [n for n in tensors if n not in weights and n != "scale"][: len(names)] == names
    args, kwargs = call_arguments(given)
    args = tuple(torch.as_tensor(a) for a in args)
    scale = kwargs.get("scale", 2.0)
    wanted = (X + 1) * scale + (M if "other" in names else 0)
    torch.testing.assert_close(program.module()(*args, **kwargs), wanted)


def test_keywords_reach_the_compiler_by_their_names() -> None:
    module = Module(lambda x, other, scale: {"sum": x * scale + other, "nothing": None})
    imported = load_pytorch(module, {"other": M, "x": X, "scale": 3.0})
    assert list(imported.inputs) == ["other", "x"] and imported.outputs == ("sum",)
    found = values(imported, x=X, other=M)["sum"]
    np.testing.assert_allclose(found, ((X + 1) * 3 + M).numpy(), rtol=1e-6)


def test_arrays_that_torch_does_not_take_as_they_are() -> None:
    turned = X.numpy()[::-1]
    turned.flags.writeable = False
    imported = load_pytorch(Module(lambda x, *_: x * 2), {"x": turned})
    assert imported.inputs["x"].shape == (2, 4)
    with ExitStack() as stack:
        reference = open_reference(nn.Linear(4, 4), stack, ["x"], turned)
        assert reference.examples is not None
        np.testing.assert_array_equal(reference.examples["x"], turned)
    with pytest.raises(ModelError, match="an array of object in example_inputs is not a tensor"):
        load_pytorch(Module(lambda x, *_: x), (np.array([None]),))


@pytest.mark.parametrize("mapping", [False, True])
def test_one_tensor_given_twice_is_two_inputs(mapping: bool) -> None:
    module = Module(lambda x, other, scale: x - other * 3)
    imported = load_pytorch(module, {"x": X, "other": X} if mapping else (X, X))
    assert list(imported.inputs) == ["x", "other"]
    (found,) = values(imported, x=X, other=M).values()
    np.testing.assert_allclose(found, (X + 1 - M * 3).numpy(), rtol=1e-6)


def test_a_modules_own_tensor_may_be_its_input() -> None:
    module = Module(lambda x, other, scale: x * 2)
    weight = module.linear.weight.detach().clone()
    imported = load_pytorch(module, (module.linear.weight,))
    (found,) = values(imported, x=weight * 5).values()
    np.testing.assert_allclose(found, (weight * 5 + 1).numpy() * 2, rtol=1e-6)


def test_a_module_without_values_is_refused() -> None:
    with pytest.raises(ModelError, match=r"Module is on the meta device.*load_state_dict"):
        load_pytorch(Module(lambda x, *_: x).to("meta"), (X.to("meta"),))


def test_derivatives_by_an_input_are_refused() -> None:
    def derivative(x: torch.Tensor, *_: Any) -> torch.Tensor:
        return torch.func.grad(lambda y: (y.sin() * y).sum())(x)

    with pytest.raises(ModelError, match=r"torch.func differentiates by"):
        load_pytorch(Module(derivative), (X,))


def test_what_torch_refuses_shows_no_traceback(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ModelError, match="same reduction dim"):
        load_pytorch(Module(lambda x, *_: x), (torch.zeros(2, 7),))
    assert all(record.levelno < logging.ERROR for record in caplog.records)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("given", [X.to_sparse(), torch.complex(X, X)])
def test_tensors_that_no_library_takes_are_refused(given: Tensor) -> None:
    with pytest.raises(ModelError, match=r"example_inputs holds a tensor of torch\..*to_dense"):
        load_pytorch(Module(lambda x, *_: x), {"x": given})


class Counting(nn.Module):
    """Writes its buffers while it runs: one in place, and one as a new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("last", torch.zeros(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = x * self.calls + self.last
        self.last = y
        return y


@pytest.mark.parametrize("program", [False, True])
def test_a_reference_that_writes_its_buffers_starts_each_call_as_the_first(program: bool) -> None:
    module: Any = Counting()
    state = {name: value.clone() for name, value in module.state_dict().items()}
    given = (X,)
    reference: Any = torch.export.export(module, given) if program else module
    with ExitStack() as stack:
        opened = open_reference(reference, stack, ["x"], None if program else given)
        for _ in range(3):
            np.testing.assert_array_equal(opened.run({"x": X.numpy()})[0], X.numpy())
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())


def test_an_unknown_keyword_is_named() -> None:
    with pytest.raises(ModelError, match=r"cannot trace Module: .*'x'"):
        load_pytorch(Module(lambda x, other, scale: x), {"image": X})


def test_values_of_constants_that_the_trace_asks_for_have_another_way() -> None:
    module = Module(lambda x, *_: x * 2 if torch.tensor([1, 2]).tolist()[1] == 2 else x)
    with pytest.raises(ModelError, match=r"data-dependent.*constants alone, torch\.onnx\.export"):
        load_pytorch(module, (X,))


OUTPUTS: dict[str, tuple[Callable[..., Any], dict[str, float]]] = {
    "dictionary": (lambda x, *_: {"b": x, "a": None, "c": x * 2}, {"b": 1, "c": 2}),
    "nested": (
        lambda x, *_: {"b": [x, None, (x * 3,)], "a": x * 2},
        {"b_0": 1, "b_2_0": 3, "a": 2},
    ),
    "dataclass": (lambda x, *_: Plain(x, [x * 2, None]), {"logits": 1, "states_0": 2}),
    "named tuple": (lambda x, *_: Named(x, x * 2), {"a": 1, "b": 2}),
    "tuple": (lambda x, *_: (x, None, x * 2), {"": 1, " ": 2}),
    "numbers": (lambda x, *_: (x, 3, "text", x * 2), {"": 1, " ": 2}),
    "an input's name": (lambda x, *_: {"x": x, "y": x * 2}, {"": 1, " ": 2}),
}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_outputs(kind: str) -> None:
    function, wanted = OUTPUTS[kind]
    program, names = exported(Module(function), (X,))
    assert list(program.graph_signature.user_inputs)[:1] == ["x"]
    assert names == (None if "" in wanted else list(wanted))
    args, kwargs = program.example_inputs
    found = tensors(program.module()(*args, **kwargs))
    for y, factor in zip(found, wanted.values(), strict=True):
        torch.testing.assert_close(y, (X + 1) * factor)


@pytest.mark.parametrize("kind", ["dataclass", "numbers"])
def test_what_torch_export_refuses_is_compiled_too(kind: str) -> None:
    function, wanted = OUTPUTS[kind]
    imported = load_pytorch(Module(function), {"other": M, "x": X})
    assert list(imported.inputs) == ["other", "x"]  # as they were given, which verify relies on
    found = values(imported, x=X, other=M)
    for y, factor in zip(found.values(), wanted.values(), strict=True):
        np.testing.assert_allclose(y, (X.numpy() + 1) * factor, rtol=1e-6)


def test_dropout_that_is_always_on_is_refused() -> None:
    module = Module(lambda x, *_: nn.functional.dropout(x))
    with pytest.raises(UnsupportedError, match=r"training_mode is set.*training=self\.training"):
        load_pytorch(module, (X,))


def test_an_exported_programs_dynamic_dimensions_take_shapes() -> None:
    dynamic = {"x": {0: torch.export.Dim("batch")}}
    module = Module(lambda x, other, scale: x)
    program = torch.export.export(module, (X,), dynamic_shapes=dynamic)
    with pytest.raises(ShapeError, match="symbolic dimensions without a value") as caught:
        load_pytorch(program)
    assert "'batch' (x axis 0)" in str(caught.value) and "--shape batch=1" in str(caught.value)
    for name in ("batch", "x.0"):
        assert load_pytorch(program, shapes={name: 3}).inputs["x"].shape == (3, 4)
    compiled = gtco.compile_model(program, shapes={"batch": 3}, verify=True, workers=1)
    assert compiled.inputs[0].shape == (3, 4) and compiled.report.verification.passed


@pytest.mark.parametrize("keyed", [True, False])
def test_an_input_that_is_an_output_keeps_its_name(keyed: bool) -> None:
    class Passed(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return {"same": x, "more": x + 1} if keyed else (x, x + 1)

    module = Passed()
    compiled = gtco.compile_model(module, {"x": X}, verify=True, workers=1)
    assert [spec.name for spec in compiled.inputs] == ["x"]
    assert compiled.outputs[0].name == ("same" if keyed else "x_out")
    same, more = compiled(X.numpy())
    np.testing.assert_array_equal(same, X)
    np.testing.assert_array_equal(more, X + 1)


def test_inputs_without_axes() -> None:
    """They are also verified, and also given as numpy's scalars."""

    class Product(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x * y

    compiled = gtco.compile_model(Product(), (torch.tensor(3.0), torch.tensor(2.0)), verify=True)
    assert compiled.report.verification.passed
    y = compiled(np.float32(2), np.asarray(np.float32(1.5)))
    assert y.shape == () and y == 3


@pytest.mark.parametrize("named", [True, False])
def test_dynamic_dimensions_of_several_inputs(named: bool, tmp_path: Path) -> None:
    """They have the user's names. A file does not keep these, so they are then named after the
    first input and axis.
    """

    class Both(nn.Module):
        def forward(self, x: torch.Tensor, more: dict[str, torch.Tensor]) -> torch.Tensor:
            return x.sum(1, keepdim=True) + more["mask"]

    batch, tokens = torch.export.Dim("batch"), torch.export.Dim("tokens")
    dynamic = ({0: batch, 1: tokens}, {"mask": {0: batch}})
    given = (torch.ones(3, 5, 6), {"mask": torch.ones(3, 1, 6)})
    program = torch.export.export(Both(), given, dynamic_shapes=dynamic)
    wanted = ["batch", "tokens"]
    if not named:
        torch.export.save(program, tmp_path / "both.pt2")
        program = torch.export.load(tmp_path / "both.pt2")
        wanted = ["x.0", "x.1"]
    with pytest.raises(ShapeError) as caught:
        load_pytorch(program)
    found = str(caught.value)
    assert f"'{wanted[0]}' (x axis 0, more_mask axis 0); '{wanted[1]}' (x axis 1)." in found
    inputs = load_pytorch(program, shapes=dict(zip(wanted, (2, 7), strict=True))).inputs
    assert [t.shape for t in inputs.values()] == [(2, 7, 6), (2, 1, 6)]


def test_simplify_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bool, float]] = []

    def stop(*_: Any, simplify: bool, simplify_timeout: float, **__: Any) -> None:
        seen.append((simplify, simplify_timeout))
        raise ModelError("far enough")

    monkeypatch.setattr("gtco.frontend.pytorch.load.import_skeleton", stop)
    with pytest.raises(ModelError, match="far enough"):
        gtco.compile_model(Module(lambda x, *_: x), (X,), simplify=False, simplify_timeout=7.0)
    assert seen == [(False, 7.0)]


class Training(nn.Module):
    """Batch norm and dropout, each in its own mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.frozen = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5))

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        y = self.frozen(self.dropout(self.norm(x)))
        return {"y": y, "aux": None, "masked": y.masked_fill(mask == 0, 0.0)}


def test_a_training_module_is_compiled_for_evaluation_and_left_as_it_was() -> None:
    module = Training().train()
    module.frozen.eval()
    module.norm.running_mean.fill_(0.5)  # type: ignore[union-attr,operator]
    module.norm.running_var.fill_(4.0)  # type: ignore[union-attr,operator]
    flags = [part.training for part in module.modules()]
    state = {name: value.clone() for name, value in module.state_dict().items()}
    gradients = [p.requires_grad for p in module.parameters()]
    mask = torch.tensor([[1, 0, 1, 1], [0, 0, 0, 0]])
    compiled = gtco.compile_model(module, {"mask": mask, "x": X}, verify=True, workers=1)
    report = compiled.report.verification
    assert report.passed and report.reference == "PyTorch"
    assert {"example", "mask row", "spike"} <= {d.case for d in report.differences}
    assert [part.training for part in module.modules()] == flags
    assert [p.requires_grad for p in module.parameters()] == gradients
    assert all(torch.equal(v, state[name]) for name, v in module.state_dict().items())
    assert [spec.name for spec in compiled.outputs] == ["y", "masked"]
    y, masked = compiled(x=X, mask=mask)
    with torch.no_grad():
        wanted = module.eval()(X, mask)
    torch.testing.assert_close(y, wanted["y"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(masked, wanted["masked"], rtol=1e-5, atol=1e-6)
