"""The BlockMask of a call of FlexAttention: the blocks of keys that each block of queries needs.

Where it is affordable the rule is evaluated for all pairs on the device, a run of queries at a time. This
gives the exact blocks of each batch row and head, and reads no tensor on the CPU. Otherwise the blocks come
from the layout, which is the same for all rows and heads and never dense.
"""

import dataclasses
import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from polyformer.attention.functional.request import Request
from polyformer.attention.patterns.base import Pattern
from polyformer.attention.patterns.layout import Interval, intersect, unite
from polyformer.core.sequence.context import Bare, Context

BLOCK = 128
"""Queries and keys per block of a BlockMask: the default of FlexAttention."""

EVALUATED, EVALUATED_ONCE = 1 << 26, 1 << 30
"""Largest number of pairs to evaluate; the second for static patterns on CUDA, which all layers share."""

TOGETHER = 1 << 25
"""Number of pairs to evaluate at a time; each takes some tens of bytes."""

Blocks = tuple[Tensor, Tensor]
"""Blocks with some, and blocks with only visible pairs, [B or 1, H or 1, rows, columns] of bool."""


def block_mask(request: Request) -> Any:
    """Return the BlockMask of a call, cached across calls if it depends on lengths only."""
    pattern, context, device = request.pattern, request.context, request.q.device
    assert pattern is not None, "without a pattern there is no mask"
    size = request.q.shape[0], request.q.shape[1]
    traced = torch.compiler.is_compiling() or is_in_torch_dispatch_mode()  # such as fake tensors
    if context.bare is not None and pattern.is_static() and not traced:
        return _kept(pattern, context.bare, size, device)
    return context.once(
        ("block mask", pattern, size, device), lambda: _block_mask(pattern, context, size, device)
    )


@functools.lru_cache(maxsize=64)
def _kept(pattern: Pattern, bare: Bare, size: tuple[int, int], device: torch.device) -> Any:
    with torch.inference_mode(False):  # else a later backward pass could not save the tensors
        return _block_mask(pattern, Context.from_bare(bare), size, device)


def _block_mask(pattern: Pattern, context: Context, size: tuple[int, int], device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import BlockMask

    lookups = pattern.with_tables(context, device)
    b, h = (torch.arange(number, device=device) for number in size)
    place = b.view(-1, 1, 1, 1), h.view(1, -1, 1, 1)
    zero = torch.zeros(1, dtype=torch.long, device=device)
    # The rule for a single pair has axes for batch rows and heads only if it depends on them.
    copies = lookups.mask(context, *place, zero.view(1, 1), zero).numel()
    if copies * context.q_len * context.kv_len <= _limit(pattern, device):
        some, full = blocks_by_rule(lookups, context, place, max(1, TOGETHER // (copies * context.kv_len)))
    else:
        some, full = blocks_by_layout(pattern, context, device)
    return BlockMask.from_kv_blocks(
        *_ordered(some & ~full),
        *_ordered(full),
        BLOCK_SIZE=BLOCK,
        mask_mod=lookups.mask_mod(moving(context, device)),
        seq_lengths=(context.q_len, context.kv_len),
    )


def _limit(pattern: Pattern, device: torch.device) -> int:
    """Return the largest number of pairs to evaluate."""
    return EVALUATED_ONCE if device.type == "cuda" and pattern.is_static() else EVALUATED


def are_heads_evaluated(request: Request) -> bool:
    """Return whether a BlockMask has separate blocks for each head: layouts are shared by all heads."""
    pattern, context = request.pattern, request.context
    assert pattern is not None, "without a pattern there is no mask"
    pairs = context.num_rows * request.q.shape[1] * context.q_len * context.kv_len
    return pairs <= _limit(pattern, request.q.device)


def moving(context: Context, device: torch.device) -> Context:
    """Return `context` with its offset in a tensor that the kernel reads when it runs.

    A Python number would be a constant of the compiled kernel. After its first change it would become a
    dynamic number, which FlexAttention does not support.
    """
    offset: Any = context.offset
    if not isinstance(offset, Tensor):
        offset = torch.full((), offset, device=device)  # without a copy from the CPU, which would wait
    return dataclasses.replace(context, q_start=offset, memo={})


def blocks_by_rule(pattern: Pattern, context: Context, place: tuple[Tensor, Tensor], queries: int) -> Blocks:
    """Return the blocks of a pattern, evaluated for about `queries` queries at a time."""
    device, columns = place[0].device, -(-context.kv_len // BLOCK)
    kv_idx = torch.arange(context.kv_len, device=device)
    step = -(-queries // BLOCK) * BLOCK
    some, full = [], []
    for start in range(0, context.q_len, step):
        q_idx = torch.arange(start, min(start + step, context.q_len), device=device).view(-1, 1)
        mask = pattern.mask(context, *place, q_idx, kv_idx)
        number, rows = q_idx.shape[0], -(-q_idx.shape[0] // BLOCK)
        mask = mask.view(*[1] * (4 - mask.dim()), *mask.shape)
        mask = F.pad(mask, (0, columns * BLOCK - context.kv_len, 0, rows * BLOCK - number))
        seen = mask.unflatten(3, (columns, BLOCK)).unflatten(2, (rows, BLOCK)).sum((3, 5), dtype=torch.int32)
        # The last block may have fewer queries; a block with fewer keys is never full.
        inside = (number - BLOCK * torch.arange(rows, device=device)).clamp_max(BLOCK).view(-1, 1)
        some.append(seen > 0)
        full.append(seen == inside * BLOCK)
    return torch.cat(some, 2), torch.cat(full, 2)


def blocks_by_layout(pattern: Pattern, context: Context, device: torch.device) -> Blocks:
    """Return the blocks that a layout touches, and the blocks that lie in its unmasked keys, [1, 1, ...]."""
    listed = _rows(pattern, context)
    shape = 1, 1, len(listed), -(-context.kv_len // BLOCK)
    outer, inner = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
    for row, (some, full) in enumerate(listed):
        for start, stop in some:
            outer[0, 0, row, start // BLOCK : -(-stop // BLOCK)] = True
        for start, stop in full:
            inner[0, 0, row, -(-start // BLOCK) : stop // BLOCK] = True
    return outer.to(device, non_blocking=True), inner.to(device, non_blocking=True)


def _rows(pattern: Pattern, context: Context) -> list[tuple[tuple[Interval, ...], tuple[Interval, ...]]]:
    """Return the keys of each block of queries; rows of the layout shorter than a block are joined."""
    joined: dict[int, tuple[tuple[Interval, ...], tuple[Interval, ...]]] = {}
    for row in pattern.layout(context, BLOCK):
        block = row.start // BLOCK
        # Rows in the same block: keys of any row, and unmasked keys of all rows.
        some, full = joined.get(block, ((), row.keys.full))
        joined[block] = unite((*some, *row.keys.some)), intersect(full, row.keys.full)
    return [joined[block] for block in sorted(joined)]


def _ordered(blocks: Tensor) -> Blocks:
    """Return the number of blocks of each row, and the indices of all blocks with these blocks first."""
    order = blocks.to(torch.int32).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), order.to(torch.int32)
