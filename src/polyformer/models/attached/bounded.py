"""Bounded caches in transformers' models: `attach(model, memory=...)` and `attach(model, cache=...)`.

    before a layer's call   its empty layer in the call's `Cache` becomes a `BoundedLayer`      `before_call`
    in the call             the cache returns the keys that it has and the new keys             `update`
    after attention         keys that no later query reads, or that the policy drops, go        `after`

The policy `int8` drops none: `update` keeps the new keys as integers, and the model's masks and scores stay.

The `Cache` itself stays transformers' own, so `generate`, beams and assistants use it as always. For
transformers a bounded layer has the length of the whole text: masks describe all tokens, and the layer
selects its keys from them (`context`).
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from polyformer.attention.patterns.base import Pattern
from polyformer.attention.patterns.windows import Window
from polyformer.core.errors import InputError, quote
from polyformer.core.int4_cache import Int4Cache
from polyformer.core.kv_cache import Int8Cache, KeyValueCache, PairCache
from polyformer.core.sequence.context import Context
from polyformer.models.attached.layer import NAME, Bound, attached, text_of
from polyformer.models.attached.mask import Description, Mask
from polyformer.nn.cache import CacheCall, CachePolicy, CompressedCache
from polyformer.nn.memory import SinksConfig

# The name of the bounded layer among the arguments of the attention function.
BOUNDED = "polyformer_bounded_layer"


class BoundedLayer(CacheLayerMixin):
    """A layer of a `Cache` that keeps the keys that a memory reads, or what a policy keeps of the keys.

    keys, values: the buffers of the kept keys, or of their integers; with `int4` of the latest keys.
    """

    supports_early_init = False

    def __init__(self, bound: Bound):
        super().__init__()
        self.rule, self.drops_keys = bound.rule, bound.drops_keys
        self.is_croppable = not (isinstance(self.rule, CachePolicy) and not self.rule.supports_drafts)
        self.reset()

    def reset(self) -> None:
        """Forget all tokens."""
        state = KeyValueCache() if isinstance(self.rule, SinksConfig) else self.rule.new_state(0)
        assert isinstance(state, PairCache | CompressedCache)
        self.state: PairCache | CompressedCache = state
        self.longer = _pairs(state)
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
        keys, values, self.longer = _pairs(self.state).append(key_states, value_states)
        if not self.drops_keys:
            self._keep(self.longer, self.seen + key_states.shape[2])
        return keys, values

    def context(self, context: Context, device: torch.device) -> Context:
        """Return the context of the keys that `update` returned, from the context of the whole text."""
        return self.state.context(context, device)

    def describes(self, description: Description) -> bool:
        """Return whether a mask describes all tokens of the text."""
        return description.kv_length == self.seen + description.q_length

    def after(self, call: CacheCall, whole: Context, pattern: Pattern | None) -> None:
        """Drop the keys that later queries do not read; whole: the context of the whole text."""
        if isinstance(self.state, CompressedCache):
            self._keep(self.state.after(call), whole.kv_len)
            return
        reach = None if pattern is None else pattern.structure.reach
        reach = None if reach is None else reach.in_slots(whole)
        kept = self.longer
        assert isinstance(kept, KeyValueCache)
        if reach is not None:
            kept = kept.last(reach.kept(whole.kv_len), reach.first, reach.last)
        self._keep(kept, whole.kv_len)

    def _keep(self, state: PairCache | CompressedCache, seen: int) -> None:
        """Set the state after `seen` tokens, and forget the buffers before it."""
        self.state, self.seen = state, seen
        self.longer = _pairs(state)
        held = self.longer
        if isinstance(held, Int8Cache | Int4Cache):
            held = held.integers if isinstance(held, Int8Cache) else held.recent
        assert isinstance(held, KeyValueCache)
        filled = held.compact()
        self.keys, self.values = filled.keys, filled.values

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
    bounded = BoundedLayer(bound)
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
    of_memory = isinstance(bound.rule, SinksConfig)
    refused = [name for name in present if not of_memory or name == "position_bias"]
    if refused:
        raise InputError(
            f"{bound.argument}: the layer adds {quote(refused[0])} to its scores, which "
            f"{quote(bound.rule.kind)} does not support; detach, or name other layers"
        )


def _pairs(state: PairCache | CompressedCache) -> PairCache:
    """Return the keys and values of a state."""
    return state.cache if isinstance(state, CompressedCache) else state
