"""Pooling of volumes, which becomes pooling of two axes."""

from __future__ import annotations

import pytest
from onnx import helper

from gtco.graph.layout import channels_last
from tests.graph.lower.test_contractions import agree, draw, graph_of

# attributes of pooling [2, 3, 7, 6, 5]
POOLINGS = [
    dict(kernel_shape=[2, 2, 2], strides=[2, 2, 2]),
    dict(kernel_shape=[3, 2, 3], strides=[2, 1, 2], pads=[1, 0, 1, 1, 1, 0]),
    dict(kernel_shape=[3, 3, 3], strides=[2, 2, 2], ceil_mode=1),
    dict(kernel_shape=[1, 3, 3], strides=[1, 2, 2], pads=[0, 1, 1, 0, 1, 1]),
    dict(kernel_shape=[5, 1, 1], pads=[2, 0, 0, 2, 0, 0]),
]


@pytest.mark.parametrize("attrs", POOLINGS)
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("MaxPool", {}),
        ("AveragePool", dict(count_include_pad=0)),
        ("AveragePool", dict(count_include_pad=1)),
    ],
)
def test_volumes(kind: str, more: dict, attrs: dict) -> None:
    feeds = draw({"x": (2, 3, 7, 6, 5)})
    graph, want = graph_of(helper.make_node(kind, ["x"], ["y"], **attrs, **more), feeds, {})
    for form in (graph, channels_last(graph)):
        assert "relax" not in form.histogram()
        agree(form, feeds, want)


def test_dilated_volumes() -> None:
    feeds = draw({"x": (2, 3, 7, 6, 5)})
    attrs = dict(kernel_shape=[2, 3, 2], dilations=[3, 1, 2], strides=[1, 2, 1])
    graph, want = graph_of(helper.make_node("MaxPool", ["x"], ["y"], **attrs), feeds, {})
    assert "relax" not in graph.histogram()
    agree(graph, feeds, want)
