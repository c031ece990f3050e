"""The state of a decoding step with a fixed size: a cache of C slots, and the slot of the step as a tensor.

All tensors of such a step have the same shapes as in the next step, so that one recorded graph serves both.
Slots after the current slot are hidden by causality, as tokens of the future.
"""

import dataclasses

import torch
from torch import Tensor

from polyformer.core.kv_cache import Int8Cache, KeyValueCache
from polyformer.core.sequence.context import Context
from polyformer.core.sequence.inputs import ModelInputs
from polyformer.core.sequence.tokens import Tokens
from polyformer.core.state import State

NO_SLOT = torch.zeros(1, dtype=torch.long)


@dataclasses.dataclass(frozen=True)
class FixedCache(KeyValueCache):
    """Buffers [B, Hkv, C, D] of keys and values, read as a whole; the next tokens belong to `slots`.

    tokens: the tokens of the buffer if it does not have a slot for each token of the text.
    """

    slots: Tensor = NO_SLOT
    tokens: "FixedTokens | None" = None

    def context(self, context: Context, device: torch.device) -> Context:
        """Return the context of the buffer, which layers with the same tokens share."""
        tokens = self.tokens
        if tokens is None:
            return context
        return context.once(
            ("fixed tokens", id(tokens.slots)), lambda: tokens.context(context.q_len, context.causal)
        )

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, "FixedCache"]:
        """Write new keys and values to their slots, and return the whole buffers."""
        assert self.keys is not None
        assert self.values is not None
        self.keys.index_copy_(2, self.slots, keys)
        self.values.index_copy_(2, self.slots, values)
        return self.keys, self.values, self


@dataclasses.dataclass(frozen=True)
class FixedTokens(Tokens):
    """The tokens of all C slots; the tokens of `slots` are new."""

    slots: Tensor = NO_SLOT

    def extended(self, inputs: ModelInputs) -> Tokens:
        """Return the tokens themselves, which include the new tokens."""
        return self

    def last(self, new: int, device: torch.device) -> Tensor:
        """Return the positions of the new tokens: [B, new], or [new] if they equal the slots."""
        return self.slots if self.pos is None else self.pos[:, self.slots]

    def context(self, new: int, causal: bool, device: torch.device | None = None) -> Context:
        """Return the context of the new tokens attending to all slots up to their own."""
        return Context(
            new,
            self.length,
            causal=causal,
            q_start=self.slots[:1],  # type: ignore[arg-type]
            q_pos=None if self.pos is None else self.pos[:, self.slots],
            kv_pos=self.pos,
            q_doc=None if self.doc is None else self.doc[:, self.slots],
            kv_doc=self.doc,
            kv_valid=self.valid,
        )

    def new_valid(self, new: int) -> Tensor | None:
        """Return which new tokens are real, [B, new]; None if all are."""
        return None if self.valid is None else self.valid[:, self.slots]


def buffered(cache: State | None) -> list[KeyValueCache]:
    """Return the caches with buffers that make up a layer's cache; none for another state."""
    if isinstance(cache, Int8Cache):
        return [cache.integers, cache.scales]
    return [cache] if type(cache) is KeyValueCache else []


def joined(caches: list[KeyValueCache]) -> State:
    """Return the layer's cache that consists of the caches of `buffered`."""
    return Int8Cache(*caches) if len(caches) > 1 else caches[0]
