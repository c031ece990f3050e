"""The state of a decoder with any mechanism as transformers' `Cache`."""

from torch import Tensor
from transformers.cache_utils import Cache

from polyformer.core.errors import InputError
from polyformer.models.architectures import Transformer
from polyformer.models.outputs import ModelState


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
