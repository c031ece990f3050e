"""ETC: a few global tokens in front of a long text, and four pieces of attention between the two.

One row holds both inputs, [global; long]; the first `global_tokens` positions of a document are the global
ones. A token i sees j where

    g2g   global i, global j    always
    g2l   global i, long j      always; with `hard_g2l` where segment_i = segment_j
    l2g   long i, global j      always; with `hard_l2g` where segment_i = segment_j
    l2l   long i, long j        |i - j| <= radius

A global token is nobody's neighbour: the window lies inside the long text. Segments are numbers of the
caller's (`segment_ids`): a global token has that of the sentence it stands for. Without them the document is
one segment and hard pieces limit nothing.

Cost: for G global and L long tokens G (G + 2L) + L (2 radius + 1) scores. Ainslie et al. 2020, section 3.
Deviations: one softmax over one row is the paper's own joint softmax, but all pieces share their
projections (the paper also has a set for each); hard pieces are true masks, where the paper adds -10000.
Without hard pieces the pattern is `Window(radius) | Global(global_tokens)`.
"""

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from polyformer.core.errors import InputError
from polyformer.patterns.global_base import GlobalPattern, Side, first_positions
from polyformer.patterns.implied import runs
from polyformer.patterns.layout import Interval, Keys, clip, intersect, subtract, unite
from polyformer.sequence.context import Context

FINE = 16
"""Global queries in a row of the layout where each sees its own sentence only."""


@dataclasses.dataclass(frozen=True)
class ETC(GlobalPattern):
    """`global_tokens` positions in front, windows of `radius` on both sides behind them.

    Raises `InputError` for a radius or a number of global tokens below 1.
    """

    global_tokens: int
    radius: int
    hard_g2l: bool = False  # a global token sees the long tokens of its own segment only
    hard_l2g: bool = False  # a long token sees the global tokens of its own segment only

    paper: ClassVar[str] = "Ainslie et al. 2020 (ETC), section 3"

    def __post_init__(self) -> None:
        if self.global_tokens < 1:
            raise InputError(
                f"ETC: global_tokens: expected 1 or more, got {self.global_tokens}; without any use Window"
            )
        if self.radius < 1:
            raise InputError(f"ETC: radius: expected 1 token or more on each side, got {self.radius}")

    def chosen(self, context: Context, side: Side, b: Tensor, index: Tensor) -> Tensor:
        """position < global_tokens."""
        position = context.query_position if side == "q" else context.key_position
        return position(b, index) < self.global_tokens

    def known(self, context: Context, side: Side) -> Keys | None:
        """The first slots, where positions are slots."""
        return first_positions(context, side, self.global_tokens)

    def allows(self, context: Context, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """g2g, g2l, l2g or l2l, as the module says."""
        query, key = self.chosen(context, "q", b, q_idx), self.chosen(context, "kv", b, kv_idx)
        near = context.distance(q_idx, kv_idx).abs() <= self.radius
        if not (self.hard_g2l or self.hard_l2g):
            return query | key | near
        own = context.same_segment(b, q_idx, kv_idx)
        of_global = key | own if self.hard_g2l else query
        of_long = torch.where(key, own, near) if self.hard_l2g else key | near
        return torch.where(query, of_global, of_long)

    def keys(self, context: Context, start: int, stop: int) -> Keys:
        """Of rows of global queries, of long ones, or of both."""
        queries, keys = self.runs(context, "q"), self.runs(context, "kv")
        if queries is None or keys is None or (self._structured(context) and torch.compiler.is_compiling()):
            return Keys(clip(0, context.kv_len, context.kv_len))
        of_global, of_long = (
            self._of_global(context, start, stop, keys),
            self._of_long(context, start, stop, keys),
        )
        if not any(a < stop and start < b for a, b in queries.some):
            return of_long
        if any(a <= start and stop <= b for a, b in queries.full):
            return of_global
        return Keys((of_global | of_long).some, (of_global & of_long).full)

    def cuts(self, context: Context) -> tuple[int, ...]:
        """The ends of the global part, and within it every few queries where g2l is hard."""
        edges = super().cuts(context)
        if not self.hard_g2l or not self._structured(context):
            return edges
        fine = (range(a, b, FINE) for a, b in zip(edges[::2], edges[1::2]))
        return tuple(sorted({*edges, *(edge for run in fine for edge in run)}))

    def _structured(self, context: Context) -> bool:
        """Whether some piece is limited to segments here."""
        return (self.hard_g2l or self.hard_l2g) and context.q_segment is not None

    def _of_global(self, context: Context, start: int, stop: int, keys: Keys) -> Keys:
        """What the global ones among the queries start..stop see."""
        everything = clip(0, context.kv_len, context.kv_len)
        if not self.hard_g2l or not self._structured(context):
            return Keys(everything, everything)
        return Keys(unite((*keys.some, *_own(context, start, stop))), keys.full)

    def _of_long(self, context: Context, start: int, stop: int, keys: Keys) -> Keys:
        """What the long ones among the queries start..stop see."""
        first, last = start + context.offset, stop - 1 + context.offset
        some = clip(first - self.radius, last + self.radius + 1, context.kv_len)
        full = clip(last - self.radius, first + self.radius + 1, context.kv_len)
        if not self.hard_l2g or not self._structured(context):
            return Keys(unite((*some, *keys.some)), unite((*full, *keys.full)))
        seen = intersect(keys.some, _own(context, start, stop))
        return Keys(unite((*subtract(some, keys.full), *seen)), subtract(full, keys.some))

    @classmethod
    def examples(cls) -> tuple["ETC", ...]:
        """Small instances that the contract tests run."""
        return cls(3, 2), cls(2, 3, hard_g2l=True, hard_l2g=True)


def _own(context: Context, start: int, stop: int) -> tuple[Interval, ...]:
    """The keys of the segments that the queries start..stop have, in some row."""
    queries, keys = context.once("segments", lambda: _read(context))
    own = [torch.isin(key, query[start:stop]) for query, key in zip(queries, keys)]
    return runs(torch.stack(own).any(0))


def _read(context: Context) -> tuple[Tensor, Tensor]:
    """The segments of queries and keys where a layout can be made of them."""
    assert context.q_segment is not None, "asked only where there are segments"
    assert context.kv_segment is not None
    return context.q_segment.cpu(), context.kv_segment.cpu()
