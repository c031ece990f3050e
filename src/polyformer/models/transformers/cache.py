"""The state of a decoder as transformers' `Cache`, and caches of transformers in calls of wrapped models."""

from typing import Any

from torch import Tensor
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.patterns import Full
from polyformer.core.errors import InputError
from polyformer.core.kv_cache import KeyValueCache
from polyformer.core.sequence.context import Context
from polyformer.core.sequence.tokens import NO_TOKENS, ModelInputs, Tokens
from polyformer.models.architectures import Transformer
from polyformer.models.outputs import ModelState
from polyformer.models.transformers.inputs import Arguments
from polyformer.nn.stack import LayerState
from polyformer.nn.stack.multihead import ProjectedSource


class PolyformerCache(Cache):
    """A cache with a `ModelState`, None before the first token; a model that is given the cache updates it.

    `reserve`: the number of tokens for which memory is allocated at once.
    """

    max_cache_len = -1  # no limit, as PEFT expects

    def __init__(self, state: ModelState | None = None, reserve: int = 0):
        super().__init__(layers=[])
        self.state, self.reserve = state, reserve

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens read so far, the same in every layer."""
        return 0 if self.state is None else self.state.tokens.seen

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return -1: no limit."""
        return -1

    def __len__(self) -> int:
        return 0 if self.state is None else len(self.state.layers)

    def update_state(self, state: ModelState) -> Cache:
        """Return the cache after a call that ended in `state`: this cache, updated."""
        self.state = state
        return self

    def reset(self) -> None:
        """Forget all tokens."""
        self.state = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the rows: row b becomes row beam_idx[b], for beam_idx [B]."""
        if self.state is not None:
            self.state = self.state.reorder(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices`, in this order."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times in succession: [B, ...] -> [B * repeats, ...]."""
        if self.state is not None:
            self.state = self.state.map(lambda tensor: tensor.repeat_interleave(repeats, 0))

    @property
    def is_compileable(self) -> bool:
        """Return False: transformers' `generate` does not compile the forward pass over this cache."""
        return False

    @property
    def is_croppable(self) -> bool:
        """Return whether every layer can remove tokens, unlike a state that is a sum of the past."""
        return self.state is None or self.state.truncated_(0) is not None

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens; the argument is their number with any sign, as in transformers' caches."""
        if self.state is None:
            return
        shorter = self.state.truncated_(abs(tokens_to_remove))
        if shorter is None:
            raise InputError(
                "past_key_values: the state of this model, sums of the past or its last tokens, cannot "
                "remove tokens; generate without an assistant"
            )
        self.state = shorter

    @property
    def batch_size(self) -> int:
        """Return the number of rows, -1 if the cache is empty."""
        rows = None if self.state is None else self.state.rows
        return -1 if rows is None else rows


def supports_kv_cache(model: Transformer) -> bool:
    """Return whether the model's decoder can continue from a state."""
    if model.decoder is None:
        return False
    try:
        # A mechanism without a state refuses to make one.
        model.decoder.new_states(0)
    except InputError:
        return False
    return True


# Layers of a cache with unmodified keys and values.
PLAIN = (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer)


