"""Compiled FlexAttention on CUDA, with a BlockMask of each batch row and head (`block_masks`).

On a CPU it runs only if it is named, and without gradients: torch's CPU kernel has no backward pass and no
log-sum-exp. `auto` skips it there because each pattern, shape and score function takes seconds to compile.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from polyformer.attention.functional.backends.block_masks import (
    BLOCK,
    are_heads_evaluated,
    block_mask,
    moving,
)
from polyformer.attention.functional.request import Request, transformed
from polyformer.attention.patterns.base import ScoreMod
from polyformer.attention.patterns.composition import simple_parts
from polyformer.attention.patterns.mods import Mod
from polyformer.attention.patterns.per_head import PerHead
from polyformer.core.ops.autograd import mark_first_order
from polyformer.core.ops.compiled_code import prepare_inductor
from polyformer.core.sequence.context import Context

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
