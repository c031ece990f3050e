"""A position scheme restricted to some heads, for mechanisms that compute their heads in different ways."""

import dataclasses

import torch.nn.functional as F
from torch import Tensor

from polyformer.attention.functional.parts import RotatedPart
from polyformer.attention.functional.relative import Relative
from polyformer.attention.mechanisms.base import DelegatedTerms, PositionTerms, ScoreTerms
from polyformer.attention.patterns.base import ScoreMod
from polyformer.attention.patterns.mods import broadcasts
from polyformer.attention.patterns.score_steps import chain_score_mods, step, steps_of
from polyformer.core.sequence.context import Context


def heads_of(position: PositionTerms, heads: slice, num_heads: int) -> ScoreTerms | None:
    """Return the scheme for `heads` of `num_heads` heads; unchanged if these are all heads."""
    own = range(num_heads)[heads]
    return position if position is None or len(own) == num_heads else HeadSubset(position, own, num_heads)


@dataclasses.dataclass(frozen=True, eq=False)
class HeadSubset(DelegatedTerms):
    """A scheme evaluated for all heads, with zeros as queries and keys of the other heads."""

    heads: range
    num_heads: int

    def parts(self, q: Tensor, k: Tensor, context: Context) -> tuple[RotatedPart, ...]:
        """Return none: no mechanism that computes heads in different ways rotates sets of pairs."""
        return ()

    def score_mod(self, q: Tensor, k: Tensor, context: Context) -> ScoreMod | None:
        """Return the scheme's score function with heads counted from the first of these heads."""
        mod = self.position.score_mod(self._pad_heads(q), self._pad_heads(k), context)
        if mod is None:
            return None
        first = self.heads.start

        def of_heads(part: ScoreMod) -> ScoreMod:
            return broadcasts(lambda score, b, h, q_idx, kv_idx: part(score, b, h + first, q_idx, kv_idx))

        return chain_score_mods(step(name)(of_heads(part)) for name, part in steps_of(mod))

    def relative(self, q: Tensor, k: Tensor, context: Context) -> Relative | None:
        """Return the scheme's terms by distance, restricted to these heads."""
        relative = self.position.relative(self._pad_heads(q), self._pad_heads(k), context)
        return None if relative is None else relative.select_heads(list(self.heads), self.num_heads)

    def _pad_heads(self, x: Tensor) -> Tensor:
        """Return x [B, h, T, D] of these heads padded to all heads, [B, H, T, D]."""
        # A scheme has tables for all heads and expects all of them.
        return F.pad(x, (0, 0, 0, 0, self.heads.start, self.num_heads - self.heads.stop))
