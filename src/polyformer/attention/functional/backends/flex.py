"""Compiled FlexAttention on CUDA with a BlockMask that comes from the layout, never from a dense mask.

On a CPU it runs only if it is named, and without gradients: torch's CPU kernel has no backward pass and no
log-sum-exp. `auto` skips it there because each pattern, shape and score function takes seconds to compile.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from polyformer.attention.functional.request import Request, transformed
from polyformer.attention.patterns.base import Pattern, ScoreMod
from polyformer.attention.patterns.layout import Interval, intersect, unite
from polyformer.attention.patterns.mods import Mod
from polyformer.core.ops.compiled_code import separate_by_instructions
from polyformer.core.ops.second_order import mark_first_order
from polyformer.core.sequence.context import Context

BLOCK = 128
"""Queries and keys per block of a BlockMask: the default of FlexAttention."""


COMPILATIONS = 200
"""Largest number of different patterns and score functions per process that FlexAttention compiles."""


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
    if device == "cpu":
        return _refuses_on_cpu(request)
    if device != "cuda":
        return f"its kernels are for CUDA and CPUs, not {device}"
    widths = request.q.shape[3], request.v.shape[3]
    if min(widths) < 16:
        return f"its kernels need widths of 16 or more, got {min(widths)}"
    return None


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
    mask = None if request.pattern is None else block_mask(request.pattern, request.context, device)
    score_mod = _moved(request, moving(request.context, device))
    # The kernel for few queries takes only a power of 2 of query heads per key head.
    general = {"FORCE_USE_FLEX_ATTENTION": True} if request.groups & (request.groups - 1) else None
    result = _attention()(
        request.q,
        request.k,
        request.v,
        score_mod=score_mod,
        block_mask=mask,
        scale=request.scale,
        enable_gqa=request.groups > 1,
        kernel_options=general,
        return_aux=None if device.type == "cpu" else AuxRequest(lse=True),
    )
    if device.type == "cpu":
        return result, None
    out, lse = result[0], result[1].lse
    for part in (out, lse):
        mark_first_order(part, "FlexAttention (backend 'flex')")
    return out, lse


def block_mask(pattern: Pattern, context: Context, device: torch.device) -> Any:
    """Return the BlockMask of a pattern: the intervals of the layout in blocks.

    `some` is rounded outwards and `full` inwards. The layout is valid for all rows and heads, so batch and
    heads are broadcast. The context stores the mask.
    """
    return context.once(("block mask", pattern, device), lambda: _block_mask(pattern, context, device))


def _block_mask(pattern: Pattern, context: Context, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import BlockMask

    partial, full = [], []
    for some, whole in _rows(pattern, context):
        # A block inside `full` needs no mask; any other block that touches `some` is partial.
        inner = {block for start, stop in whole for block in range(-(-start // BLOCK), stop // BLOCK)}
        outer = {block for start, stop in some for block in range(start // BLOCK, -(-stop // BLOCK))}
        partial.append(sorted(outer - inner))
        full.append(sorted(inner))
    columns = -(-context.kv_len // BLOCK)
    return BlockMask.from_kv_blocks(
        *_padded(partial, columns, device),
        *_padded(full, columns, device),
        BLOCK_SIZE=BLOCK,
        mask_mod=pattern.with_tables(context, device).mask_mod(moving(context, device)),
        seq_lengths=(context.q_len, context.kv_len),
    )


def _moved(request: Request, context: Context) -> ScoreMod | None:
    """Return the score_mod with the relative terms, all with the offset of `context`."""
    mod = request.score_mod
    if isinstance(mod, Mod) and mod.start:
        request = dataclasses.replace(request, score_mod=dataclasses.replace(mod, start=context.offset))
    return request.whole_score_mod(context)


def moving(context: Context, device: torch.device) -> Context:
    """Return `context` with its offset in a tensor that the kernel reads when it runs.

    A Python number would be a constant of the compiled kernel. After its first change it would become a
    dynamic number, which FlexAttention does not support.
    """
    offset: Any = torch.tensor(context.offset, device=device)
    return dataclasses.replace(context, q_start=offset, memo={})


def _rows(pattern: Pattern, context: Context) -> list[tuple[tuple[Interval, ...], tuple[Interval, ...]]]:
    """Return the keys of each block of queries; rows of the layout shorter than a block are joined."""
    joined: dict[int, tuple[tuple[Interval, ...], tuple[Interval, ...]]] = {}
    for row in pattern.layout(context, BLOCK):
        block = row.start // BLOCK
        # Rows in the same block: keys of any row, and unmasked keys of all rows.
        some, full = joined.get(block, ((), row.keys.full))
        joined[block] = unite((*some, *row.keys.some)), intersect(full, row.keys.full)
    return [joined[block] for block in sorted(joined)]


def _padded(rows: list[list[int]], columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the number of blocks per row, [1, 1, rows], and their indices padded with zeros.

    The indices are [1, 1, rows, columns].
    """
    counts = torch.tensor([len(row) for row in rows], dtype=torch.int32)
    indices = torch.tensor([row + [0] * (columns - len(row)) for row in rows], dtype=torch.int32)
    return counts[None, None].to(device), indices[None, None].to(device)


def _attention() -> Callable[..., Any]:
    """Return compiled FlexAttention, or the plain function inside a graph that is being compiled anyway."""
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention if torch.compiler.is_compiling() else _compiled()


@functools.cache
def _compiled() -> Callable[..., Any]:
    from torch._dynamo import config
    from torch.nn.attention.flex_attention import flex_attention

    separate_by_instructions()
    # The kernels cannot be compiled if a number that a mask captures, such as a window's, has become dynamic.
    compiled = torch.compile(flex_attention, dynamic=False)

    def call(*args: Any, **options: Any) -> Any:
        # Each mod needs a separate compilation. After dynamo's default of 8, the function would silently run
        # uncompiled and compute all scores at once.
        with config.patch(recompile_limit=COMPILATIONS):
            return compiled(*args, **options)

    return call