class BorrowedCache(PolyformerCache):
    """A cache of transformers in one call of `model` with `arguments`.

    Its keys and values are the initial state of the call, and `update_state` appends the new keys and values,
    like transformers' models. It does not contain the padding of its tokens: an attention mask of all tokens
    defines it, and without a mask all tokens are real.

    Raises `InputError` for a cache of other sizes, a cache with modified keys and values, and a model with a
    larger state.
    """

    def __init__(self, hub_cache: Cache, model: Transformer, arguments: Arguments):
        assert model.decoder is not None
        self.hub_cache, self.self_cache, self.decoder = hub_cache, hub_cache, model.decoder
        self.cross: EncoderDecoderCache | None = None
        if isinstance(hub_cache, EncoderDecoderCache):
            self.self_cache = hub_cache.self_attention_cache
            self.cross = hub_cache if model.encoder is not None else None
        layers, depth = self.decoder.new_states(0), self.decoder.depth
        reads_source = self.cross is not None and depth is not None and depth.reads_source
        if (
            model.supports_recurrence
            or reads_source
            or any(layer != LayerState(KeyValueCache()) for layer in layers)
            or self.decoder.sequence[0].attention.config.latent is not None
        ):
            raise InputError(
                "past_key_values: the state of this model has more than keys and values; pass the cache "
                "that an earlier output returned"
            )
        self.seen = _common_length(self.self_cache, len(layers))
        self.dropped = [0] * len(layers)
        prefix = "" if model.encoder is None else "decoder_"
        if self.seen:
            rows = _rows(arguments, prefix)
            layers = tuple(LayerState(self._read(index, rows)) for index in range(len(layers)))
        tokens = _tokens(self.seen, arguments.get(f"{prefix}attention_mask"))
        state: ModelState | None = ModelState(tokens, layers)
        if self.cross is not None and any(self.cross.is_updated.values()):
            state = self._after_source(tokens, layers, arguments.get("attention_mask"))
        elif model.encoder is not None and not self.seen:
            state = None  # the source must be encoded first
        super().__init__(state)

    def _read(self, index: int, rows: int | None) -> KeyValueCache:
        """Return the keys and values of a layer, without tokens that a sliding layer has dropped."""
        keys, values = _keys_and_values(self.self_cache.layers[index], self.seen)
        attention = self.decoder.sequence[index].attention
        expected = (len(keys) if rows is None else rows, attention.config.kv_heads, attention.head_size)
        shape = (*keys.shape[:2], keys.shape[3])
        if shape != expected:
            raise InputError(
                f"past_key_values: expected keys of (rows, heads, head size) {expected}, got {shape}"
            )
        # The tokens that a sliding layer has dropped.
        self.dropped[index] = self.seen - keys.shape[2]
        return KeyValueCache(keys, values, keys.shape[2], [keys.shape[2]])

    def _after_source(
        self, tokens: Tokens, layers: tuple[LayerState, ...], mask: Tensor | None
    ) -> ModelState:
        """Return the state of a decoder that has projected the source with `mask` [B, S]."""
        assert self.cross is not None
        sources = self.cross.cross_attention_cache
        length = _common_length(sources, len(layers))
        read = [ProjectedSource(*_keys_and_values(layer, length)) for layer in sources.layers]
        layers = tuple(
            LayerState(layer.self_attention, source) for layer, source in zip(layers, read, strict=True)
        )
        # Attention without a mask has faster kernels.
        valid = None if mask is None or bool(mask.all()) else mask.bool()
        return ModelState(tokens, layers, None, valid, length)

    def update_state(self, state: ModelState) -> Cache:
        """Append the keys and values of the call that ended in `state` to transformers' cache, and return the
        cache.

        Raises `InputError`, and appends nothing, if the call required tokens that a sliding layer has
        dropped, or if a static layer is too short.
        """
        new = state.tokens.seen - self.seen
        # All layers are checked before any is changed.
        for index in range(len(state.layers)):
            self._check(index, new)
        for index, layer in enumerate(state.layers):
            self_cache, source = layer.self_attention, layer.cross_attention
            assert isinstance(self_cache, KeyValueCache)
            added = self_cache.last(new).compact()
            self.self_cache.update(added.keys, added.values, index)  # type: ignore[arg-type]
            if self.cross is not None and not self.cross.is_updated.get(index):
                assert isinstance(source, ProjectedSource)
                self.cross.cross_attention_cache.update(source.keys, source.values, index)
                self.cross.is_updated[index] = True
        return self.hub_cache

    def _check(self, index: int, new: int) -> None:
        """Raise `InputError` if a layer lacks keys that were needed, or is too short for the `new` keys."""
        total, dropped = self.seen + new, self.dropped[index]
        if dropped:
            mechanism: Any = self.decoder.sequence[index].attention.config.mechanism.for_layer(index)
            pattern = mechanism.pattern if isinstance(mechanism, SoftmaxConfig) else None
            needed = (pattern or Full()).keys(Context(new, total, causal=True), 0, new).some
            if needed and needed[0][0] < dropped:
                raise InputError(
                    f"past_key_values: layer {index} of the cache has dropped its first {dropped} tokens, "
                    f"and this model's attention reads from token {needed[0][0]} on; use DynamicCache()"
                )
        layer = self.self_cache.layers[index] if self.self_cache.layers else None
        if type(layer) is StaticLayer and total > layer.max_cache_len:
            raise InputError(
                f"past_key_values: the cache has a capacity of {layer.max_cache_len} tokens, got {total}; "
                f"create it with max_cache_len={total}"
            )


def as_polyformer_cache(past: object, model: Transformer, arguments: Arguments) -> PolyformerCache:
    """Return `past`, an argument of a call of `model` with `arguments`, as our cache.

    Raises `InputError` if it is no cache, or does not fit the model.
    """
    if isinstance(past, PolyformerCache):
        return past
    if not isinstance(past, Cache):
        raise InputError(
            f"past_key_values: expected the cache of an earlier output, or a cache of transformers such as "
            f"DynamicCache(), got {type(past).__name__}"
        )
    return BorrowedCache(past, model, arguments)


def _common_length(cache: Cache, count: int) -> int:
    """Return the number of tokens that each layer of `cache` has read.

    Raises `InputError` unless it has `count` layers of keys and values.
    """
    layers: list[Any] = cache.layers
    for layer in layers:
        if type(layer) not in PLAIN:
            raise InputError(
                f"past_key_values: expected layers with unmodified keys and values, got "
                f"{type(layer).__name__}; use DynamicCache()"
            )
    if not layers and cache.layer_class_to_replicate is DynamicLayer:  # it gets its layers as it is filled
        return 0
    lengths = {int(layer.get_seq_length()) for layer in layers}
    if len(layers) != count or len(lengths) > 1:
        raise InputError(
            f"past_key_values: expected the cache of an earlier output, or keys and values of "
            f"{count} layers, got {type(cache).__name__} with {len(layers)} of {sorted(lengths)} tokens"
        )
    return lengths.pop()


def _keys_and_values(layer: Any, seen: int) -> tuple[Tensor, Tensor]:
    """Return the last keys and values [B, H, T, D] that a layer has of its `seen` tokens."""
    return layer.keys[:, :, :seen], layer.values[:, :, :seen]


def _rows(arguments: Arguments, prefix: str) -> int | None:
    """Return the number of texts that the decoder reads; None if no argument determines it."""
    names = (f"{prefix}input_ids", f"{prefix}inputs_embeds", "labels")
    return next((len(arguments[name]) for name in names if name in arguments), None)


def _tokens(seen: int, mask: Tensor | None) -> Tokens:
    """Return the tokens of a cache; `mask` [B, T] marks their padding if it is longer than the cache."""
    if mask is None or mask.dim() != 2 or mask.shape[1] <= seen or not seen:
        return Tokens(seen)
    past = mask[:, :seen]
    return NO_TOKENS.extended(ModelInputs(past, past))
