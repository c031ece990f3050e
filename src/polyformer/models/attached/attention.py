"""`attend` with the signature of transformers' `AttentionInterface`, instead of sdpa, and its registration.

transformers is informed once, when this module is imported. Attachments in a config.json are restored while a
model is built, at the end of its constructor, where transformers calls `post_init`: its own hook for this
belongs to the class, so the method of all classes is wrapped.
"""

import contextlib
import dataclasses
import functools
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.utils import output_capturing

from polyformer.attention.functional.parts import RotatedPart, attend_parts, attend_with_sink, soft_cap
from polyformer.attention.functional.request import score_scale
from polyformer.attention.patterns.base import Pattern
from polyformer.attention.patterns.mods import broadcasts
from polyformer.attention.patterns.score_steps import chain_score_mods
from polyformer.core.errors import InputError
from polyformer.core.instrumentation import Editor
from polyformer.core.ops.softmax import recorded
from polyformer.core.sequence.context import Context
from polyformer.models.attached.attach_settings import restore
from polyformer.models.attached.attention_layers import QUERIES_ONLY, read_queries
from polyformer.models.attached.bounded import BOUNDED, BoundedLayer, check_terms, described
from polyformer.models.attached.layer import NAME, Attached, Bound, attached
from polyformer.models.attached.mask import (
    Description,
    Mask,
    Table,
    add_bias,
    combine,
    create_mask,
    positions_in_documents,
    split_mask,
)
from polyformer.models.packed_sequences import packed_sequences
from polyformer.nn.cache import CacheCall

# Arguments of a layer that `attend` would ignore, with the reason to refuse them.
UNSUPPORTED_ARGUMENTS = {
    "cache": "continuous batching stores keys in pages; generate with `model.generate`",
    "block_indices": "the layer selects the blocks of each query itself, which no mask describes",
    "sinks": "sinks per query are not supported",
}

edited_outputs: Editor[Tensor] = Editor("edited_outputs")
"""Replaces the output [B, H, Tq, D] of the heads of every layer, before its output projection."""


@dataclasses.dataclass(frozen=True, eq=False)
class AttentionCall:
    """The attended pairs of one call, and the bias that its mask adds to the scores.

    whole: the context of the whole text, if `bounded`, the layer's cache, has dropped keys by the rule
    `bound`.
    """

    context: Context
    pattern: Pattern | None = None
    bias: Tensor | None = None
    whole: Context | None = None
    bounded: BoundedLayer | None = None
    bound: Bound | None = None

    def drop_unread(self, q: Tensor, pattern: Pattern | None, scale: float | None) -> None:
        """Drop the keys of a bounded cache that no query after q [B, H, Tq, D] reads."""
        if self.bounded is None or self.bound is None or self.whole is None:
            return
        factor = score_scale(scale, q.shape[3])
        unrotated = self.bound.rotated(q, self.context, sign=-1)
        call = CacheCall(q, unrotated, self.bounded.longer, self.context, factor, self.bound.rotated)
        self.bounded.after(call, self.whole, pattern)


def forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    *,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    indices: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute the attention of one layer of a transformers model.

    Args:
        module: the layer, possibly with attachments (`attach`).
        query: [B, H, Tq, D]; key, value: [B, Hkv, Tk, D].
        attention_mask: a `Mask`, or any tensor with the attended pairs; None for all keys, or for the past.
        dropout: probability of dropping a weight.
        scaling: the factor on the scores, 1 / sqrt(D) by default.
        is_causal: whether attention without a mask is causal; by default the module's attribute.
        softcap: the limit of scores, by tanh.
        s_aux: [H], the score of a key without a value (attention sinks).
        position_bias: [B or 1, H, Tq, Tk], added to the scores.
        indices: [B, Tq, K], the keys that the layer's indexer chose for each query; others are masked.
        options: arguments of other implementations; an `InputError` refuses arguments that would be ignored.

    Returns:
        [B, Tq, H, D], and the weights [B, H, Tq, Tk] if the caller collects them, else None.
    """
    _refuse(options)
    if len(query) != len(key):  # learned queries, the same for all rows
        query = query.expand(len(key), -1, -1, -1)
    past = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    attachment = attached(module)
    if attachment is not None and attachment.dropping is not None:
        check_terms(attachment.dropping, softcap=softcap, s_aux=s_aux, position_bias=position_bias)
    seen = _among(indices, key, _describe_call(attention_mask, query, key, past, options, attachment))
    bias = None if position_bias is None else position_bias[..., : key.shape[2]]  # of the existing keys
    mods = [] if softcap is None else [soft_cap(softcap)]
    mods += [add_bias(term) for term in (seen.bias, bias) if term is not None]
    settings: dict[str, Any] = {"context": seen.context, "pattern": seen.pattern, "scale": scaling}
    if attachment is not None:
        # A graph cannot branch on the number in a static cache.
        traced_offset = isinstance(seen.context.offset, Tensor)
        settings |= _attached_terms(attachment, query, key, seen, scaling, late=bool(mods) or traced_offset)
        mods += settings.pop("mods")
        if traced_offset:
            settings |= _pattern_as_table(settings["pattern"], seen.context, query)
    settings |= {"score_mod": chain_score_mods(mods), "dropout": dropout}
    wants_weights = _wants_weights(options)
    with recorded() if wants_weights else contextlib.nullcontext([]) as records:
        out = _attend(query, key, value, s_aux, settings)
    seen.drop_unread(query, settings["pattern"], scaling)
    out = edited_outputs.edit(out).transpose(1, 2).contiguous()
    return out, records[-1] if wants_weights else None


def _refuse(options: dict[str, Any]) -> None:
    """Raise `InputError` for arguments that would be ignored."""
    for name, why in UNSUPPORTED_ARGUMENTS.items():
        if options.get(name) is not None:
            raise InputError(f"{name}: {why}; run this model with attn_implementation='sdpa' or 'eager'")


def _among(indices: Tensor | None, key: Tensor, seen: AttentionCall) -> AttentionCall:
    """Return the call with the pairs of each query and its keys `indices` [B, Tq, K] only; None for all."""
    if indices is None:
        return seen
    shape = *indices.shape[:2], key.shape[2]
    chosen = indices.new_zeros(shape, dtype=torch.bool).scatter(-1, indices.long(), True)
    pattern = combine(seen.pattern, Table(chosen.unsqueeze(1)), lambda mask, own: mask & own)
    # The choice of this layer alone, so the context keeps no plan or mask of it for others.
    return dataclasses.replace(seen, pattern=pattern, context=dataclasses.replace(seen.context, memo={}))


def _attend(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, settings: dict[str, Any]) -> Tensor:
    """Return the output [B, H, Tq, D], with or without a sink."""
    parts = settings.pop("parts", ()) or (RotatedPart(q, k),)
    return (
        attend_parts(parts, v, **settings)
        if sink is None
        else attend_with_sink(parts, v, sink=sink, **settings)
    )


def _attached_terms(
    attachment: Attached, q: Tensor, k: Tensor, seen: AttentionCall, scale: float | None, late: bool
) -> dict[str, Any]:
    """Return the attachments of the layer; `late`: all terms as functions, to follow other functions."""
    pattern = combine(seen.pattern, attachment.pattern, lambda mask, own: mask & own)
    parts: tuple[RotatedPart, ...] = ()
    if attachment.bound is not None:
        pattern = attachment.bound.within(pattern)
        parts = attachment.bound.parts(q, k, seen.context, attachment.site)
    relative, mods = attachment.relative(q, k, seen.context), attachment.mods(q, k, seen.context)
    if relative is not None and late:
        # Grouped heads: [B, Hkv, Tk, D] to [B, H, Tk, D].
        keys = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        factor = score_scale(scale, q.shape[3])
        relative, mods = None, [broadcasts(relative.score_mod(q, keys, factor, seen.context)), *mods]
    return {"pattern": pattern, "relative": relative, "mods": mods, "parts": parts}


def _pattern_as_table(pattern: Pattern, context: Context, q: Tensor) -> dict[str, Any]:
    """Return a pattern as its entries [B, H, Tq, Tk], for a graph that cannot read the first slot."""
    b = torch.arange(q.shape[0], device=q.device).view(-1, 1, 1, 1)
    h = torch.arange(q.shape[1], device=q.device).view(-1, 1, 1)
    q_idx = torch.arange(context.q_len, device=q.device).view(-1, 1)
    entries = pattern.mask(context, b, h, q_idx, torch.arange(context.kv_len, device=q.device))
    return {"pattern": Table(entries), "context": Context(context.q_len, context.kv_len)}


def _describe_call(
    mask: Tensor | None,
    q: Tensor,
    k: Tensor,
    is_causal: bool,
    options: dict[str, Any],
    attachment: Attached | None,
) -> AttentionCall:
    """Return the description of a call from a layer's mask."""
    if attachment is not None and attachment.dropping is not None:
        return _describe_bounded_call(attachment.dropping, mask, q, options)
    q_length, kv_length = q.shape[2], k.shape[2]
    if isinstance(mask, Mask):
        description = mask.description.cropped(kv_length)
        if torch.compiler.is_compiling():
            return _describe_call_in_graph(description, is_causal, options, attachment is None, len(q))
        return AttentionCall(with_packed_sequences(description.context, options, len(q)), description.pattern)
    if mask is None:
        # As in sdpa, a single query sees all keys.
        past = is_causal and q_length > 1
        context = Context(q_length, kv_length, past, q_start=0 if past else None)
        return AttentionCall(with_packed_sequences(context, options, len(q)))
    # Another library's mask, of unknown origin.
    entries, bias = split_mask(mask, kv_length)
    return AttentionCall(Context(q_length, kv_length), None if entries is None else Table(entries), bias)


