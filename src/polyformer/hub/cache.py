"""Our state as transformers' `Cache`: what a decoder has read so far, of any mechanism."""

from typing import Any

import transformers
from torch import Tensor
from transformers.cache_utils import Cache, EncoderDecoderCache

from polyformer.core.errors import InputError
from polyformer.core.kv_cache import KeyValueCache
from polyformer.core.state import State
from polyformer.model import Transformer
from polyformer.outputs import ModelState
from polyformer.sequence.tokens import Tokens
from polyformer.stack import LayerState


class PolyformerCache(Cache):
    """Holds a `ModelState`, None before the first token; a model that is given the cache moves it on.

    `reserve`: for how many tokens there should be room at once.
    """

    max_cache_len = -1  # no limit, as PEFT asks

    def __init__(self, state: ModelState | None = None, reserve: int = 0):
        super().__init__(layers=[])
        self.state, self.reserve = state, reserve

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The number of tokens read so far, the same in every layer."""
        return 0 if self.state is None else self.state.tokens.seen

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: no limit."""
        return -1

    def __len__(self) -> int:
        return 0 if self.state is None else len(self.state.layers)

    def reset(self) -> None:
        """Forget all tokens."""
        self.state = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row b becomes row beam_idx[b], for beam_idx [B]."""
        if self.state is not None:
            self.state = self.state.reorder(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices`, in that order."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times in succession: [B, ...] -> [B * repeats, ...]."""
        if self.state is not None:
            self.state = self.state.map(lambda tensor: tensor.repeat_interleave(repeats, 0))

    @property
    def is_compileable(self) -> bool:
        """False: transformers' `generate` leaves the forward pass over this cache uncompiled."""
        return False

    @property
    def is_croppable(self) -> bool:
        """Whether every layer can take tokens back, which are no sums of the past there."""
        return self.state is None or self.state.truncated_(0) is not None

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens: their number, whichever its sign (as transformers' caches)."""
        if self.state is None:
            return
        shorter = self.state.truncated_(abs(tokens_to_remove))
        if shorter is None:
            raise InputError(
                "past_key_values: this model keeps sums of the past, or its last tokens alone, of which "
                "nothing can be taken back; generate without an assistant"
            )
        self.state = shorter

    @property
    def batch_size(self) -> int:
        """The number of rows, -1 where nothing was read."""
        tensors = [] if self.state is None else _tensors(self.state)
        return len(tensors[0]) if tensors else -1


def _tensors(state: State) -> list[Tensor]:
    tensors: list[Tensor] = []
    state.map(lambda tensor: (tensors.append(tensor), tensor)[1])
    return tensors


def adopted(past: Any, model: Transformer) -> PolyformerCache:
    """`past` as our cache: ours, or keys and values for every layer in one of transformers' (a learned
    prefix, say), of which the cross-attention's part is left to the source.

    Raises `InputError` for anything else.
    """
    if isinstance(past, PolyformerCache):
        return past
    own = past.self_attention_cache if isinstance(past, EncoderDecoderCache) else past
    assert model.decoder is not None
    expected = model.decoder.new_states(0)
    layers = getattr(own, "layers", [])
    if not isinstance(own, transformers.Cache) or len(layers) != len(expected):
        raise InputError(
            f"past_key_values: expected what an earlier output returned, or keys and values of "
            f"{len(expected)} layers, got {type(past).__name__} with {len(layers)}"
        )
    bare = [
        layer.feedforward is None and isinstance(layer.self_attention, KeyValueCache) for layer in expected
    ]
    if not all(bare):
        raise InputError(
            "past_key_values: this model keeps more of the past than keys and values; give what "
            "an earlier output returned"
        )
    length = own.get_seq_length()
    states = tuple(LayerState(KeyValueCache(layer.keys, layer.values, length, [length])) for layer in layers)
    return PolyformerCache(ModelState(Tokens(length), states))


def caches(model: Transformer) -> bool:
    """Whether the model's decoder can go on from a state."""
    if model.decoder is None:
        return False
    try:
        model.decoder.new_states(0)
    except InputError:
        return False
    return True
