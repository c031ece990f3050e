"""Softmax attention over blocks of keys that each query chooses by content: the base of `chosen_blocks`.

    s_ib = q_i . mean_(j in b) k_j        a query sees its near blocks and the best others

A block is `size` positions of a document, so padding, packing and caches do not change it. A causal query
ranks only blocks before its own: all their tokens are earlier than the query. The choice of a query therefore
depends neither on later tokens nor on other queries, and decoding chooses as a single pass does.

The definition is dense attention with the mask of the choice. The fast form, for inference, computes only the
chosen pairs: with the outputs y_i and the log-sum-exp m_i of the near blocks, each chosen block adds its
weights relative to the near blocks, so no maximum is needed:

    w_ij = exp(q_i . k_j - m_i)        out_i = (y_i + sum_j w_ij v_j) / (1 + sum_j w_ij)
"""

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from polyformer.attention.functional.attend import attend
from polyformer.attention.functional.isolation import guarded
from polyformer.attention.functional.request import score_scale
from polyformer.attention.mechanisms.base import Heads, MechanismBackend, MechanismConfig, PositionTerms
from polyformer.attention.mechanisms.pair_weights import CachedAttention
from polyformer.attention.patterns.block_base import BlockPattern
from polyformer.core.kv_cache import appended
from polyformer.core.ops.autograd import at_least_float32, without_autocast
from polyformer.core.ops.softmax import recording
from polyformer.core.ranges import Probability
from polyformer.core.sequence.context import Context
from polyformer.core.state import State


@dataclasses.dataclass(frozen=True)
class Ranking:
    """The rule of a choice.

    size: positions per block. first: the first blocks of a document, always seen. local: the query's block
    and the blocks before it (in an encoder also after it), always seen. ranked: further blocks by content.
    """

    size: int
    first: int
    local: int
    ranked: int


@dataclasses.dataclass(frozen=True)
class BlockTable:
    """The blocks of a call.

    Args:
        numbers: the block of each key slot, [B or 1, Tk]: rows of `near` and `others`, in order of documents.
        places: the place of each key slot within its block, [B or 1, Tk].
        near: whether a query always sees a block, [B or 1, Tq, N].
        others: whether a query ranks a block, [B or 1, Tq, N].
        whole: whether a query may see all tokens of a block, [B or 1, Tq, N].
    """

    numbers: Tensor
    places: Tensor
    near: Tensor
    others: Tensor
    whole: Tensor


def block_table(context: Context, rule: Ranking, device: torch.device) -> BlockTable:
    """Return the blocks of a call, which the layers of a stack share."""
    # The meta device has no numbers to compare.
    device = torch.device("cpu") if device.type == "meta" else device
    return context.once(("chosen blocks", rule, device), lambda: _block_table(context, rule, device))


def _block_table(context: Context, rule: Ranking, device: torch.device) -> BlockTable:
    slots = torch.arange(context.kv_len, device=device)
    keys = _positions(context.kv_pos, slots)
    queries = _positions(context.q_pos, slots[: context.q_len] + context.offset)
    key_blocks, query_blocks = (torch.div(x, rule.size, rounding_mode="floor") for x in (keys, queries))
    key_documents, query_documents = (
        torch.zeros_like(blocks) if documents is None else documents
        for blocks, documents in ((key_blocks, context.kv_doc), (query_blocks, context.q_doc))
    )
    # A code for document and block, in order of both; padding has the code -1.
    height = max([1, *(int(x.max()) + 1 for x in (key_blocks, query_blocks) if x.numel())])
    codes = key_documents * height + key_blocks
    if context.kv_valid is not None:
        codes = codes.masked_fill(~context.kv_valid.bool(), -1)
    unique, numbers = torch.unique(codes, return_inverse=True)
    # Rows may differ: a block without keys in a row is not ranked there.
    filled = torch.zeros(len(codes), 1, len(unique), dtype=torch.bool, device=device)
    filled.scatter_(2, numbers.unsqueeze(1), True)
    block = query_blocks.unsqueeze(-1)
    mine = (
        filled
        & (unique >= 0)
        & (torch.div(unique, height, rounding_mode="floor") == query_documents[..., None])
    )
    places = unique % height
    distance = block - places
    near = mine & ((places < rule.first) | (distance.abs() < rule.local))
    others, whole = mine & ~near, mine
    if context.causal:
        near, others = near & (distance >= 0), others & (distance > 0)
        # The last query of a block sees all of it.
        whole = mine & (block + (queries % rule.size == rule.size - 1).unsqueeze(-1) > places)
    return BlockTable(numbers, keys % rule.size, near, others, whole)


def _positions(positions: Tensor | None, slots: Tensor) -> Tensor:
    """Return positions as [B or 1, T]; by default the slots."""
    places = slots if positions is None else positions.to(slots.device)
    return places if places.dim() == 2 else places[None]


def block_scores(q: Tensor, summaries: Tensor) -> Tensor:
    """Return the products of queries q [B, H, Tq, D] and a vector of each block [B, Hkv, N, D].

    The result is [B, Hkv, H / Hkv, Tq, N].
    """
    return q.unflatten(1, (summaries.shape[1], -1)) @ summaries.mT.unsqueeze(2)


