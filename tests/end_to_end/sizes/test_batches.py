"""Models of one shape that run their batch in parts, one after the other."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper

from gtco import cli
from gtco.compiler import compile_model, compile_to_file
from gtco.driver.compiled import CompiledModel
from gtco.driver.phases import Fused
from gtco.driver.sizes import batches
from gtco.runtime.library import read_metadata
from gtco.runtime.module import load
from gtco.runtime.plan import Batch, TensorSpec
from gtco.search.records.records import Records
from gtco.support.errors import InputError
from gtco.support.options import Tune
from tests.end_to_end.sizes.test_variants import batched, random
from tests.golden.test_plan import TOKENS, WIDTH


@pytest.fixture
def parted(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes compiles take parts of so many samples, whatever is predicted."""

    def take(part: int) -> None:
        monkeypatch.setattr(batches, "sizes", lambda samples: [part])
        monkeypatch.setattr(Fused, "predicted", lambda f, **_: 1e-6 if f.whole.batch else 1.0)

    return take


@pytest.fixture(scope="module")
def reference() -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(batched().SerializeToString())


def at(batch: int, **options: Any) -> CompiledModel:
    return compile_model(batched(), shapes={"batch": batch}, threads=2, verify=True, **options)


@pytest.mark.parametrize(("batch", "part"), [(8, 1), (8, 4), (12, 3), (7, 3), (5, 4)])
def test_it_is_a_library_of_one_shape(
    batch: int, part: int, parted: Callable[[int], None], reference: onnxruntime.InferenceSession
) -> None:
    parted(part)
    times = -(-batch // part)
    with at(batch) as model, at(batch, dims={}) as again:
        assert [str(t) for t in (*model.inputs, *model.outputs)] == [
            f"x: float32[{batch}, {TOKENS}, {WIDTH}]",
            f"tokens: float32[{batch}, {TOKENS}, {WIDTH}]",
            f"pooled: float32[{batch}, {WIDTH}]",
        ]
        assert not model.dims and not model.report.variants
        assert len(model.metadata["parts"]) == times and "batch" in dict(model.report.phases)
        assert {stage["times"] for stage in model.stages} == {times}
        x = random(batch, TOKENS, WIDTH)
        assert len(model.profile(x)) == len(model.stages) == len(model.report.stages)
        out = tuple(np.full_like(y, np.nan) for y in model(x))
        for given in (x, np.asfortranarray(x), x):  # and results where the caller wants them
            model(given, out=out)
            for mine, its in zip(out, reference.run(None, {"x": x}), strict=True):
                np.testing.assert_allclose(mine, its, rtol=1e-4, atol=1e-5)
        assert model.path.read_bytes() == again.path.read_bytes()
        with pytest.raises(InputError, match=str(batch)):
            model(random(batch + 1, TOKENS, WIDTH))


def test_a_range_of_one_size_is_that_size(parted: Callable[[int], None]) -> None:
    parted(4)
    with compile_model(batched(), dims={"batch": "8..8"}, threads=2) as model:
        assert model.inputs[0].shape[0] == 8 and not model.dims
        assert model.metadata["parts"] == [0, 4]


def test_each_batch_of_a_list_has_parts(
    parted: Callable[[int], None], reference: onnxruntime.InferenceSession, tmp_path: Path
) -> None:
    parted(2)
    dump = tmp_path / "dump"
    dims = {"batch": [1, 7, 12]}
    with compile_model(batched(), dims=dims, threads=2, verify=True, dump=dump) as m:
        assert [one.parts for one in m.variants] == [1, 4, 6]
        assert (dump / "batch=12/part=2/5-stages.txt").exists()
        kernels = [{stage["kernel"] for stage in one.stages} for one in m.variants]
        assert kernels[1] == kernels[2] != kernels[0]
        for batch in (1, 7, 12, 7):
            x = random(batch, TOKENS, WIDTH, seed=batch)
            for mine, its in zip(m(x), reference.run(None, {"x": x}), strict=True):
                np.testing.assert_allclose(mine, its, rtol=1e-4, atol=1e-5)
        with load(m.path, dims={"batch": 12}) as twelve:
            x = random(12, TOKENS, WIDTH)
            assert len(twelve.profile(x)) == len(twelve.stages)
            assert np.array_equal(twelve(x)[0], m(x)[0])


def test_what_the_predictions_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts get smaller while that is faster, and less than 1.02 is not a gain."""
    assert batches.sizes(64) == [16, 4, 1] and batches.sizes(30) == [15, 3, 1]
    assert batches.sizes(4) == [1] and batches.sizes(17) == [1] and batches.sizes(1) == []

    def of(prices: dict[int, float], samples: int = 32) -> int | None:
        monkeypatch.setattr(
            Fused,
            "predicted",
            lambda f, **_: prices[f.whole.batch.part if f.whole.batch else samples],
        )
        with at(samples) as model:
            firsts = model.metadata.get("parts")
        return firsts[1] if firsts else None

    assert of({32: 32.0, 16: 15.0, 4: 3.6, 1: 0.8}) == 1
    assert of({32: 32.0, 16: 15.0, 4: 3.6, 1: 1.0}) == 4
    assert of({32: 32.0, 16: 15.0, 4: 4.0, 1: 0.5}) == 16
    assert of({32: 32.0, 16: 15.8, 4: 4.0}) is None
    assert of({32: 32.0, 16: 16.0}) is None


def test_models_that_stay_whole(parted: Callable[[int], None]) -> None:
    """Samples that meet, parts that would begin off 64 bytes, and integers of a quantized model."""
    parted(1)

    class Mixes(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x - x.mean(0, keepdim=True)

    class Narrow(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x[:, :3])

    for module in (Mixes(), Narrow()):
        x = torch.randn(8, 16)
        with compile_model(module, x, threads=2, verify=True) as model:
            assert "parts" not in model.metadata
            torch.testing.assert_close(model(x), module(x))
    graph = helper.make_graph(
        [
            helper.make_node("DequantizeLinear", ["x", "s"], ["y"]),
            helper.make_node("Relu", ["y"], ["z"]),
        ],
        "quantized",
        [helper.make_tensor_value_info("x", TensorProto.INT8, (8, 64))],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, (8, 64))],
        [helper.make_tensor("s", TensorProto.FLOAT, (), [0.1])],
    )
    file = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])
    with compile_model(file, threads=2, verify=True) as model:
        assert "parts" not in model.metadata


class Several(torch.nn.Module):
    """Two batched inputs and one without samples; a result that is the same for all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.token = torch.nn.Parameter(torch.randn(1, 1, 16))
        self.inner = torch.nn.Linear(16, 16)

    def forward(
        self, x: torch.Tensor, y: torch.Tensor, bias: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        both = torch.cat([self.token.expand(x.shape[0], -1, -1), x * y], 1)
        scores = torch.softmax(both @ both.transpose(1, 2) + bias, -1)
        return self.inner(scores @ both), torch.exp(bias)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_inputs_and_results_of_both_kinds(precision: str, parted: Callable[[int], None]) -> None:
    parted(2)
    module = Several().eval()
    inputs = torch.randn(6, 7, 16), torch.randn(6, 7, 16), torch.randn(8, 8)
    options: dict[str, Any] = {"precision": precision, "verify_layers": True}
    with compile_model(module, inputs, threads=2, verify=True, **options) as model:
        assert model.metadata["parts"] == [0, 2, 4]
        bound = 1e-5 if precision == "fp32" else 3e-2
        for mine, its in zip(model(*inputs), module(*inputs), strict=True):
            torch.testing.assert_close(mine, its, rtol=bound, atol=bound)


def test_it_is_tuned_and_dumped(parted: Callable[[int], None], tmp_path: Path) -> None:
    parted(2)
    effort = Tune(seconds=2.0, trials=4)
    compile_to_file(
        batched(),
        tmp_path / "m.so",
        shapes={"batch": 6},
        threads=2,
        tune=effort,
        dump=tmp_path / "dump",
        verify=True,
        records=tmp_path / "records",
    )
    assert (tmp_path / "dump/part=2/5-stages.txt").exists()
    assert (tmp_path / "dump/5-stages.txt").exists()


def test_readings_of_a_busy_machine_do_not_cut_a_batch(tmp_path: Path) -> None:
    """The stages of the whole were measured, and those of its parts are predicted."""
    path = tmp_path / "m.so"
    compile_to_file(
        batched(),
        path,
        shapes={"batch": 6},
        threads=2,
        tune=Tune(seconds=2.0, trials=4),
        records=tmp_path / "records",
    )
    assert "parts" not in read_metadata(path)
    with Records(tmp_path / "records") as records:
        slow = [replace(row, seconds=50 * row.seconds) for row in records.all() if row.seconds]
    assert slow
    with Records(tmp_path / "slow", write=True) as records:
        records.add(slow)
    report = compile_to_file(
        batched(), path, shapes={"batch": 6}, threads=2, tune="off", records=tmp_path / "slow"
    )
    assert dict(report.phases)["batch"] and "parts" not in read_metadata(path)


def test_inspect_counts_all_parts(
    parted: Callable[[int], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parted(2)
    onnx.save(batched(), tmp_path / "m.onnx")
    argv = f"compile {tmp_path}/m.onnx -o {tmp_path}/m.so --shape batch=6 --tune off --threads 2"
    assert cli.main(argv.split()) == 0
    assert "3 parts of 2" in "".join(capsys.readouterr())
    assert cli.main(["inspect", f"{tmp_path}/m.so", "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert seen["metadata"]["parts"] == [0, 2, 4]
    assert sum(s["flops"] for s in seen["stages"]) >= 2 * 2 * 6 * TOKENS * WIDTH * 24
    assert cli.main(["inspect", f"{tmp_path}/m.so"]) == 0
    assert "in 3 parts of 2" in capsys.readouterr().out


def test_where_parts_begin() -> None:
    batch = Batch(7, 3, {"x": 0, "m": None, "y": 1})
    assert batch.firsts == [0, 3, 4]
    part = (
        TensorSpec("x", "float32", (6, 16)),
        TensorSpec("m", "int64", (5,)),
        TensorSpec("y", "uint8", (1, 3, 8)),
    )
    whole = batch.whole(part)
    assert [spec.shape for spec in whole] == [(14, 16), (5,), (1, 7, 8)]
    assert batch.aligned(whole[:2]) and not batch.aligned(whole)
