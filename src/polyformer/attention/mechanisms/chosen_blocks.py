"""Members with blocks of keys that each query chooses: B_i are the blocks that query i sees.

    moba         B_i = own block, and the top_k - 1 before it with the greatest q_i . mean_(j in b) k_j
    top_blocks   B_i = first blocks, last `local` blocks, and others with the greatest q_i . mean_(j in b) k_j
    nsa          B_i = first, last two, and the top_k others with the greatest sum of p_ib over a head group
                 k'_b = mean_(j in b) a_(j in b) * k_j        v'_b = mean_(j in b) c_(j in b) * v_j
                 p_ib = softmax_b(q_i . k'_b / sqrt(D))       over the blocks with all tokens at or before i
                 y_i = g_i1 sum_b p_ib v'_b + g_i2 attention(q_i, B_i) + g_i3 attention(q_i, window before i)
                 g = sigmoid(x W_g)                           three gates per head, from the layer's input

The first two are attention over B_i, and have no parameters (`block_choice`).
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
from polyformer.attention.mechanisms.block_choice import (
    BlockTable,
    ChosenBlocks,
    ChosenBlocksConfig,
    Ranking,
    best_blocks,
    block_means,
    block_scores,
    block_table,
)
from polyformer.attention.patterns.windows import Window
from polyformer.core.errors import InputError
from polyformer.core.kv_cache import appended
from polyformer.core.ops.autograd import at_least_float32, without_autocast
from polyformer.core.ops.softmax import record, recorded, recording, softmax
from polyformer.core.ranges import NonNegativeInt, PositiveInt
from polyformer.core.sequence.context import Context
from polyformer.core.state import State


@dataclasses.dataclass(frozen=True, kw_only=True)
class MobaConfig(ChosenBlocksConfig):
    """Mixture of block attention: each query attends to the blocks with the best mean keys, and its own.

    Own keys are masked causally. The choice has no gradient; the keys that were chosen have the gradients of
    attention. In an encoder blocks after the own are ranked too.
    """

    block_size: PositiveInt = 64
    top_k: PositiveInt = 3  # blocks that a query sees, with its own

    kind: ClassVar[str] = "moba"
    paper: ClassVar[str] = "Lu et al. 2025 (MoBA), section 2.2"

    def ranking(self) -> Ranking:
        """Return the rule with top_k - 1 ranked blocks."""
        return Ranking(self.block_size, 0, 1, self.top_k - 1)

    @classmethod
    def examples(cls) -> tuple["MobaConfig", ...]:
        """Return a config of a few tokens per block."""
        # With these sizes no choice of the contract tests is so close that rounding decides.
        return (cls(block_size=3, top_k=2),)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopBlocksConfig(ChosenBlocksConfig):
    """Attention over the best blocks of keys, without training: first, local and chosen blocks.

    It is for checkpoints that were trained with dense attention. `keep` counts all blocks of a query. Up to
    `keep` blocks of text attention is dense, so short texts do not change. The choice resembles the estimates
    of MInference (Jiang et al. 2024) and XAttention (Xu et al. 2025), but is made for each query and not for
    blocks of queries: it then depends on no later query, and decoding with a cache equals a single pass.

    Raises `InputError` if `keep` is less than `first` and `local` together.
    """

    block_size: PositiveInt = 64
    keep: PositiveInt = 24  # blocks that a query sees
    first: NonNegativeInt = 1  # of them the first of the document
    local: PositiveInt = 4  # of them the latest, with the query's own

    kind: ClassVar[str] = "top_blocks"
    paper: ClassVar[str] = "Jiang et al. 2024 (MInference), section 3"

    def __post_init__(self) -> None:
        super().__post_init__()
        least = self.first + self.local
        if self.keep < least:
            raise InputError(
                f"keep: expected at least first + local = {least} blocks, got {self.keep}; "
                "use a larger keep or a smaller local"
            )

    def ranking(self) -> Ranking:
        """Return the rule with keep - first - local ranked blocks."""
        return Ranking(self.block_size, self.first, self.local, self.keep - self.first - self.local)

    @classmethod
    def examples(cls) -> tuple["TopBlocksConfig", ...]:
        """Return configs of a few tokens per block, with and without first blocks."""
        return cls(block_size=2, keep=3, local=1), cls(block_size=1, keep=4, first=0, local=2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NSAConfig(ChosenBlocksConfig):
    """Native sparse attention: block summaries, the blocks that they choose, and a sliding window.

    The softmax of the summaries ranks blocks, so the choice costs nothing more, and training the summaries
    trains it. All heads that share a key head choose the same blocks.

    Deviations: the paper's summaries are an MLP of overlapping windows, and each branch has its own keys and
    values. Here a summary is a mean with a learned weight for each place and channel, of a block of the
    choice, and branches share keys and values, as in the public code of flash-linear-attention. Without
    causality a query sees all summaries, also of a last block with fewer tokens.
    """

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