def _describe_bounded_call(
    bound: Bound, mask: Tensor | None, q: Tensor, options: dict[str, Any]
) -> AttentionCall:
    """Return the description of a call of a layer with a bounded cache, from the mask of all tokens."""
    bounded = options.get(BOUNDED)
    description = described(mask, bound, bounded)
    whole = with_packed_sequences(description.context, options, len(q))
    context = whole if bounded is None else bounded.context(whole, q.device)
    return AttentionCall(context, description.pattern, whole=whole, bounded=bounded, bound=bound)


def _describe_call_in_graph(
    description: Description, is_causal: bool, options: dict[str, Any], no_attachment: bool, rows: int
) -> AttentionCall:
    """Return the entries of a mask, and the places of tokens if an attachment requires them."""
    seen = Table(description.dense())
    options = options if description.attention_mask is None else {}  # padding takes precedence over packing
    if no_attachment:
        return AttentionCall(
            with_packed_sequences(Context(description.q_length, description.kv_length), options, rows), seen
        )
    context = description.make_context()
    if description.entries is not None:  # the layer's `is_causal` replaces the mask's function
        context = dataclasses.replace(context, causal=is_causal)
        at = options.get("position_ids")
        if is_causal and at is not None and at.dim() == 2 and at.shape[1] == context.q_len == context.kv_len:
            at = at.expand(rows, -1)
            context = dataclasses.replace(context, q_pos=at, kv_pos=at)
    return AttentionCall(with_packed_sequences(context, options, rows), seen)


def _wants_weights(options: dict[str, Any]) -> bool:
    """Return whether the caller, or the model around it, collects attention weights."""
    if torch.compiler.is_compiling():
        return False
    # Transformers collects weights by hooks, without an argument.
    collected = cast("dict[str, Any] | None", output_capturing._active_collector.get()) or {}
    return bool(options.get("output_attentions")) or any(name.endswith("attentions") for name in collected)


def with_packed_sequences(context: Context, options: dict[str, Any], rows: int) -> Context:
    """Return the context with the sequences packed into its rows, unless it already has sequences.

    Their ends are in flash attention's argument `cu_seq_lens_q` (`packed_sequences`). As in transformers, a
    padding mask takes precedence. Cross-attention and calls after a cache have other keys, and remain
    unchanged.
    """
    ends = options.get("cu_seq_lens_q")
    length = context.q_len
    if ends is None or context.q_doc is not None or context.num_rows > 1 or context.kv_valid is not None:
        return context
    if length != context.kv_len or isinstance(context.offset, Tensor) or context.offset:
        return context
    documents = packed_sequences(ends, options.get("cu_seq_lens_k"), rows, length)
    # A single sequence per row needs no numbers.
    if not torch.compiler.is_compiling() and bool((documents == documents[:, :1]).all()):
        return context
    at = positions_in_documents(documents)
    return dataclasses.replace(context, memo={}, q_doc=documents, kv_doc=documents, q_pos=at, kv_pos=at)


AttentionInterface.register(NAME, forward)
AttentionInterface.register(QUERIES_ONLY, read_queries)
AttentionMaskInterface.register(NAME, create_mask)


def _restoring(post_init: Any) -> Any:
    """Return `PreTrainedModel.post_init`, wrapped to restore the configuration's attachments first."""

    @functools.wraps(post_init)
    def wrapped(self: PreTrainedModel) -> None:
        restore(self)
        post_init(self)

    return wrapped


PreTrainedModel.post_init = _restoring(PreTrainedModel.post_init)
