"""Base of the mechanisms with chosen blocks."""

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from polyformer.attention.functional.attend import attend
from polyformer.attention.functional.isolation import guarded
from polyformer.attention.functional.request import score_scale
from polyformer.attention.mechanisms.base import Heads, MechanismBackend, MechanismConfig, PositionTerms
from polyformer.attention.mechanisms.cached import CachedAttention
from polyformer.attention.mechanisms.chosen_blocks.choice import (
    BlockTable,
    Ranking,
    best_blocks,
    block_means,
    block_scores,
    block_table,
)
from polyformer.attention.mechanisms.chosen_blocks.gathered import with_chosen_blocks
from polyformer.attention.mechanisms.chosen_blocks.near_blocks import NearBlocks
from polyformer.core.kv_cache import appended
from polyformer.core.ops.autograd import at_least_float32, without_autocast
from polyformer.core.ops.softmax import recording
from polyformer.core.ranges import Probability
from polyformer.core.sequence.context import Context
from polyformer.core.state import State


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChosenBlocksConfig(MechanismConfig):
    """Options of all members with chosen blocks; `ranking` is the rule."""

    dropout: Probability = 0.0  # of attention weights
    scale: float | None = None  # of scores of tokens; by default 1 / sqrt(D)
    backend: MechanismBackend = "auto"  # "definition": dense, with a mask

    separate_queries: ClassVar[bool] = True
    eager: ClassVar[str] = "the sizes of its products depend on how many queries chose each block"

    def ranking(self) -> Ranking:
        """Return the rule by which a query chooses blocks."""
        raise NotImplementedError

    def build(self, num_heads: int, head_size: int) -> "ChosenBlocks":
        """Return the module, which has no parameters."""
        return ChosenBlocks(self)


class ChosenBlocks(CachedAttention):
    """Softmax attention over the keys of near and of chosen blocks, with a KV cache as state."""

    def __init__(self, config: ChosenBlocksConfig):
        super().__init__()
        self.config = config

    @guarded
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, context: Context, state: State | None, position: PositionTerms
    ) -> tuple[Tensor, State | None]:
        """Return attention over the near and the chosen blocks of all keys, and the next cache."""
        k, v, state = appended(state, k, v)
        rule = self.config.ranking()
        with without_autocast(q), torch.no_grad():
            table = block_table(context, rule, q.device)
            means = block_means(at_least_float32(k), table)
            scores = block_scores(at_least_float32(q), means).flatten(1, 2)
            chosen = best_blocks(scores, table, rule.ranked)
        return self.over_blocks(Heads(q, k, v), context, position, table, chosen), state

    def over_blocks(
        self, heads: Heads, context: Context, position: PositionTerms, table: BlockTable, chosen: Tensor
    ) -> Tensor:
        """Return attention over the near blocks and the blocks `chosen` [B, H, Tq, N]."""
        q, k, v = heads
        rule = self.config.ranking()
        # The meta device has no numbers for a mask: it traces the cost of inference.
        trained = torch.is_grad_enabled() and any(x.requires_grad for x in heads) and not q.is_meta
        plain = position is None or position.is_plain
        dense = recording() or trained or not plain or self.config.backend == "definition"
        if dense or (self.training and self.config.dropout):
            return self._masked(heads, context, position, table, chosen)
        with without_autocast(q):
            near, near_lse = attend(
                q,
                k,
                v,
                pattern=NearBlocks(rule.size, rule.first, rule.local),
                context=context,
                scale=self.config.scale,
                return_lse=True,
            )
            scale = score_scale(self.config.scale, q.shape[3])
            exact = Heads(*map(at_least_float32, heads))
            sums = at_least_float32(near), at_least_float32(near_lse)
            y = with_chosen_blocks(exact, sums, chosen, table, scale)
        if y is None:
            return self._masked(heads, context, position, table, chosen)
        return y.to(q.dtype)

    def _masked(
        self, heads: Heads, context: Context, position: PositionTerms, table: BlockTable, chosen: Tensor
    ) -> Tensor:
        """Return dense attention with the mask of the chosen blocks: the definition."""
        q, k, v = heads
        seen = (chosen | table.near.unsqueeze(1)).expand(q.shape[0], *chosen.shape[1:])
        numbers, offset = table.numbers.expand(q.shape[0], -1), context.offset
        definition = self.config.backend == "definition"

        # A mod is recorded with indices of 0, which may be before the first query.
        def is_seen(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return seen[b, h, (q_idx - offset).clamp_min(0), numbers[b, kv_idx]]

        return attend(
            q,
            k,
            v,
            # The meta device has no numbers for a mask; the products are the same without it.
            mask_mod=None if q.is_meta else is_seen,
            score_mod=None if position is None else position.score_mod(q, k, context),
            relative=None if position is None else position.relative(q, k, context),
            context=context,
            scale=self.config.scale,
            dropout=self.config.dropout if self.training else 0.0,
            backend="definition" if definition else "auto",
        )
