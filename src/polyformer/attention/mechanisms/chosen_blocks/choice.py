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
        near: whether a query always sees a block, [B or 1, Tq, N].
        others: whether a query ranks a block, [B or 1, Tq, N].
    """

    numbers: Tensor
    near: Tensor
    others: Tensor


def block_table(context: Context, rule: Ranking, device: torch.device) -> BlockTable:
    """Return the blocks of a call, which the layers of a stack share."""
    # The meta device has no numbers to compare.
    device = torch.device("cpu") if device.type == "meta" else device
    return context.once(("chosen blocks", rule, device), lambda: _block_table(context, rule, device))


def _block_table(context: Context, rule: Ranking, device: torch.device) -> BlockTable:
    slots = torch.arange(context.kv_len, device=device)
    key_blocks = _blocks(context.kv_pos, slots, rule.size)
    query_blocks = _blocks(context.q_pos, slots[: context.q_len] + context.offset, rule.size)
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
    others = mine & ~near
    if context.causal:
        near, others = near & (distance >= 0), others & (distance > 0)
    return BlockTable(numbers, near, others)


def _blocks(positions: Tensor | None, slots: Tensor, size: int) -> Tensor:
    """Return the block of each position [B or 1, T]."""
    places = slots if positions is None else positions.to(slots.device)
    return torch.div(places if places.dim() == 2 else places[None], size, rounding_mode="floor")


@torch.no_grad()
def choose(q: Tensor, k: Tensor, table: BlockTable, count: int) -> Tensor:
    """Return whether each query ranks a block among its `count` best others: [B, H, Tq, N] of bool.

    q [B, H, Tq, D], k [B, Hkv, Tk, D]. Equal scores, and blocks that are not finite, are in no fixed order.
    """
    exact = torch.promote_types(q.dtype, torch.float32)
    if q.is_meta:
        # Any choice costs the same: the first blocks.
        some = table.others & (table.others.cumsum(-1) <= count)
        return some.unsqueeze(1).expand(q.shape[0], q.shape[1], -1, -1)
    means = block_means(k.to(exact), table)
    grouped = q.to(exact).unflatten(1, (k.shape[1], -1))
    scores = (grouped @ means.mT.unsqueeze(2)).flatten(1, 2)
    scores = scores.masked_fill(~table.others.unsqueeze(1), -torch.inf)
    best = scores.topk(min(count, scores.shape[3]), dim=-1)
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    return chosen.scatter_(3, best.indices, best.values > -torch.inf)


def block_means(k: Tensor, table: BlockTable) -> Tensor:
    """Return the mean key of each block [B, Hkv, N, D]; 0 for a block without keys."""
    batch, heads, length, width = k.shape
    numbers = table.numbers.expand(batch, length)
    count = table.near.shape[2]
    where = numbers[:, None, :, None].expand(k.shape)
    sums = k.new_zeros(batch, heads, count, width).scatter_add_(2, where, k)
    sizes = k.new_zeros(batch, count).scatter_add_(1, numbers, k.new_ones(()).expand(batch, length))
    return sums / sizes.clamp_min(1)[:, None, :, None]
