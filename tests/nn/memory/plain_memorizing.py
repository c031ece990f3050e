"""The Memorizing Transformer's equations written out, one query at a time, over a list of all tokens read."""

import dataclasses
from typing import Any

import torch
from plain_recurrence import plain_layer
from torch import Tensor

from polyformer.models.architectures import Transformer

Entry = tuple[Tensor, Tensor]
"""Keys and values [H, D] of one token."""


def plainly(model: Transformer, segments: list[Tensor]) -> list[Tensor]:
    """The outputs of the segments of one row, post-norm with Transformer-XL's positions."""
    stack = model.get_submodule("decoder")
    length = stack.memory.length
    recent = [torch.empty(0, 12, dtype=torch.float64)] * len(stack.layers)
    store: list[Entry] = []
    outputs = []
    for ids in segments:
        h, new = model.tokens.weight[ids], list[Entry]()
        for number, layer in enumerate(stack.layers):
            both, mix = torch.cat([recent[number], h[0]]).unsqueeze(0), None
            if number == stack.memory.layer:
                older = store[: len(store) - len(recent[number])]
                mix = Mixture(layer.attention, stack.memory, older, h[0])
                parts = [_heads(layer.attention, name, h[0].detach()).detach() for name in ("key", "value")]
                new = list(zip(*parts))
            recent[number] = both[0].detach()[max(0, both.shape[1] - length) :]
            h = plain_layer(layer, stack.position, number, h, both, mix)
        store += new
        outputs.append(h)
    return outputs


def _heads(attention: Any, name: str, x: Tensor) -> Tensor:
    """x [T, E] by one of the projections: [T, H, D]."""
    part = getattr(attention, name)
    return (x @ part.weight.T + part.bias).unflatten(-1, (-1, attention.head_size))


@dataclasses.dataclass
class Mixture:
    """y [1, T, E] -> g y_memory + (1 - g) y, for each token x [T, E] and each head."""

    attention: Any
    memory: Any
    store: list[Entry]
    x: Tensor

    def __call__(self, y: Tensor) -> Tensor:
        queries, local = _heads(self.attention, "query", self.x), y[0].unflatten(1, (2, -1))
        rows = [
            torch.cat([self._head(q[h], local[i, h], h) for h in range(2)]) for i, q in enumerate(queries)
        ]
        return torch.stack(rows).unsqueeze(0)

    def _head(self, q: Tensor, local: Tensor, head: int) -> Tensor:
        entries = self.store[max(0, len(self.store) - self.memory.size) :]
        if not entries:
            return local
        temperature = torch.exp(10 * self.memory.temperature[head])
        scores = [temperature * (q @ k[head]) / (q.norm() * k[head].norm()) for k, _ in entries]
        best = sorted(range(len(scores)), key=lambda i: -scores[i].item())[: self.memory.neighbours]
        weights = torch.stack([scores[i] for i in best]).softmax(0)
        gate = 1 / (1 + torch.exp(-10 * self.memory.gate[head]))
        return gate * sum(w * entries[i][1][head] for w, i in zip(weights, best)) + (1 - gate) * local
