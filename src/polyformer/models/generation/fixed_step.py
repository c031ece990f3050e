"""A decoding step as a function of tensors that have the same form in every step."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from polyformer.core.kv_cache import KeyValueCache
from polyformer.core.sequence.inputs import ModelInputs
from polyformer.core.sequence.tokens import Tokens
from polyformer.models.generation.fixed_state import FixedCache, FixedTokens
from polyformer.models.outputs import ModelState
from polyformer.nn.stack import LayerState


@dataclasses.dataclass(frozen=True, eq=False)
class FixedStep:
    """A step of tokens [N, T] after `state`, with caches and tokens of a fixed size instead.

    others: the tensors of the step except caches, each once. caches: the buffers of keys and of values of
    each layer.
    """

    tokens: Tensor
    state: ModelState
    last: int
    inputs: dict[str, Tensor]
    fixed: FixedTokens
    others: list[Tensor]
    caches: list[Tensor]

    @classmethod
    def of(
        cls, tokens: Tensor, state: ModelState, last: int, inputs: dict[str, Tensor]
    ) -> "FixedStep | None":
        """Return the step; None if a cache has no space for it, or the state has other parts than caches."""
        caches = _whole_caches(tokens, state)
        if caches is None:
            return None
        fixed = _fixed_tokens(tokens, state.tokens, caches[0].shape[2])
        tables = fixed.slots, fixed.valid, fixed.pos, fixed.doc, state.source_valid
        others = [*inputs.values(), *(table for table in tables if table is not None)]
        for layer in state.layers:
            if layer.cross_attention is not None:
                layer.cross_attention.map(lambda tensor: others.append(tensor) or tensor)
        return cls(tokens, state, last, inputs, fixed, [*{id(x): x for x in others}.values()], caches)

    def function(self, model: Any) -> Callable[..., tuple[Tensor, Tensor]]:
        """Return the step as a function of `others` and `caches`, which returns logits and hidden states."""
        fixed, slots, length = [], self.fixed.slots, self.fixed.length
        for layer, keys, values in zip(self.state.layers, self.caches[::2], self.caches[1::2]):
            fixed.append(LayerState(FixedCache(keys, values, length, slots=slots), layer.cross_attention))
        state = dataclasses.replace(self.state, tokens=self.fixed, layers=tuple(fixed))

        def run(*tensors: Tensor) -> tuple[Tensor, Tensor]:
            new = dict(zip(map(id, [*self.others, *self.caches]), tensors))
            inputs = {name: new[id(tensor)] for name, tensor in self.inputs.items()}
            output = model(**inputs, state=state.map(lambda tensor: new[id(tensor)]))
            return model.logits_at(output, slice(-self.last, None), None), output.last_hidden_state

        return run

    def next_state(self, buffers: Sequence[Tensor]) -> ModelState:
        """Return the state after the step, which has written to `buffers`: `caches`, or copies of them."""
        layers, (rows, new) = [], self.tokens.shape
        for layer, keys, values in zip(self.state.layers, buffers[::2], buffers[1::2]):
            cache = layer.self_attention
            assert isinstance(cache, KeyValueCache)
            if keys.data_ptr() != self.caches[2 * len(layers)].data_ptr():
                cache = cache.moved(keys[:rows], values[:rows])
            layers.append(LayerState(cache.filled(new), layer.cross_attention))
        tokens = self.state.tokens.extended(ModelInputs(self.tokens))
        return dataclasses.replace(self.state, tokens=tokens, layers=tuple(layers))


def _whole_caches(tokens: Tensor, state: ModelState) -> list[Tensor] | None:
    """Return the buffers of keys and values of each layer; None if a step of tokens cannot write to them."""
    old, buffers = state.tokens, []
    tables = old.segment, old.marked, state.source
    if old.dropped or old.merged or any(table is not None for table in tables):
        return None
    for layer in state.layers:
        cache = layer.self_attention
        others = layer.memory, layer.store, layer.feedforward
        if type(cache) is not KeyValueCache or any(other is not None for other in others):
            return None
        if cache.keys is None or cache.start or cache.length != old.length:
            return None
        if not cache.can_append(tokens.shape[1]):
            return None
        buffers += cache.keys, cache.values
    return buffers


def _fixed_tokens(tokens: Tensor, old: Tokens, size: int) -> FixedTokens:
    """Return the tokens of all slots, with the tables of `old` continued to them."""
    fixed = FixedTokens(
        size, slots=torch.arange(old.length, old.length + tokens.shape[1], device=tokens.device)
    )
    if old.valid is None and old.pos is None and old.doc is None:
        return fixed
    every = old.extended(ModelInputs(tokens.new_zeros(len(tokens), size - old.length)))
    return dataclasses.replace(fixed, valid=every.valid, pos=every.pos, doc=every.doc)
