"""The choice of key blocks: every query ranks the blocks of its document by the mean of their keys.

A block is `size` positions of a document, so padding, packing and caches do not change it. A causal query
ranks only blocks before its own: all their tokens are earlier than the query. The choice of a query therefore
depends neither on later tokens nor on other queries, and decoding chooses as a single pass does.
"""

import dataclasses

import torch
from torch import Tensor

from polyformer.core.sequence.context import Context


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
