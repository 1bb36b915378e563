"""Calls that torch's exporters do not follow, and what gtco puts in their place."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from gtco.integrations.torch_compile import backend  # noqa: E402
from tests.integrations.torch_compile.shared import check_same  # noqa: E402


class Regions(torch.nn.Module):
    """A product in an autocast region, one in a region that turns it off, and casts after both."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            y = self.linear(x)
            with torch.autocast("cpu", enabled=False):
                z = self.linear(x)
            return y.float() + x, y, z


def test_autocast_regions_of_a_module():
    model, x = Regions(), torch.randn(2, 4)
    found, expected = torch.compile(model, backend=backend)(x), model(x)
    assert [value.dtype for value in found] == [torch.float32, torch.bfloat16, torch.float32]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=0.03, rtol=0.03)
    torch.testing.assert_close(found[2], expected[2])


HIDDEN = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
MASKS = {
    "none": {},
    "padding": {"src_key_padding_mask": HIDDEN},
    "causal": {"src_mask": torch.ones(5, 5, dtype=torch.bool).triu(1)},
    "both": {
        "src_key_padding_mask": HIDDEN,
        "src_mask": torch.ones(5, 5, dtype=torch.bool).triu(1),
    },
}


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize(
    ("activation", "masks"),
    [("relu", "none"), ("gelu", "padding"), ("relu", "causal"), ("gelu", "both")],
)
def test_an_encoder_layer(activation, masks, norm_first):
    """Each activation with both places of the norms."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(
        8, 2, 16, activation=activation, batch_first=True, norm_first=norm_first
    ).eval()
    x = torch.randn(2, 5, 8)
    given = MASKS[masks]
    check_same(torch.compile(layer, backend=backend)(x, **given), layer(x, **given))


def test_a_condition():
    def branches(x):
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))

    compiled = torch.compile(branches, backend=backend)
    for x in (torch.ones(3), -torch.ones(3)):
        check_same(compiled(x), branches(x))
