"""SortCut: every query attends only to the first few sorted blocks of keys.

    y = softmax over [sorted blocks 1 .. cut] of q . k' / sqrt(D) + log m, of their values v'

The sorted blocks are the same as in `sinkhorn`; the network learns to move the most relevant blocks to the
front. Tay et al. 2020, section 3, for encoders: the first blocks are sorted from the whole text, so there is
no causal form, and no state. Deviations as in `sinkhorn`.

Cost for n tokens and blocks of b: 2 cut b n products per dimension for attention, cut n for sorting,
n^2 / b^2 for S: linear while n is small compared with b^3. For packed documents all blocks are sorted,
n^2 / b. Measured with blocks of 64 from 4k to 64k tokens: time n^1.14, memory n^1.02.
"""

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from polyformer.attention.functional.documents import take_tokens
from polyformer.attention.mechanisms.sinkhorn.blocks import (
    Blocks,
    attend_in_blocks,
    from_blocks,
    sort_blocks,
    to_blocks,
)
from polyformer.attention.mechanisms.sinkhorn.definition import SortingOptions
from polyformer.attention.mechanisms.sinkhorn.sinkhorn import (
    Sinkhorn,
    SinkhornConfig,
    SinkhornState,
)
from polyformer.core.ranges import PositiveInt
from polyformer.core.sequence.context import Context


@dataclasses.dataclass(frozen=True, kw_only=True)
class SortCutConfig(SinkhornConfig):
    """SortCut attention: all queries attend to the first few of the sorted blocks.

    `cut`: the number of sorted blocks that all queries attend to. The other options are the same as in
    `sinkhorn`.
    """

    cut: PositiveInt = 2

    kind: ClassVar[str] = "sort_cut"
    paper: ClassVar[str] = "Tay et al. 2020, section 3 (SortCut)"
    causal: ClassVar[bool] = False
    supports_kv_cache: ClassVar[bool] = False
    instead: ClassVar[str] = "'sinkhorn', which attends to the query's own block and to an earlier block"

    def build(self, num_heads: int, head_size: int) -> "Sinkhorn":
        return SortCut(self, num_heads, head_size)

    def sorting(self, noisy: bool) -> SortingOptions:
        """Return the sorting options of the definition."""
        return dataclasses.replace(super().sorting(noisy), cut=self.cut)

    @classmethod
    def examples(cls) -> tuple["SortCutConfig", ...]:
        return cls(block_size=3, max_length=72), cls(block_size=4, max_length=72, cut=1, temperature=0.3)


class SortCut(Sinkhorn):
    """Attention to the first sorted blocks."""

    def __init__(self, config: SortCutConfig, num_heads: int, head_size: int):
        super().__init__(config, num_heads, head_size)
        self.cut = config.cut

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, blocks: Blocks, context: Context, state: SinkhornState | None
    ) -> tuple[Tensor, SinkhornState | None]:
        keys, values = (to_blocks(x, blocks.query_index) for x in (k, v))
        filled = blocks.filled[:, None, :, :, None].to(keys.dtype)
        means = keys.sum(3) / filled.sum(3).clamp_min(1.0)
        s, _ = self._permutation(means, blocks, None, causal=False)
        single = context.kv_doc is None
        self._record_sorting(s[:, :, : self.cut], blocks, own=False)
        index, exists = first_blocks(blocks, self.cut, single)
        # With one document the first rows of S are enough; packed documents have their first blocks anywhere.
        sorted_blocks = sort_blocks(s[:, :, : self.cut] if single else s, keys, values, filled)
        sorted_keys, sorted_values, log_mass = (take_blocks(x, index) for x in sorted_blocks)
        log_mass = log_mass.masked_fill(
            ~exists.repeat_interleave(self.config.block_size, 2).unsqueeze(1), -torch.inf
        )
        rate = self.config.dropout if self.training else 0.0
        # [B, H, A, 1, cut size]: the same for all queries of a block.
        bias = log_mass.unsqueeze(3)
        y = attend_in_blocks(to_blocks(q, blocks.queries), sorted_keys, sorted_values, bias, rate)
        return from_blocks(y, blocks.query_places), state


def first_blocks(blocks: Blocks, cut: int, single: bool) -> tuple[Tensor, Tensor]:
    """Return the numbers of the first `cut` blocks of each block's document, and whether they exist.

    [R, N, cut], or [R, 1, cut] for a `single` document, where all blocks have the same.
    """
    first_block, count = blocks.first_block, blocks.first_block.shape[1]
    first = (first_block[:, :1] if single else first_block).clamp_min(0).unsqueeze(2)
    numbers = first + torch.arange(cut, device=first_block.device)
    index = numbers.clamp(max=count - 1)
    rows = torch.arange(len(first_block), device=first_block.device).view(-1, 1, 1)
    return index, (numbers < count) & (first_block[rows, index] == first)


def take_blocks(x: Tensor, index: Tensor) -> Tensor:
    """Return the blocks `index` [R, A, cut] of x [B, H, N, size, ...], as [B, H, A, cut size, ...]."""
    wide = x.flatten(3)
    blocks = take_tokens(wide, index.flatten(1).clamp(max=x.shape[2] - 1))
    return blocks.unflatten(2, index.shape[1:]).unflatten(4, x.shape[3:]).flatten(3, 4)
