"""Native sparse attention (NSA): block summaries, blocks that these summaries choose, and a sliding window.

    k'_b = mean_(j in b) a_(j in b) * k_j        v'_b = mean_(j in b) c_(j in b) * v_j
    p_ib = softmax_b(q_i . k'_b / sqrt(D))       over the blocks with all tokens at or before i
    y_i = g_i1 sum_b p_ib v'_b + g_i2 attention(q_i, B_i) + g_i3 attention(q_i, window before i)
    B_i = the first block, the last two, and the top_k others with the greatest sum of p_ib over a head group
    g = sigmoid(x W_g)                           three gates per head, from the input of the layer

The softmax of the summaries ranks blocks, so the choice costs nothing more, and training the summaries trains
it. All heads that share a key head choose the same blocks. Yuan et al. 2025, section 3.

Deviations: the paper's summaries are an MLP of overlapping windows, and each branch has its own keys and
values. Here a summary is a mean with a learned weight for each place and channel, of a block of the choice,
and branches share keys and values, as in the public code of flash-linear-attention. Without causality a query
sees all summaries, also of a last block with fewer tokens.
"""

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyformer.attention.functional.isolation import guarded
from polyformer.attention.functional.request import score_scale
from polyformer.attention.mechanisms.base import Heads, PositionTerms, check_head_size
from polyformer.attention.mechanisms.chosen_blocks.base import ChosenBlocks, ChosenBlocksConfig
from polyformer.attention.mechanisms.chosen_blocks.choice import (
    BlockTable,
    Ranking,
    best_blocks,
    block_means,
    block_scores,
    block_table,
)
from polyformer.attention.patterns.window import Window
from polyformer.core.kv_cache import appended
from polyformer.core.ops.autograd import at_least_float32, without_autocast
from polyformer.core.ops.softmax import record, recorded, recording, softmax
from polyformer.core.ranges import NonNegativeInt, PositiveInt
from polyformer.core.sequence.context import Context
from polyformer.core.state import State


@dataclasses.dataclass(frozen=True, kw_only=True)
class NSAConfig(ChosenBlocksConfig):
    """Native sparse attention: block summaries, the blocks that they choose, and a sliding window."""

    block_size: PositiveInt = 64
    top_k: NonNegativeInt = 13  # blocks by content; the first and the last two are seen too
    window: PositiveInt = 512  # latest tokens of the third branch, with the query's own

    kind: ClassVar[str] = "nsa"
    paper: ClassVar[str] = "Yuan et al. 2025 (NSA), section 3"
    pairs: ClassVar[bool] = False
    supports_score_bias: ClassVar[bool] = False
    reasons: ClassVar[Mapping[str, str]] = {
        "supports_score_bias": "the summary of a block has no single distance"
    }

    def ranking(self) -> Ranking:
        """Return the paper's rule: the first block, the last two, and top_k others."""
        return Ranking(self.block_size, 1, 2, self.top_k)

    def gate_sizes(self, num_heads: int, head_size: int) -> dict[str, int]:
        """Return a gate per head for each branch."""
        return dict.fromkeys(("summaries", "chosen", "window"), num_heads)

    def build(self, num_heads: int, head_size: int) -> "NativeSparse":
        """Return the module with the weights of the summaries."""
        return NativeSparse(self, head_size)

    @classmethod
    def examples(cls) -> tuple["NSAConfig", ...]:
        """Return a config of a few tokens per block."""
        return (cls(block_size=2, top_k=1, window=3),)


class NativeSparse(ChosenBlocks):
    """The sum of three gated branches; all heads share the weights of the summaries."""

    config: NSAConfig

    def __init__(self, config: NSAConfig, head_size: int):
        check_head_size(head_size)
        super().__init__(config)
        # With weights of 1 a summary is the mean of its block.
        self.key_weights = nn.Parameter(torch.ones(config.block_size, head_size))
        self.value_weights = nn.Parameter(torch.ones(config.block_size, head_size))

    @guarded
    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        context: Context,
        state: State | None,
        position: PositionTerms,
        *gates: Tensor,
    ) -> tuple[Tensor, State | None]:
        """See `Mechanism.forward`. gates: [B, T, 3 H] before their sigmoid; by default 0."""
        k, v, state = appended(state, k, v)
        table = block_table(context, self.config.ranking(), q.device)
        shares = gates[0] if gates else q.new_zeros(len(q), q.shape[2], 3 * q.shape[1])
        # [B, T, 3 H] -> 3 of [B, H, T, 1]
        shares = shares.to(q.dtype).sigmoid().unflatten(-1, (3, -1)).permute(2, 0, 3, 1).unsqueeze(-1)
        with recorded() if recording() else contextlib.nullcontext([]) as weights:
            summaries, importance = self.over_summaries(q, k, v, table)
            with without_autocast(q):
                chosen = best_blocks(importance, table, self.config.top_k)
            chosen = chosen.repeat_interleave(q.shape[1] // k.shape[1], 1)
            last = self.config.window - 1
            branches = (
                summaries,
                self.over_blocks(Heads(q, k, v), context, None, table, chosen),
                self.attend(q, k, v, context, None, pattern=Window(last, last), scale=self.config.scale),
            )
        if weights:
            record(torch.cat([share * w for share, w in zip(shares, weights, strict=True)], -1))
        summary, block, recent = (share * y for share, y in zip(shares, branches, strict=True))
        return summary + block + recent, state

    def over_summaries(self, q: Tensor, k: Tensor, v: Tensor, table: BlockTable) -> tuple[Tensor, Tensor]:
        """Return attention to the summaries [B, H, Tq, D], and the importance of blocks [B, Hkv, Tq, N]."""
        scale = score_scale(self.config.scale, q.shape[3])
        with without_autocast(q):
            keys, values = (
                block_means(at_least_float32(x) * at_least_float32(weights)[table.places].unsqueeze(1), table)
                for x, weights in ((k, self.key_weights), (v, self.value_weights))
            )
            scores = block_scores(at_least_float32(q) * scale, keys)
            p, _ = softmax(scores.flatten(1, 2), table.whole.unsqueeze(1).to(q.device))
            importance = p.detach().unflatten(1, (k.shape[1], -1)).sum(2)
            if self.training and self.config.dropout:
                p = F.dropout(p, self.config.dropout)
            y = p.unflatten(1, (k.shape[1], -1)) @ values.unsqueeze(2)
            return y.flatten(1, 2).to(q.dtype), importance
