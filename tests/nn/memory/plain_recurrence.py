"""Transformer-XL's equations written out, one query at a time: what the tests of recurrence compare with."""

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.models.architectures import Transformer


def plain_segments(model: Transformer, segments: Sequence[Tensor], length: int) -> list[Tensor]:
    """The outputs [B, T, E] of a post-norm decoder with Transformer-XL's positions, segment by segment.

    Dai et al. 2019, sections 3.2 and 3.3; the memory of `length` hidden states a layer carries no gradient.
    """
    stack = model.get_submodule("decoder")
    memories: list[Tensor] = [torch.empty(len(segments[0]), 0, 0)] * len(stack.layers)  # type: ignore[arg-type]
    outputs = []
    for ids in segments:
        h = model.tokens.weight[ids]  # type: ignore[index]
        for number, layer in enumerate(stack.layers):  # type: ignore[arg-type]
            memory = memories[number]
            both = torch.cat([memory, h], 1) if memory.shape[1] else h
            memories[number] = both.detach()[:, -length:] if length else memory
            h = plain_layer(layer, stack.position, number, h, both)
        outputs.append(h)
    return outputs


Mix = Callable[[Tensor], Tensor]
"""Of what heads put out [B, T, E], what is projected back."""


def plain_layer(layer, position, number: int, h: Tensor, both: Tensor, mix: Mix | None = None) -> Tensor:
    """Layer `number` for the segment h [B, T, E], the last of `both` [B, M + T, E]."""
    attended = _attended(layer.attention, position, number, h, both)
    output = layer.attention.output
    attended = (attended if mix is None else mix(attended)) @ output.weight.T + output.bias
    h = layer.block.norms[0](h + attended)
    inner = F.relu(h @ layer.feedforward.up.weight.T + layer.feedforward.up.bias)
    return layer.block.norms[1](h + inner @ layer.feedforward.down.weight.T + layer.feedforward.down.bias)


def _attended(attention, position, number: int, h: Tensor, both: Tensor) -> Tensor:
    """What the heads put out, [B, T, E]: every token of h attends to all of `both` up to itself."""
    heads, width = attention.config.num_attention_heads, attention.head_size
    past = both.shape[1] - h.shape[1]
    q, k, v = (
        (x @ part.weight.T + part.bias).unflatten(-1, (heads, width))
        for part, x in ((attention.query, h), (attention.key, both), (attention.value, both))
    )
    projection = position.projections[number].weight
    u, v_bias = position.u[number][:, 0], position.v[number][:, 0]
    rows = []
    for i in range(h.shape[1]):
        scores = []
        for j in range(past + i + 1):
            r = (projection @ _wave(past + i - j, both.shape[2]).to(h.dtype)).unflatten(0, (heads, width))
            content = ((q[:, i] + u) * k[:, j]).sum(-1)
            scores.append((content + ((q[:, i] + v_bias) * r).sum(-1)) / math.sqrt(width))
        weights = torch.stack(scores, -1).softmax(-1)  # [B, H, keys]
        rows.append(torch.einsum("bhj,bjhd->bhd", weights, v[:, : past + i + 1]).flatten(1))
    return torch.stack(rows, 1)


def _wave(distance: int, width: int) -> Tensor:
    angles = [distance / 10000 ** (2 * (i // 2) / width) for i in range(width)]
    return torch.tensor(
        [math.sin(angle) if i % 2 == 0 else math.cos(angle) for i, angle in enumerate(angles)],
        dtype=torch.float64,
    )
