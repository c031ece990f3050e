"""What the plain equations of position schemes share, and attention pair by pair in loops.

Nothing here calls a function of the library, so that nothing that is wrong there is wrong here too.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from polyformer.attention.positions import Site
from polyformer.core.sequence.context import Context

SITE = [Site(layer, lambda x: x, lambda x: x) for layer in range(3)]
"""Layers for schemes that need no projections of theirs."""

NAIVE: dict[str, type["Naive"]] = {}
"""The equation of each scheme, by its kind: every scheme of the package must be here."""


@dataclasses.dataclass(frozen=True)
class Pair:
    """A query at position i and a key at position j of one document."""

    head: int
    i: int
    j: int
    causal: bool = False
    same_segment: bool = True
    label: int = -1  # the caller's name for the pair's relation; -1 for none


class Naive:
    """One scheme: what it does to an input vector, to the score of a pair, and to a value."""

    def __init__(self, position: Any, layer: int, query: Tensor | None = None, key: Tensor | None = None):
        """query, key: the layer's own projections of relative embeddings, matrices [E, H D]."""
        self.position, self.layer, self.query, self.key = position, layer, query, key

    def __init_subclass__(cls, kind: str = "") -> None:
        if kind:
            NAIVE[kind] = cls

    def input(self, x: Tensor, p: int) -> Tensor:
        return x

    def score(self, q: Tensor, k: Tensor, pair: Pair) -> Tensor:
        return q @ k / math.sqrt(len(q))

    def value(self, v: Tensor, pair: Pair) -> Tensor:
        return v


Sees = Callable[[int, int], bool]
"""Whether a query at position i may see a key at position j of its document."""


def attention(
    naive: Naive, q: Tensor, k: Tensor, v: Tensor, context: Context, sees: Sees | None = None
) -> Tensor:
    """softmax over the keys that `sees` and the context allow, by positions and not by slots."""
    rows, heads, queries, _ = q.shape
    keys, first = k.shape[2], k.shape[2] - queries
    k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))

    def entry(table: Tensor | None, b: int, *index: int) -> int | None:
        return None if table is None else int(table[(b, *index)])

    def pair(b: int, h: int, i: int, j: int) -> Pair | None:
        """The query i and the key j of batch row b; None where the context forbids it."""
        if (context.causal and j > i + first) or entry(context.kv_valid, b, j) == 0:
            return None
        if entry(context.q_doc, b, i) != entry(context.kv_doc, b, j):
            return None
        i_pos, j_pos = entry(context.q_pos, b, i), entry(context.kv_pos, b, j)
        label = entry(context.relations, b, i, j)
        return Pair(
            h,
            i + first if i_pos is None else i_pos,
            j if j_pos is None else j_pos,
            context.causal,
            entry(context.q_segment, b, i) == entry(context.kv_segment, b, j),
            -1 if label is None else label,
        )

    out = torch.zeros(rows, heads, queries, v.shape[3], dtype=q.dtype)
    for b, h, i in torch.cartesian_prod(*(torch.arange(n) for n in (rows, heads, queries))).tolist():
        pairs = {j: known for j in range(keys) if (known := pair(b, h, i, j)) is not None}
        pairs = {j: known for j, known in pairs.items() if sees is None or sees(known.i, known.j)}
        if pairs:
            scores = [naive.score(q[b, h, i], k[b, h, j], known) for j, known in pairs.items()]
            values = [naive.value(v[b, h, j], known) for j, known in pairs.items()]
            index = torch.tensor(b), torch.tensor(h), torch.tensor(i)
            out = out.index_put(index, torch.stack(scores).softmax(0) @ torch.stack(values))
    return out


def randomised(position: nn.Module) -> Any:
    """The module in float64, all parameters away from their initial values."""
    position = position.double()
    with torch.no_grad():
        for parameter in position.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.5)
    return position
