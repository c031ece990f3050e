"""Compiled FlexAttention on CUDA, with a BlockMask of each batch row and head.

On a CPU it runs only if it is named, and without gradients: torch's CPU kernel has no backward pass and no
log-sum-exp. `auto` skips it there because each pattern, shape and score function takes seconds to compile.

A BlockMask lists the blocks of keys that each block of queries needs. Where it is affordable the rule is
evaluated for all pairs on the device, a run of queries at a time. This gives the exact blocks of each batch
row and head, and reads no tensor on the CPU. Otherwise the blocks come from the layout, which is the same for
all rows and heads and never dense.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from polyformer.attention.functional.request import Request, transformed
from polyformer.attention.patterns.base import Pattern, ScoreMod
from polyformer.attention.patterns.composition import PerHead, simple_parts
from polyformer.attention.patterns.layout import Interval, intersect, unite
from polyformer.attention.patterns.mods import Mod
from polyformer.core.ops.autograd import mark_first_order
from polyformer.core.ops.compiled_code import prepare_inductor
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


COMPILATIONS = 200
"""Largest number of different patterns and score functions per process that FlexAttention compiles."""


FEW_QUERIES = 128
"""Number of queries up to which `auto` skips this backend if there are more keys, as in decoding."""

LENGTHS = 32
"""Number of different lengths that `auto` compiles for a GPU: a batch of padded texts may have any length."""

compiled_lengths: set[tuple[int, int]] = set()
"""Numbers of queries and keys that were compiled for a GPU so far."""

TERMS_LIMIT = 1 << 28
"""Largest number of products of queries or keys with vectors of distances: 512 MiB in half precision.

Each layer keeps them for the backward pass, and their number grows with the square of the length.
"""


def refuses(request: Request) -> str | None:
    """Return why this backend cannot run the request, or None."""
    device = request.q.device.type
    if request.dropout:
        return "FlexAttention has no dropout"
    if request.relative is not None and request.relative.position_values is not None:
        return "FlexAttention has no terms in the values"
    if request.q.dtype == torch.float64:
        return "its kernels have no float64"
    if 0 in (request.q.shape[0], request.context.q_len, request.context.kv_len):
        return "there is nothing to attend to"
    if (terms := _terms_of_vectors(request)) > TERMS_LIMIT:
        return f"relative terms of vectors would have {terms} entries for all distances, beyond {TERMS_LIMIT}"
    if device == "cpu":
        return _refuses_on_cpu(request)
    if device != "cuda":
        return f"its kernels are for CUDA and CPUs, not {device}"
    widths = request.q.shape[3], request.v.shape[3]
    if min(widths) < 16:
        return f"its kernels need widths of 16 or more, got {min(widths)}"
    return None


def passed_over(request: Request) -> str | None:
    """Return why `auto` skips this backend if it can run the request, or None: it compiles for seconds."""
    if request.q.device.type == "cpu":
        return "on a CPU it compiles anew, for seconds, for every pattern and shape: it is to be asked for"
    lengths = request.context.q_len, request.context.kv_len
    if lengths[0] <= FEW_QUERIES and lengths[0] < lengths[1]:
        return "it compiles anew for every number of keys, and there are few queries"
    # A graph around the call is compiled for its length anyway.
    if torch.compiler.is_compiling() or lengths in compiled_lengths or len(compiled_lengths) < LENGTHS:
        return None
    return f"it compiles anew for every length, and has compiled {LENGTHS}"


def _refuses_on_cpu(request: Request) -> str | None:
    # A score_mod may capture tensors that require gradients.
    captured = request.score_mod is not None or request.relative is not None
    if torch.is_grad_enabled() and (captured or any(x.requires_grad for x in _inputs(request))):
        return "it has no backward on a CPU; call it under torch.no_grad()"
    if request.return_lse:
        return "its kernel for a CPU returns no log-sum-exp"
    if transformed():
        return "torch.func and forward differentiation cannot look into its kernel"
    return None if torch.compiler.is_compiling() else _lacks()


def _terms_of_vectors(request: Request) -> int:
    """Return the number of entries of the tables [B, H, Tq or Tk, R] that a score_mod looks up."""
    if (relative := request.relative) is None:
        return 0
    batch, heads = request.q.shape[:2]
    lengths = (
        (relative.position_keys, request.context.q_len),
        (relative.position_queries, request.context.kv_len),
    )
    return sum(batch * heads * length * table.shape[1] for table, length in lengths if table is not None)


def _inputs(request: Request) -> tuple[Tensor, Tensor, Tensor]:
    return request.q, request.k, request.v


@functools.cache
def _lacks() -> str | None:
    """Return what this machine lacks to compile for its CPU, or None."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler
    from torch._inductor.kernel.flex.flex_cpu import check_cpu_supported

    if not check_cpu_supported():
        return "its kernel for a CPU needs AVX2, and Linux or Windows"
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "there is no C++ compiler (set CXX, or install g++ or clang)"
    return None


