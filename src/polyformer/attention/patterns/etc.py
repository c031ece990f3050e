"""ETC: a few global tokens before a long text, and four pieces of attention between the two.

One row has both inputs, [global; long]: the first `global_tokens` positions of a document are the global
tokens. A token i sees j in these cases:

    g2g   global i, global j    always
    g2l   global i, long j      always; with `hard_g2l` if segment_i = segment_j
    l2g   long i, global j      always; with `hard_l2g` if segment_i = segment_j
    l2l   long i, long j        |i - j| <= radius

Global tokens are not in the window, which covers the long text only. The caller numbers the segments
(`segment_ids`): a global token has the number of the sentence that it summarizes. Without segment numbers the
document is a single segment, and hard pieces limit nothing.

Cost: G (G + 2L) + L (2 radius + 1) scores for G global and L long tokens. Ainslie et al. 2020, section 3.
Deviations: one softmax over one row is the joint softmax of the paper, but all pieces share their projections
(the paper also has separate projections for each piece); hard pieces are true masks, while the paper adds
-10000. Without hard pieces the pattern is `Window(radius) | Global(global_tokens)`.
"""

import dataclasses
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from polyformer.attention.patterns.global_base import FirstPositions, GlobalPattern, Side
from polyformer.attention.patterns.implied import runs
from polyformer.attention.patterns.layout import Interval, Keys, clip, intersect, subtract, unite
from polyformer.core.ranges import PositiveInt, Wording
from polyformer.core.sequence.context import Context

GLOBAL_ROW = 16
"""Global queries per row of the layout if each sees only its sentence."""


@dataclasses.dataclass(frozen=True)
class ETC(GlobalPattern):
    """ETC pattern: a few global tokens before a long text with local windows.

    The first `global_tokens` positions are global; windows of `radius` on both sides follow.

    Raises `InputError` for a radius or a number of global tokens below 1.
    """

    global_tokens: Annotated[PositiveInt, Wording(fix="without global tokens use Window")]
    radius: PositiveInt
    hard_g2l: bool = False  # a global token sees only the long tokens of its segment
    hard_l2g: bool = False  # a long token sees only the global tokens of its segment

    paper: ClassVar[str] = "Ainslie et al. 2020 (ETC), section 3"

    def is_global(self, context: Context, side: Side, b: Tensor, index: Tensor) -> Tensor:
        """Return whether position < global_tokens."""
        return FirstPositions(self.global_tokens).is_global(context, side, b, index)

    def static_slots(self, context: Context, side: Side) -> Keys | None:
        """Return the first slots if positions are slots, else None."""
        return FirstPositions(self.global_tokens).static_slots(context, side)

    def allows(self, context: Context, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return g2g, g2l, l2g or l2l, as defined in the module's docstring."""
        query, key = self.is_global(context, "q", b, q_idx), self.is_global(context, "kv", b, kv_idx)
        near = context.distance(q_idx, kv_idx).abs() <= self.radius
        # Without hard pieces: rows of global queries, columns of global keys, and the window.
        if not (self.hard_g2l or self.hard_l2g):
            return query | key | near
        own = context.same_segment(b, q_idx, kv_idx)
        # g2g always; g2l within the segment.
        of_global = key | own if self.hard_g2l else query
        # l2g within the segment; l2l within the window.
        of_long = torch.where(key, own, near) if self.hard_l2g else key | near
        return torch.where(query, of_global, of_long)

    def keys(self, context: Context, start: int, stop: int) -> Keys:
        """Return the keys of rows of global queries, of long queries, or of both."""
        queries, keys = self.runs(context, "q"), self.runs(context, "kv")
        if queries is None or keys is None or (self._has_segments(context) and torch.compiler.is_compiling()):
            return Keys(clip(0, context.kv_len, context.kv_len))
        of_global = self._keys_of_global(context, start, stop, keys)
        of_long = self._keys_of_long(context, start, stop, keys)
        # The row has only long queries, only global queries, or both.
        if not any(a < stop and start < b for a, b in queries.some):
            return of_long
        if any(a <= start and stop <= b for a, b in queries.full):
            return of_global
        return Keys((of_global | of_long).some, (of_global & of_long).full)

    def cuts(self, context: Context) -> tuple[int, ...]:
        """Return the ends of the global part; with a hard g2l also every few queries within it."""
        edges = super().cuts(context)
        if not self.hard_g2l or not self._has_segments(context):
            return edges
        # Global queries see different sentences, so a long row would need the keys of many.
        fine = (range(a, b, GLOBAL_ROW) for a, b in zip(edges[::2], edges[1::2]))
        return tuple(sorted({*edges, *(edge for run in fine for edge in run)}))

    def _has_segments(self, context: Context) -> bool:
        """Return whether some piece is limited to segments in this context."""
        return (self.hard_g2l or self.hard_l2g) and context.q_segment is not None

    def _keys_of_global(self, context: Context, start: int, stop: int, keys: Keys) -> Keys:
        """Return the keys that the global tokens among the queries start..stop see."""
        everything = clip(0, context.kv_len, context.kv_len)
        if not self.hard_g2l or not self._has_segments(context):
            return Keys(everything, everything)
        return Keys(unite((*keys.some, *_segment_keys(context, start, stop))), keys.full)

    def _keys_of_long(self, context: Context, start: int, stop: int, keys: Keys) -> Keys:
        """Return the keys that the long tokens among the queries start..stop see."""
        first, last = start + context.offset, stop - 1 + context.offset
        some = clip(first - self.radius, last + self.radius + 1, context.kv_len)
        full = clip(last - self.radius, first + self.radius + 1, context.kv_len)
        if not self.hard_l2g or not self._has_segments(context):
            return Keys(unite((*some, *keys.some)), unite((*full, *keys.full)))
        seen = intersect(keys.some, _segment_keys(context, start, stop))
        # Global keys inside the window follow the rule of segments, not of the window.
        return Keys(unite((*subtract(some, keys.full), *seen)), subtract(full, keys.some))

    @classmethod
    def examples(cls) -> tuple["ETC", ...]:
        return cls(3, 2), cls(2, 3, hard_g2l=True, hard_l2g=True)


def _segment_keys(context: Context, start: int, stop: int) -> tuple[Interval, ...]:
    """Return the keys in the segments of the queries start..stop, in any batch row."""
    queries, keys = context.once("segments", lambda: _segments(context))
    own = [torch.isin(key, query[start:stop]) for query, key in zip(queries, keys)]
    return runs(torch.stack(own).any(0))


def _segments(context: Context) -> tuple[Tensor, Tensor]:
    """Return the segments of queries and keys, on the CPU."""
    assert context.q_segment is not None, "asked only where there are segments"
    assert context.kv_segment is not None
    return context.q_segment.cpu(), context.kv_segment.cpu()