@torch.no_grad()
def best_blocks(scores: Tensor, table: BlockTable, count: int) -> Tensor:
    """Return whether each query ranks a block among its `count` best others: [B, H, Tq, N] of bool.

    scores: [B, H, Tq, N], which are overwritten. Equal scores, and scores that are not finite, are in no
    fixed order.
    """
    if scores.is_meta:
        # Any choice costs the same: the first blocks.
        some = table.others & (table.others.cumsum(-1) <= count)
        return some.unsqueeze(1).expand(scores.shape[0], scores.shape[1], -1, -1)
    scores.masked_fill_(~table.others.unsqueeze(1), -torch.inf)
    best = scores.topk(min(count, scores.shape[3]), dim=-1, sorted=False)
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    return chosen.scatter_(3, best.indices, best.values > -torch.inf)


def block_means(k: Tensor, table: BlockTable) -> Tensor:
    """Return the mean key of each block [B, Hkv, N, D]; 0 for a block without keys."""
    batch, heads, length, width = k.shape
    numbers = table.numbers.to(k.device).expand(batch, length)
    count = table.near.shape[2]
    where = numbers[:, None, :, None].expand(k.shape)
    sums = k.new_zeros(batch, heads, count, width).scatter_add_(2, where, k)
    sizes = k.new_zeros(batch, count).scatter_add_(1, numbers, k.new_ones(()).expand(batch, length))
    return sums / sizes.clamp_min(1)[:, None, :, None]


@dataclasses.dataclass(frozen=True)
class NearBlocks(BlockPattern, named=False):
    """The first blocks of a document, and the blocks less than `local` from the block of the query."""

    size: int
    first: int
    local: int

    def sees_blocks(self, context: Context, query: Tensor, key: Tensor) -> Tensor:
        """Return key < first or |query - key| < local, counted in blocks."""
        return (key < self.first) | ((query - key).abs() < self.local)

    def visible_blocks(self, context: Context, block: int, last: int) -> set[int]:
        """Return the first blocks and the blocks around `block`, clipped to the text."""
        around = range(max(0, block - self.local + 1), min(block + self.local - 1, last) + 1)
        return {*range(min(self.first, last + 1)), *around}


@torch.no_grad()
def with_chosen_blocks(
    heads: Heads, near: tuple[Tensor, Tensor], chosen: Tensor, table: BlockTable, scale: float
) -> Tensor | None:
    """Return attention over the near and the chosen blocks [B, H, Tq, Dv].

    near: the outputs and the log-sum-exp of the near blocks; chosen [B, H, Tq, N] of bool. None if scores
    exceed the near scores by an amount at which sums may overflow.
    """
    q, k, v = heads
    batch, groups = len(q), q.shape[1] // k.shape[1]
    out, total = near[0].clone(), (near[1] > -torch.inf).to(q.dtype)
    # A further channel subtracts the log-sum-exp from all scores of a query.
    q = torch.cat([q, -near[1].masked_fill(total == 0, 0).unsqueeze(-1)], -1)
    k = torch.cat([k * scale, torch.ones_like(k[..., :1])], -1)
    for row in range(batch):
        numbers = table.numbers[min(row, len(table.numbers) - 1)]
        order = numbers.argsort(stable=True).to(q.device)
        sizes = numbers.bincount(minlength=chosen.shape[3]).tolist()
        for kv_head in range(k.shape[1]):
            # Sorted by block, the keys of a block are neighbours.
            keys, values = (x[row, kv_head].index_select(0, order).split(sizes) for x in (k, v))
            for head in range(kv_head * groups, (kv_head + 1) * groups):
                own = row, head
                _add_blocks(q[own], keys, values, chosen[own], out[own], total[own])
    # Below the root of the largest number, products with values do not overflow.
    if not q.is_meta and not (total < torch.finfo(q.dtype).max ** 0.5).all():
        return None
    return out.div_(total.masked_fill_(total == 0, 1).unsqueeze(-1))


def _add_blocks(
    q: Tensor,
    keys: tuple[Tensor, ...],
    values: tuple[Tensor, ...],
    chosen: Tensor,
    out: Tensor,
    total: Tensor,
) -> None:
    """Add the weighted values of one head to out [Tq, Dv], and the weights to total [Tq]."""
    counts = chosen.sum(0).tolist()
    queries = chosen.T.nonzero()[:, 1].to(q.device).split(counts)
    # All blocks write their scores to the same memory, which stays in the cache.
    scratch = q.new_empty(max(counts, default=0) * max(map(len, keys), default=0))
    for k, v, rows in zip(keys, values, queries):
        if not len(rows):
            continue
        weights = scratch[: len(rows) * len(k)].view(len(rows), len(k))
        torch.mm(q.index_select(0, rows), k.T, out=weights).exp_()
        out.index_add_(0, rows, weights @ v)
        total.index_add_(0, rows, weights.sum(1))


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
