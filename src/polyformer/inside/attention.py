"""`attend` as transformers' `AttentionInterface` calls it, in the place of sdpa."""

import dataclasses
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.utils import output_capturing

from polyformer.core.errors import InputError
from polyformer.core.marks import SINK, mark
from polyformer.dot_product.attend import attend
from polyformer.inside.dense import Table, added, as_entries, soft_capped
from polyformer.inside.layer import Attached, attached
from polyformer.inside.mask import Mask
from polyformer.inside.mask_functions import both
from polyformer.ops.softmax import recorded
from polyformer.patterns.base import Pattern
from polyformer.patterns.score_steps import in_turn
from polyformer.sequence.context import Context

REFUSED = {
    "cache": "continuous batching keeps keys in pages; generate with `model.generate`",
    "indices": "the layer itself chooses the keys of each query, and no mask says which",
    "block_indices": "the layer itself chooses the blocks of each query, and no mask says which",
    "sinks": "each query has a sink of its own",
}
"""What a layer may hand over that would be lost, and what it is."""


@dataclasses.dataclass(frozen=True, eq=False)
class Seen:
    """Who sees whom in one call, and what its mask adds to the scores."""

    context: Context
    pattern: Pattern | None = None
    bias: Tensor | None = None


def forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention of one layer of a transformers model.

    Args:
        module: the layer, which may have been given a pattern (`attach`).
        query: [B, H, Tq, D]; key, value: [B, Hkv, Tk, D].
        attention_mask: a `Mask`, or any tensor that says who sees whom; None for everything, or the past.
        dropout: probability of dropping a weight.
        scaling: the factor on the scores, 1 / sqrt(D) by default.
        is_causal: whether no mask means the past; by default what the module says of itself.
        softcap: the limit of scores, by tanh.
        s_aux: [H], the score of a key without a value (attention sinks).
        position_bias: [B or 1, H, Tq, Tk], added to the scores.
        options: what other implementations take; what would be lost is refused with an `InputError`.

    Returns:
        [B, Tq, H, D], and the weights [B, H, Tq, Tk] where the caller collects them, else None.
    """
    _refuse(options)
    if len(query) != len(key):  # learned queries, the same for all rows
        query = query.expand(len(key), -1, -1, -1)
    past = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    seen, inside = _seen(attention_mask, query, key, past, options), attached(module)
    mods = [] if softcap is None else [soft_capped(softcap)]
    mods += [added(bias) for bias in (seen.bias, _cropped(position_bias, key)) if bias is not None]
    settings: dict[str, Any] = {"context": seen.context, "pattern": seen.pattern, "scale": scaling}
    if inside is not None:
        settings |= _own_terms(inside, query, key, seen, scaling, late=bool(mods))
        mods += settings.pop("mods")
    settings |= {"score_mod": in_turn(mods), "dropout": dropout}
    if not _wants_weights(options):
        out, _ = _with_sink(query, key, value, s_aux, settings)
        return out.transpose(1, 2).contiguous(), None
    with recorded() as records:
        out, share = _with_sink(query, key, value, s_aux, settings)
    weights = records[-1] if share is None else records[-1] * share
    return out.transpose(1, 2).contiguous(), weights


def _refuse(options: dict[str, Any]) -> None:
    """Raises `InputError` for what would be lost."""
    for name, why in REFUSED.items():
        if options.get(name) is not None:
            raise InputError(f"{name}: {why}; run this model with attn_implementation='sdpa' or 'eager'")


def _with_sink(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, settings: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """The output [B, H, Tq, D], and the share [B, H, Tq, 1] of the weights that a sink leaves to the keys.

    With the sink's score s and the keys' log-sum-exp l the keys keep exp(l) / (exp(l) + exp(s)).
    """
    if sink is None:
        return attend(q, k, v, **settings), None
    out, lse = attend(q, k, v, return_lse=True, **settings)
    share = torch.sigmoid(lse - sink.view(1, -1, 1)).unsqueeze(-1)
    mark(SINK, lambda: (1 - share).squeeze(-1), "queries")
    return (out * share).to(out.dtype), share


def _own_terms(
    inside: Attached, q: Tensor, k: Tensor, seen: Seen, scale: float | None, late: bool
) -> dict[str, Any]:
    """What was attached to the layer; `late`: all of its terms as functions, for they come after others."""
    pattern = both(seen.pattern, inside.pattern, lambda mask, own: mask & own)
    relative, mods = inside.relative(q, k, seen.context), inside.mods(q, k, seen.context)
    if relative is not None and late:
        keys = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        factor = q.shape[3] ** -0.5 if scale is None else scale
        relative, mods = None, [relative.score_mod(q, keys, factor, seen.context), *mods]
    return {"pattern": pattern, "relative": relative, "mods": mods}


def _seen(mask: Tensor | None, q: Tensor, k: Tensor, is_causal: bool, options: dict[str, Any]) -> Seen:
    """What a layer's mask says of its call."""
    q_length, kv_length = q.shape[2], k.shape[2]
    if isinstance(mask, Mask):
        description = mask.description.cropped(kv_length)
        context = _packed(description.context, options)
        return Seen(context, description.pattern)
    if mask is None:
        past = is_causal and q_length > 1
        context = Context(q_length, kv_length, past, q_start=0 if past else None)
        return Seen(_packed(context, options))
    entries, bias = as_entries(mask, kv_length)
    return Seen(Context(q_length, kv_length), None if entries is None else Table(entries), bias)


def _packed(context: Context, options: dict[str, Any]) -> Context:
    """The context with the sequences that flash attention's arguments name, where it knows of none."""
    ends = options.get("cu_seq_lens_q")
    if ends is None or context.q_doc is not None or context.num_rows > 1:
        return context
    length = context.q_len
    if length != context.kv_len or context.offset or len(ends) < 3 or int(ends[-1]) != length:
        return context
    slots = torch.arange(length, device=ends.device)
    documents = torch.searchsorted(ends[1:].to(slots.dtype), slots, right=True).unsqueeze(0)
    return dataclasses.replace(context, memo={}, q_doc=documents, kv_doc=documents)


def _cropped(bias: Tensor | None, k: Tensor) -> Tensor | None:
    """A bias over as many keys as there are."""
    return None if bias is None else bias[..., : k.shape[2]]


def _wants_weights(options: dict[str, Any]) -> bool:
    """Whether the caller, or the model around it, collects attention weights."""
    if torch.compiler.is_compiling():
        return False
    collected = cast("dict[str, Any] | None", output_capturing._active_collector.get()) or {}
    return bool(options.get("output_attentions")) or any(name.endswith("attentions") for name in collected)
