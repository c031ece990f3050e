"""Decoding steps compiled to one graph, with `generate(..., compile=True)`.

In a step with one token, a model such as GPT-2 spends a third of its time on Python code and small
operations. The graph of a step has a cache of fixed capacity (`fixed_state`), so it serves all steps with the
same number of rows; other steps, such as the steps after a text of a batch has ended, run as usual. Products
stay in the layouts of `core.ops.weight_layouts`, with int8 weights of `core.ops.integer_products`; torch's
compiler joins everything between them.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from polyformer.attention.mechanisms import SoftmaxConfig
from polyformer.attention.patterns import Causal, Full
from polyformer.core.errors import InputError
from polyformer.core.kv_cache import KeyValueCache
from polyformer.core.recorded_graph import ValueReadError, record
from polyformer.core.recorder import collecting
from polyformer.core.sequence.inputs import ModelInputs
from polyformer.models.generation.fixed_state import FixedCache, FixedTokens
from polyformer.models.outputs import ModelState
from polyformer.nn.stack import LayerState

LEAST_CAPACITY = 64
"""The least capacity of a cache; every other capacity needs other code."""


def capacity(length: int) -> int:
    """Return the capacity of a cache for texts of up to `length` tokens: a power of two."""
    return max(LEAST_CAPACITY, 1 << (length - 1).bit_length())


def check_compilable(model: Any) -> None:
    """Raise `InputError` for a model with steps that have no graph of fixed size."""
    stack, mechanism = model.decoder, model.config.decoder.attention.mechanism
    reason = None
    if not isinstance(mechanism, SoftmaxConfig) or mechanism.pattern not in (None, Full(), Causal()):
        reason = "only dense softmax attention reads a cache of fixed size"
    elif model.config.weights == "int8" and not next(model.parameters()).is_cpu:
        reason = "int8 products of a GPU are not part of a graph"
    elif stack.memory is not None or stack.depth is not None:
        reason = "a memory or a depth policy decides from step to step"
    elif dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        reason = "processes may exchange parts of a step"
    elif collecting() or any(
        module._forward_hooks or module._forward_pre_hooks for module in model.modules()
    ):
        reason = "hooks and observers run in Python"
    if reason is not None:
        raise InputError(f"compile: expected a model with a compilable step, but {reason}; leave it out")


class CompiledSteps:
    """Reads steps of a model through one compiled graph."""

    def __init__(self, model: Any):
        check_compilable(model)
        self.model = model
        self.is_first = True
        self.cleared: dict[int, Tensor] = {}  # buffers by id
        self.key: object = None
        self.run: Callable[..., Sequence[Tensor]] | None = None

    def read(
        self, tokens: Tensor, state: ModelState, last: int, inputs: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor, ModelState] | None:
        """Return the next-token logits [N, last, V] of tokens [N, T] after `state`, hidden states [N, T, E]
        and the next state; None for the first step, and for a step that the graph does not serve.

        inputs: all inputs of the model besides the state, by name, `tokens` included.
        """
        if self.is_first:  # weights are packed in the first step, which is not part of the graph
            self.is_first = False
            return None
        step = FixedStep.of(tokens, state, last, inputs)
        if step is None or (self.run is not None and step.key != self.key):
            return None
        self._clear(step)
        if self.run is not None:
            logits, hidden = self.run(*step.tensors)
            return logits, hidden, step.next_state()
        try:
            graph = record(step.function(self.model), step.tensors)
        except ValueReadError as error:
            raise InputError(
                f"compile: expected a model with a compilable step, but values are read {error}; leave it out"
            ) from error
        self.key, self.run = step.key, graph.compiled(step.tensors)
        logits, hidden = graph.outputs
        return logits, hidden, step.next_state()

    def _clear(self, step: "FixedStep") -> None:
        """Fill free slots of new buffers with zeros: a weight of 0 times uninitialized memory may be NaN."""
        for layer in step.fixed.layers:
            cache = layer.self_attention
            assert isinstance(cache, FixedCache)
            for buffer in (cache.keys, cache.values):
                if buffer is not None and id(buffer) not in self.cleared:
                    buffer[:, :, step.state.tokens.length :].zero_()
                    self.cleared[id(buffer)] = buffer


@dataclasses.dataclass(frozen=True, eq=False)
class FixedStep:
    """A step of tokens [N, T] after `state`, with the state `fixed` of a fixed size instead.

    tensors: the inputs and the tensors of the fixed state, each once.
    """

    tokens: Tensor
    state: ModelState
    fixed: ModelState
    last: int
    inputs: dict[str, Tensor]
    tensors: list[Tensor]

    @classmethod
    def of(
        cls, tokens: Tensor, state: ModelState, last: int, inputs: dict[str, Tensor]
    ) -> "FixedStep | None":
        """Return the step; None if a cache has no space for it, or the state has other parts than caches."""
        fixed = _fixed_state(tokens, state)
        if fixed is None:
            return None
        tensors = {id(tensor): tensor for tensor in inputs.values()}
        fixed.map(lambda tensor: tensors.setdefault(id(tensor), tensor))
        return cls(tokens, state, fixed, last, inputs, [*tensors.values()])

    @property
    def key(self) -> object:
        """Return the number of logits, and the names, shapes and strides of the tensors."""
        return self.last, tuple(self.inputs), [(tensor.shape, tensor.stride()) for tensor in self.tensors]

    def function(self, model: Any) -> Callable[..., tuple[Tensor, Tensor]]:
        """Return the step as a function of `tensors`, which returns logits and hidden states."""

        def run(*tensors: Tensor) -> tuple[Tensor, Tensor]:
            new = dict(zip(map(id, self.tensors), tensors))
            inputs = {name: new[id(tensor)] for name, tensor in self.inputs.items()}
            output = model(**inputs, state=self.fixed.map(lambda tensor: new[id(tensor)]))
            return model.logits_at(output, slice(-self.last, None), None), output.last_hidden_state

        return run

    def next_state(self) -> ModelState:
        """Return the state after the step, which has written to the caches of `state`."""
        layers = []
        for layer in self.state.layers:
            assert isinstance(layer.self_attention, KeyValueCache)
            cache = layer.self_attention.filled(self.tokens.shape[1])
            layers.append(dataclasses.replace(layer, self_attention=cache))
        tokens = self.state.tokens.extended(ModelInputs(self.tokens))
        return dataclasses.replace(self.state, tokens=tokens, layers=tuple(layers))


def _fixed_state(tokens: Tensor, state: ModelState) -> ModelState | None:
    """Return the state of a fixed size for a step of tokens [N, T]; None if there is none."""
    old, new = state.tokens, tokens.shape[1]
    if (
        old.dropped
        or old.merged
        or old.segment is not None
        or old.marked is not None
        or state.source is not None
    ):
        return None
    slots = torch.arange(old.length, old.length + new, device=tokens.device)
    caches = [
        cache for layer in state.layers if (cache := _fixed_cache(layer, slots, old.length)) is not None
    ]
    if len(caches) < len(state.layers):
        return None
    layers = tuple(LayerState(cache, layer.cross_attention) for cache, layer in zip(caches, state.layers))
    size = caches[0].length
    fixed = FixedTokens(size, slots=slots)
    if any(table is not None for table in (old.valid, old.pos, old.doc)):
        # The tables of the text continued to all slots.
        every = old.extended(ModelInputs(tokens.new_zeros(len(tokens), size - old.length)))
        fixed = dataclasses.replace(fixed, valid=every.valid, pos=every.pos, doc=every.doc)
    return dataclasses.replace(state, tokens=fixed, layers=layers)


def _fixed_cache(layer: LayerState, slots: Tensor, length: int) -> FixedCache | None:
    """Return a layer's whole cache, to write to `slots`; None if it cannot be written to."""
    cache = layer.self_attention
    others = layer.memory, layer.store, layer.feedforward
    if type(cache) is not KeyValueCache or any(other is not None for other in others):
        return None
    if cache.keys is None or cache.start or cache.length != length or not cache.can_append(len(slots)):
        return None
    return FixedCache(cache.keys, cache.values, cache.keys.shape[2], slots=slots)
