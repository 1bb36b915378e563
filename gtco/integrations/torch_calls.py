"""Calls in the graphs of torch.compile that torch's exporters do not follow, and what gtco puts in
their place (torch 2.13):

- autocast regions: torch.export only notes torch's own calls down, and the types after them are
  those outside of the region;
- ``nn.TransformerEncoderLayer`` in evaluation mode, which is one operator without an ONNX function.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def with_calls(graph_module: Any) -> Any:
    """The graph with calls that can be exported; itself if it has no others."""
    if not any(node.target in CALLS for node in graph_module.graph.nodes):
        return graph_module
    graph = copy.deepcopy(graph_module.graph)
    for node in graph.nodes:
        node.target = CALLS.get(node.target, node.target)
    return torch.fx.GraphModule(graph_module, graph)


def enter_autocast(device: str, dtype: Any, enabled: bool, cached: bool | None) -> Any:
    region = torch.autocast(device, dtype, enabled, cached)
    region.__enter__()
    return region


def exit_autocast(region: Any) -> None:
    region.__exit__(None, None, None)


def encoder_layer(
    x: Tensor,
    _width: int,
    heads: int,
    projection: Tensor,
    projection_bias: Tensor,
    output: Tensor,
    output_bias: Tensor,
    is_gelu: bool,
    norm_first: bool,
    epsilon: float,
    norm: Tensor,
    norm_bias: Tensor,
    second_norm: Tensor,
    second_norm_bias: Tensor,
    wide: Tensor,
    wide_bias: Tensor,
    narrow: Tensor,
    narrow_bias: Tensor,
    mask: Tensor | None = None,
    mask_kind: int | None = None,
) -> Tensor:
    """``torch._transformer_encoder_layer_fwd``: [batch, tokens, width] -> the same shape. ``mask``
    is nonzero where a key is hidden: [tokens, tokens] if ``mask_kind`` is 0, [batch, tokens] if it
    is 1, [batch, heads, tokens, tokens] if it is 2.
    """

    def attended(x: Tensor) -> Tensor:
        each = functional.linear(x, projection, projection_bias)
        q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in each.chunk(3, -1))
        seen = None if mask is None else mask == 0
        if seen is not None and mask_kind == 1:
            seen = seen[:, None, None, :]
        made = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return functional.linear(made.transpose(1, 2).flatten(2), output, output_bias)

    def fed(x: Tensor) -> Tensor:
        inner = functional.linear(x, wide, wide_bias)
        inner = functional.gelu(inner) if is_gelu else functional.relu(inner)
        return functional.linear(inner, narrow, narrow_bias)

    def normed(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return functional.layer_norm(x, (x.shape[-1],), weight, bias, epsilon)

    if norm_first:
        x = x + attended(normed(x, norm, norm_bias))
        return x + fed(normed(x, second_norm, second_norm_bias))
    x = normed(x + attended(x), norm, norm_bias)
    return normed(x + fed(x), second_norm, second_norm_bias)


CALLS: dict[Any, Any] = {
    torch.amp.autocast_mode._enter_autocast: enter_autocast,
    torch.amp.autocast_mode._exit_autocast: exit_autocast,
    torch._transformer_encoder_layer_fwd: encoder_layer,
}
