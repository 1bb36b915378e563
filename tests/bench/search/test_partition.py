"""``python -m bench partition`` on a small DETR: its counts, its peers and its counterfactuals."""

from __future__ import annotations

import math

import pytest

from bench.harness.suite import console
from bench.search.partition import count, measure, parts, show
from gtco.tensor.operators import COMPLEX, INJECTIVE, REDUCTION, pattern
from gtco.tensor.stage import Stage
from models.detr import Detr
from models.weights import initialise

LAYERS = 3


def roofline(stage: Stage) -> float:
    """Bytes at 20 GB/s and a microsecond for each kernel. No kernel concatenates after a product or
    reduces beside one.
    """
    kinds = [pattern(op.kind) for op in stage.operators]
    if COMPLEX in kinds and (REDUCTION in kinds or "concat" in stage.label):
        return math.inf
    size = sum(i.type.nbytes for i in stage.inputs) + stage.output.type.nbytes
    return 1e-6 + size / 20e9 + 1e-8 * kinds.count(INJECTIVE)


@pytest.fixture(scope="module")
def encoder() -> dict:
    detr = Detr((64, 96), encoder_depth=LAYERS, decoder_depth=1, width=32, heads=4, hidden=64)
    initialise(detr, 0)
    [(name, imported)] = parts(detr.eval(), ["encoder"])
    assert name == "encoder"
    return measure(imported, roofline)


def test_every_encoder_layer_is_the_same(encoder: dict) -> None:
    ours = encoder["DPOF"]
    assert set(ours["weights"]) <= {LAYERS, 2 * LAYERS} and ours["unique"] == len(ours["weights"])
    # q and k, v, attention, output projection, two of the feed-forward, two norms.
    assert sum(ours["weights"]) == 8 * LAYERS and ours["light"] == 0
    assert not encoder["search"]["notes"]


def test_fewer_kernels_than_by_rules(encoder: dict) -> None:
    def kernels(system: str) -> int:
        return sum(encoder[system]["weights"]) + sum(encoder[system]["light_weights"])

    assert kernels("DPOF") < kernels("greedy rules")
    assert kernels("DPOF") < kernels("TVM FuseOps")
    seconds = encoder["predicted_seconds"]
    assert seconds["DPOF"] < seconds["greedy rules"]


def test_tvm_subgraphs_repeat_by_layer(encoder: dict) -> None:
    tvm = encoder["TVM FuseOps"]
    assert tvm["unique"] >= 6 and all(weight % LAYERS == 0 for weight in tvm["weights"])
    # Two batched products, softmax, three projections, output, feed-forward, two norms a layer.
    assert sum(tvm["weights"]) >= 10 * LAYERS


def test_projections_apart_are_more_kernels(encoder: dict) -> None:
    """q and k read the same tensor. Merged, they are one product a layer; separate, they are
    two.
    """
    apart, merged = encoder["projections apart"], encoder["DPOF"]
    assert sum(apart["weights"]) == sum(merged["weights"]) + LAYERS


def test_the_table_shows_every_system(encoder: dict) -> None:
    output = console()
    with output.capture() as captured:
        show("encoder", encoder, output)
    text = captured.get()
    for system in ("Ansor (Table IV)", "GTCO (Table IV)", "projections apart", "DPOF"):
        assert system in text


def test_count_of_nothing() -> None:
    assert count([]).unique == 0 and count([]).text == ""
