"""Block diffusion: blocks of a text are denoised one after another, given the finished blocks before them.

In training a row has two copies of a text x, the noised copy x_t and the clean copy x_0. A token with
position p is in block I = p // size of its copy, and sees a token of block J if

    query      key x_t    key x_0
    x_t        J = I      J < I
    x_0        never      J <= I

This is the mask of Arriola et al. 2025 (BD3-LM), section 3.3 and appendix B.6: block-diagonal, offset
block-causal and block-causal. One pass so denoises all blocks, each as if only its own tokens were noised.

The caller numbers the copies: segment 0 is clean and every other segment is noised. Both copies of a token
have the same position, for the blocks and for the positional encoding, so a row needs `segment_ids` and
`position_ids`:

    input_ids      x_t[0] .. x_t[n-1]  x_0[0] .. x_0[n-1]
    segment_ids       1   ..    1         0   ..    0
    position_ids      0   ..   n-1        0   ..   n-1

Without segments all tokens are clean: every block sees itself and the blocks before it. This is the mask in
which a model writes (the paper's section 3.2): a finished block does not depend on later blocks, so its keys
and values are computed once. A mask token within the last block is then seen by its own block only, as
in x_t.

Position schemes that count slots, not positions, tell the copies apart; use rotary or added positions.
"""

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from polyformer.attention.patterns.base import Pattern
from polyformer.attention.patterns.block_base import positions_are_traced, side_positions
from polyformer.attention.patterns.global_base import Side
from polyformer.attention.patterns.implied import runs
from polyformer.attention.patterns.layout import Keys, clip
from polyformer.core.host_values import on_host
from polyformer.core.ranges import PositiveInt
from polyformer.core.sequence.context import Context, look_up


@dataclasses.dataclass(frozen=True)
class BlockDiffusion(Pattern):
    """Block diffusion: blocks of `size` positions see themselves and all earlier clean blocks.

    Tokens of segment 0 are clean, others are noised; clean tokens see no noised token. Without segments all
    are clean. The pattern is for encoders, because a decoder would hide the later tokens of a block. Raises
    `InputError` for a size below 1.
    """

    size: PositiveInt

    paper: ClassVar[str] = "Arriola et al. 2025 (BD3-LM), section 3.3"

    def allows(self, context: Context, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Return J <= I for clean tokens; for noised queries J < I, and J = I among noised tokens."""
        query = context.query_position(b, q_idx) // self.size
        key = context.key_position(b, kv_idx) // self.size
        q_segment, kv_segment = context.q_segment, (context.whole or context).kv_segment
        if q_segment is None or kv_segment is None:
            return key <= query
        noised_query, noised_key = look_up(q_segment, b, q_idx) != 0, look_up(kv_segment, b, kv_idx) != 0
        of_clean = ~noised_key & (key <= query - noised_query.to(query.dtype))
        return of_clean | (noised_query & noised_key & (key == query))

    def keys(self, context: Context, start: int, stop: int) -> Keys:
        """Return the keys up to the last block of the queries, or by a table of blocks and segments."""
        if positions_are_traced(context) or (context.q_segment is not None and torch.compiler.is_compiling()):
            return super().keys(context, start, stop)
        if context.q_pos is None and context.kv_pos is None and context.q_segment is None:
            first, last = ((i + context.offset) // self.size for i in (start, stop - 1))
            ends = (first + 1) * self.size, (last + 1) * self.size
            return Keys(clip(0, ends[1], context.kv_len), clip(0, ends[0], context.kv_len))
        queries, keys = context.once(("copies", self.size), lambda: self._copies(context))
        block, noised = (table[:, start:stop] for table in queries)
        key, noised_key = keys
        # All of the queries see the clean blocks up to the first number, some of them up to the second.
        least, most = (block - noised.to(block.dtype)).aminmax()
        some, full = ~noised_key & (key <= most), ~noised_key & (key <= least)
        if bool(noised.any()):
            first, last = block[noised].aminmax()
            some |= noised_key & (key >= first) & (key <= last)
            full |= noised_key & (key == first) & (first == last) & noised.all()
        return Keys(runs(some.any(0)), runs(full.all(0)))

    def _copies(self, context: Context) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Return the blocks and whether they are noised, [R, T] each, of the queries and of the keys."""
        return self._side(context, "q", context.q_segment), self._side(context, "kv", context.kv_segment)

    def _side(self, context: Context, side: Side, segments: Tensor | None) -> tuple[Tensor, Tensor]:
        positions, length, shift = side_positions(context, side)
        positions = (torch.arange(length) + shift)[None] if positions is None else positions
        blocks = torch.div(positions, self.size, rounding_mode="floor")
        noised = torch.zeros_like(blocks, dtype=torch.bool) if segments is None else on_host(segments) != 0
        return torch.broadcast_tensors(blocks, noised)  # type: ignore[return-value]

    def causal(self) -> bool:
        """Return False: a token sees later tokens of its block."""
        return False

    @classmethod
    def examples(cls) -> tuple["BlockDiffusion", ...]:
        return cls(3), cls(8)

    @classmethod
    def picture(cls) -> tuple["BlockDiffusion", Context]:
        """Return a noised and a clean copy of 24 tokens."""
        return cls(6), copies_context(24)


def copies_context(length: int, rows: int = 1) -> Context:
    """Return the context of a noised and a clean copy of texts of `length` tokens, in this order."""
    segments = torch.arange(2).flip(0).repeat_interleave(length).expand(rows, -1)
    positions = torch.arange(length).repeat(2).expand(rows, -1)
    return Context(
        2 * length,
        2 * length,
        q_pos=positions,
        kv_pos=positions,
        q_segment=segments,
        kv_segment=segments,
    )