def run(request: Request) -> tuple[Tensor, Tensor | None]:
    """Return output [B, H, Tq, Dv] and log-sum-exp [B, H, Tq], which is None on a CPU."""
    from torch.nn.attention.flex_attention import AuxRequest

    device = request.q.device
    if device.type == "cuda" and not torch.compiler.is_compiling():
        compiled_lengths.add((request.context.q_len, request.context.kv_len))
    mask = None if request.pattern is None else block_mask(request)
    score_mod = _moved(request, moving(request.context, device))
    result = _attention()(
        request.q,
        request.k,
        request.v,
        score_mod=score_mod,
        block_mask=mask,
        scale=request.scale,
        enable_gqa=request.groups > 1,
        kernel_options=_kernel_options(request.context.q_len, request.groups),
        return_aux=None if device.type == "cpu" else AuxRequest(lse=True),
    )
    if device.type == "cpu":
        return result, None
    out, lse = result[0], result[1].lse
    for part in (out, lse):
        mark_first_order(part, "FlexAttention (backend 'flex')")
    return out, lse


def _kernel_options(queries: int, groups: int) -> dict[str, bool] | None:
    """Return the options of a call with `groups` query heads per key head.

    torch's kernel for fewer than 128 queries takes only a power of 2 of groups, and no more rows than a block
    of the mask has. Other calls with few queries need the general kernel.
    """
    takes = groups & (groups - 1) == 0 and queries * groups <= BLOCK
    return None if takes else {"FORCE_USE_FLEX_ATTENTION": True}


def can_join_heads(request: Request) -> bool:
    """Return whether a call should compute heads with different patterns: they look their head up in a table.

    The heads of `PerHead` are separate calls: the kernel would compute the rules of all heads for each pair.
    """
    if request.pattern is None:
        return True
    per_head = any(isinstance(part, PerHead) for part in simple_parts(request.pattern))
    return request.pattern.is_static() and not per_head and are_heads_evaluated(request)


def _moved(request: Request, context: Context) -> ScoreMod | None:
    """Return the score_mod with the relative terms, all with the offset of `context`."""
    mod = request.score_mod
    if isinstance(mod, Mod) and mod.start:
        request = dataclasses.replace(request, score_mod=dataclasses.replace(mod, start=context.offset))
    return request.whole_score_mod(context)


def _attention() -> Callable[..., Any]:
    """Return compiled FlexAttention, or the plain function inside a graph that is being compiled anyway."""
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention if torch.compiler.is_compiling() else _compiled()


@functools.cache
def _compiled() -> Callable[..., Any]:
    from torch._dynamo import config
    from torch.nn.attention.flex_attention import flex_attention

    prepare_inductor()
    # The kernels cannot be compiled if a number that a mask captures, such as a window's, has become dynamic.
    compiled = torch.compile(flex_attention, dynamic=False)

    def call(*args: Any, **options: Any) -> Any:
        # Each mod needs a separate compilation. After dynamo's default of 8, the function would silently run
        # uncompiled and compute all scores at once.
        with config.patch(recompile_limit=COMPILATIONS):
            return compiled(*args, **options)

    return call
