"""Attention of a single query to keys and values in int8, on a CPU.

    scores_j = q^T n_j s_j scale,    y = sum_j (p_j t_j) m_j,    p = softmax(scores)

for keys s_j n_j and values t_j m_j (`Int8Cache`). Chunks of the integers are converted in a core's
cache and multiplied by the library. In a graph that torch compiles, with AVX-512, the products are loops over
the integers, joined with the conversion. Both read a quarter of the memory of float32.
"""

import math

import torch
from torch import Tensor

from polyformer.attention.functional.isolation import is_finite
from polyformer.attention.functional.request import is_traced, observing, score_scale, transformed
from polyformer.attention.patterns.base import Pattern
from polyformer.attention.patterns.implied import Causal, Full, restricted
from polyformer.core.host_values import is_recorded
from polyformer.core.kv_cache import Int8Pairs
from polyformer.core.ops.compiled_code import computed_once
from polyformer.core.ops.softmax import recording
from polyformer.core.sequence.context import Context

CHUNK = 1024
"""Keys of each head that are converted at once."""

BLOCK = 32
"""Values that a loop of compiled code adds up: one long sum would wait for each addition."""


def attend_to_integers(
    q: Tensor, pairs: Int8Pairs, pattern: Pattern | None, context: Context, scale: float | None
) -> Tensor | None:
    """Return attention of q [B, H, 1, D] to the pairs that the pattern and the context allow: [B, H, 1, Dv].

    None for other calls, and for outputs that are not finite: `attend` isolates the key that causes it.
    """
    if not q.is_cpu or q.shape[2] != 1 or pattern not in (None, Full(), Causal()) or torch.is_grad_enabled():
        return None
    if recording() or observing() or transformed() or (is_traced() and not is_recorded()):
        return None
    wide = pairs.key_scale.dtype
    q_scaled = q.to(wide) * score_scale(scale, q.shape[3])
    q_scaled = _once(q_scaled.squeeze(2).unflatten(1, (pairs.keys.shape[1], -1)))  # [B, Hkv, G, D]
    scores = _key_products(q_scaled, pairs.keys) * pairs.key_scale.mT  # [B, Hkv, G, Tk]
    mask = _mask(restricted(pattern or Full(), context), context, q)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    weights = _once(scores.softmax(-1) * pairs.value_scale.mT)
    y = _value_products(weights, pairs.values).flatten(1, 2).unsqueeze(2).to(q.dtype)
    return y if is_recorded() or is_finite(y) else None


def _once(x: Tensor) -> Tensor:
    """Return x, which the loops over keys of compiled code would compute again in each turn."""
    return computed_once(x) if is_recorded() else x


def _key_products(q: Tensor, keys: Tensor) -> Tensor:
    """Return q [B, Hkv, G, D] times integers [B, Hkv, Tk, D]: [B, Hkv, G, Tk]."""
    if not is_recorded():
        return _key_chunks(q, keys)
    if not _loops_are_fast():
        return torch.ops.polyformer.int8_key_products.default(q, keys)
    return torch.stack([(q[:, :, i, None] * keys.to(q.dtype)).sum(-1) for i in range(q.shape[2])], 2)


def _value_products(weights: Tensor, values: Tensor) -> Tensor:
    """Return weights [B, Hkv, G, Tk] times integers [B, Hkv, Tk, Dv]: [B, Hkv, G, Dv]."""
    if not is_recorded():
        return _value_chunks(weights, values)
    if not _loops_are_fast():
        return torch.ops.polyformer.int8_value_products.default(weights, values)
    # [B, Hkv, blocks, block, 1 or Dv]
    blocks = (-1, math.gcd(BLOCK, values.shape[2]))
    converted = values.to(weights.dtype).unflatten(2, blocks)
    parts = [(row.unflatten(2, blocks).unsqueeze(-1) * converted).sum(3) for row in weights.unbind(2)]
    return torch.stack([part.sum(2) for part in parts], 2)


def _loops_are_fast() -> bool:
    """Return whether compiled loops convert integers fast: with AVX2 they copy them to a buffer first."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


def _key_chunks(q: Tensor, keys: Tensor) -> Tensor:
    return torch.cat([q @ part.to(q.dtype).mT for part in keys.split(CHUNK, 2)], -1)


def _value_chunks(weights: Tensor, values: Tensor) -> Tensor:
    y = weights.new_zeros(*weights.shape[:3], values.shape[3])
    for row, part in zip(weights.split(CHUNK, 3), values.split(CHUNK, 2)):
        y += row @ part.to(weights.dtype)
    return y


# As operations of a graph, the chunks are not compiled.
_library = torch.library.Library("polyformer", "FRAGMENT")
_library.define("int8_key_products(Tensor q, Tensor keys) -> Tensor")
_library.define("int8_value_products(Tensor weights, Tensor values) -> Tensor")
_library.impl("int8_key_products", _key_chunks, "CPU")
_library.impl("int8_value_products", _value_chunks, "CPU")


@torch.library.register_fake("polyformer::int8_key_products", lib=_library)
def _(q: Tensor, keys: Tensor) -> Tensor:
    return q.new_empty(*q.shape[:3], keys.shape[2])


@torch.library.register_fake("polyformer::int8_value_products", lib=_library)
def _(weights: Tensor, values: Tensor) -> Tensor:
    return weights.new_empty(*weights.shape[:3], values.shape[3])


def _mask(limits: Pattern, context: Context, q: Tensor) -> Tensor | None:
    """Return which keys the queries see, [B or 1, 1, 1, Tk]; None for all."""
    if isinstance(limits, Causal | Full) and isinstance(context.offset, int):
        return None  # the query of the last key
    return context.once(("int8 mask", limits), lambda: _computed_mask(limits, context, q))


def _computed_mask(limits: Pattern, context: Context, q: Tensor) -> Tensor:
    rows = torch.arange(len(q), device=q.device).view(-1, 1, 1, 1)
    first, slots = rows[:1], torch.arange(context.kv_len, device=q.device)
    mask = limits.mask(context, rows, first, first.view(1, 1), slots)
    return mask.view(*[1] * (4 - mask.dim()), *mask.shape)
