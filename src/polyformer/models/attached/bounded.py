"""Bounded caches in transformers' models: `attach(model, memory=...)` and `attach(model, cache=...)`.

    before a layer's call   its empty layer in the call's `Cache` becomes a `BoundedLayer`      `before_call`
    in the call             the cache returns the keys that it has and the new keys             `update`
    after attention         keys that no later query reads, or that the policy drops, go        `after`

The `Cache` itself stays transformers' own, so `generate`, beams and assistants use it as always. For
transformers a bounded layer has the length of the whole text: masks describe all tokens, and the layer
selects its keys from them (`context`).
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from polyformer.attention.patterns.base import Pattern
from polyformer.attention.patterns.window import Window
from polyformer.core.errors import InputError, quote
from polyformer.core.kv_cache import KeyValueCache
from polyformer.core.sequence.context import Context
from polyformer.models.attached.bound import Bound
from polyformer.models.attached.layer import NAME, attached, text_of
from polyformer.models.attached.mask import Description, Mask
from polyformer.nn.cache import CacheCall, CompressedCache, DroppingPolicy
from polyformer.nn.memory import SinksConfig

# The name of the bounded layer among the arguments of the attention function.
BOUNDED = "polyformer_bounded_layer"


class BoundedLayer(CacheLayerMixin):
    """A layer of a `Cache` that keeps the keys that a memory reads, or the keys that a policy chooses."""

    supports_early_init = False

    def __init__(self, rule: SinksConfig | DroppingPolicy):
        super().__init__()
        self.rule = rule
        self.is_croppable = not (isinstance(rule, DroppingPolicy) and rule.after_every_call)
        self.reset()

    def reset(self) -> None:
        """Forget all tokens."""
        cache = KeyValueCache()
        self.state: KeyValueCache | CompressedCache
        self.state = CompressedCache(self.rule, cache) if isinstance(self.rule, DroppingPolicy) else cache
        self.longer = cache
        self.seen = 0
        self.keys = self.values = None
        self.is_initialized = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Record type and device of the first keys."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the kept keys and values [B, Hkv, T, D], with the new ones last."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        cache = self._pairs(self.state)
        keys, values, self.longer = cache.append(key_states, value_states)
        return keys, values

    def context(self, context: Context, device: torch.device) -> Context:
        """Return the context of the keys that `update` returned, from the context of the whole text."""
        return self.state.context(context, device)

    def describes(self, description: Description) -> bool:
        """Return whether a mask describes all tokens of the text."""
        return description.kv_length == self.seen + description.q_length

    def after(
        self, q: Tensor, whole: Context, context: Context, pattern: Pattern | None, scale: float | None
    ) -> None:
        """Drop the keys that later queries do not read.

        q: [B, H, T, D]. whole: the context of the whole text; context: of these keys. scale: of scores.
        """
        if isinstance(self.state, CompressedCache):
            factor = q.shape[3] ** -0.5 if scale is None else scale
            call = CacheCall(q, q, self.longer, context, factor, _no_rotation)
            self._keep(self.state.after(call), whole.kv_len)
            return
        reach = None if pattern is None else pattern.reach()
        reach = None if reach is None else reach.in_slots(whole)
        kept = self.longer
        if reach is not None:
            kept = kept.last(reach.kept(whole.kv_len), reach.first, reach.last)
        self._keep(kept, whole.kv_len)

    def _keep(self, state: KeyValueCache | CompressedCache, seen: int) -> None:
        """Set the state after `seen` tokens, and forget the buffers before it."""
        self.state, self.seen = state, seen
        self.longer = self._pairs(state)
        filled = self.longer.compact()
        self.keys, self.values = filled.keys, filled.values

    def _pairs(self, state: KeyValueCache | CompressedCache) -> KeyValueCache:
        """Return the keys and values of a state."""
        cache = state.cache if isinstance(state, CompressedCache) else state
        assert isinstance(cache, KeyValueCache)
        return cache

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of all tokens, with `query_length` new tokens, and the first token, 0."""
        return self.seen + query_length, 0

    def get_seq_length(self) -> int:
        """Return the number of tokens of the text so far."""
        return self.seen

    def get_max_length(self) -> int:
        """Return -1: a text has no greatest length."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens; raises `InputError` if dropped keys would be needed."""
        count = -tokens_to_remove
        shorter = self.state.truncated_(count) if count else self.state
        if shorter is None:
            raise InputError(
                f"crop: {count} tokens cannot be removed, as keys were dropped for them; remove at most 64, "
                "or generate without an assistant"
            )
        self._keep(shorter, self.seen - count)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take the batch rows `beam_idx`."""
        if self.seen:
            self._keep(self.state.reorder_(beam_idx.to(self.device)), self.seen)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every batch row."""
        if self.keys is not None:
            rows = torch.arange(len(self.keys), device=self.device)
            self.batch_select_indices(rows.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Take the batch rows `indices`, numbers or bool."""
        if self.keys is not None:
            rows = torch.arange(len(self.keys), device=self.device)[indices.to(self.device)]
            self._keep(self.state.reorder(rows), self.seen)


def before_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Give a layer's call its bounded cache: a forward pre-hook, with keyword arguments."""
    layer: Any = module
    attachment = attached(module)
    bound = None if attachment is None else attachment.bound
    if bound is None or layer.config._attn_implementation != NAME:
        return None
    if torch.compiler.is_compiling():
        raise InputError(
            f"{bound.argument}: an attached {bound.argument} does not run in compiled graphs; leave "
            "out compile, or convert the model"
        )
    bound.read_rotation(module)
    caches = [value for value in (*args, *kwargs.values()) if isinstance(value, Cache)]
    bounded = _bounded_layer(caches[0], layer.layer_idx, bound) if caches else None
    return None if bounded is None else (args, {**kwargs, BOUNDED: bounded})


def _bounded_layer(cache: Cache, index: int, bound: Bound) -> BoundedLayer | None:
    """Return the bounded layer of a cache, which replaces an empty layer; None for a sliding window."""
    while cache.layer_class_to_replicate is not None and len(cache.layers) <= index:
        cache.layers.append(cache.layer_class_to_replicate())
    layer = cache.layers[index] if index < len(cache.layers) else None
    if isinstance(layer, DynamicSlidingWindowLayer):  # the layer's own window bounds it
        return None
    if isinstance(layer, BoundedLayer) and layer.rule == bound.rule:
        return layer
    if cache.offloading or type(layer) is not DynamicLayer or layer.get_seq_length():
        state = "an offloaded cache" if cache.offloading else f"{type(layer).__name__} with tokens"
        raise InputError(
            f"past_key_values: with an attached {bound.argument}, expected a new DynamicCache, got "
            f"{state}; leave out past_key_values and cache_implementation"
        )
    bounded = BoundedLayer(bound.rule)
    cache.layers[index] = bounded
    return bounded


def described(mask: Tensor | None, bound: Bound, bounded: BoundedLayer | None) -> Description:
    """Return the description of a mask of all tokens, from which a bounded layer can select its keys.

    Raises `InputError` for masks by functions or entries, in which dropped keys cannot be found.
    """
    name = bound.argument
    if not isinstance(mask, Mask) or (bounded is not None and not bounded.describes(mask.description)):
        raise InputError(
            f"attention_mask: with an attached {name}, expected [batch, tokens], got a mask of all pairs; "
            "detach first"
        )
    pattern = mask.description.pattern
    by_distance = isinstance(pattern, Window) and (bounded is None or isinstance(bound.rule, SinksConfig))
    if pattern is not None and not by_distance:
        raise InputError(
            f"{name}: expected layers that see all earlier tokens, but this model masks pairs by "
            f"{text_of(pattern)}, in which dropped keys cannot be found; name other layers, or detach"
        )
    return mask.description


def check_terms(bound: Bound, **terms: Tensor | float | None) -> None:
    """Raise `InputError` for terms of a layer's scores that a bounded cache does not know."""
    present = [name for name, term in terms.items() if term is not None]
    of_policy = isinstance(bound.rule, DroppingPolicy)
    refused = [name for name in present if of_policy or name == "position_bias"]
    if refused:
        raise InputError(
            f"{bound.argument}: the layer adds {quote(refused[0])} to its scores, which "
            f"{quote(bound.rule.kind)} does not support; detach, or name other layers"
        )


def _no_rotation(q: Tensor, context: Context) -> Tensor:
    raise InputError("cache: a layer of transformers shows its queries only after rotation; use 'snapkv'")
