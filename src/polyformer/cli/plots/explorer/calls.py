"""The calls of attention that a model makes on one text, and the measurements of each."""

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from polyformer.attention.functional.request import Request
from polyformer.cli.plots.explorer.allowed_keys import AllowedKeys
from polyformer.cli.plots.explorer.exact_weights import Mix, Tile, tiles, value_matrix, with_rows, with_sink
from polyformer.cli.plots.explorer.summaries import Summaries
from polyformer.core.token_records import SINK, Mark, TokenRecord


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """The attention of one layer: a `request` of softmax attention, or any mechanism as `mix` of `values`.

    stack: "encoder" or "decoder", the stack of the queries; keys: the stack of the keys. marks: attributes of
    its tokens, such as their buckets. projected: the queries [G] that have separate projections, and their
    request. weights: a function that returns [H, Tq, Tk], if the values of the mechanism do not determine
    them. slots: if the keys are not tokens, the tokens start <= j < stop of each key, [Tk, 2].
    """

    stack: str
    keys: str
    layer: int
    mechanism: str
    pattern: str | None = None
    request: Request | None = None
    mix: Mix | None = None
    values: Tensor | None = None
    projected: tuple[Tensor, Request] | None = None
    marks: list[TokenRecord] = dataclasses.field(default_factory=list)
    weights: Callable[[], Tensor] | None = None
    slots: Tensor | None = None

    @property
    def cross(self) -> bool:
        """Return whether the keys are of another sequence."""
        return self.stack != self.keys

    def tiles(self) -> Iterator[Tile]:
        """Return an iterator over the weights of softmax attention by ranges of queries."""
        assert self.request is not None
        sink = next(
            (record for record in self.marks if isinstance(record, Mark) and record.name == SINK), None
        )
        if sink is not None:
            return with_sink(tiles(self.request), sink.values[0].float())
        if self.projected is None:
            return tiles(self.request)
        rows, request = self.projected
        return with_rows(tiles(self.request), rows.cpu(), tiles(request))

    @property
    def name(self) -> str:
        """The name of the call on the page."""
        return f"{self.stack} layer {self.layer + 1}, {'cross' if self.cross else 'self'}-attention"


@dataclasses.dataclass(frozen=True, eq=False)
class MeasuredCall:
    """A call's summaries; `lse` [H, Tq] of softmax attention, `matrix` [H, Tq, Tk] of any other."""

    call: Call
    shape: tuple[int, int, int]  # H, Tq, Tk
    summaries: Summaries
    allowed: AllowedKeys | None = None
    lse: np.ndarray | None = None
    matrix: Tensor | None = None

    @property
    def memory(self) -> int:
        """The number of keys before the first query's own key."""
        alone = self.call.cross or self.call.slots is not None
        return 0 if alone else max(0, self.shape[2] - self.shape[1])

    def weights(self) -> Tensor:
        """Return the weights [H, Tq, Tk], float32, for any attention."""
        if self.matrix is not None:
            return self.matrix
        weights = torch.zeros(self.shape)
        for tile in self.call.tiles():
            weights[:, tile.start : tile.stop, tile.columns.cpu()] = tile.weights.cpu()
        return weights


def measure_call(call: Call) -> MeasuredCall:
    """Return the measurements of a call, from one pass over it."""
    if call.request is not None:
        return _of_pairs(call, call.request)
    matrix = _matrix(call).cpu()
    heads, queries, keys = matrix.shape
    apart = call.cross or call.slots is not None
    summaries = Summaries(heads, queries, keys, 0 if apart else keys - queries)
    summaries.add(0, torch.arange(keys), matrix)
    return MeasuredCall(call, (heads, queries, keys), summaries, matrix=matrix)


def _matrix(call: Call) -> Tensor:
    """Return the matrix [H, Tq, Tk], float32, of a call without softmax over pairs of vectors."""
    if call.weights is not None:
        return call.weights().float()
    assert call.mix is not None
    assert call.values is not None
    return value_matrix(call.mix, call.values)


def _of_pairs(call: Call, request: Request) -> MeasuredCall:
    heads, queries, keys = request.q.shape[1], request.context.q_len, request.context.kv_len
    summaries = Summaries(heads, queries, keys, 0 if call.cross else request.context.offset)
    allowed, lse = AllowedKeys(keys), []
    for tile in call.tiles():
        summaries.add(tile.start, tile.columns, tile.weights)
        allowed.add(tile.columns, tile.allowed)
        lse.append(tile.lse.cpu())
    return MeasuredCall(call, (heads, queries, keys), summaries, allowed, torch.cat(lse, 1).numpy())
