"""What some models add to a stack: a memory, tokens that halt, reversible layers, layers that are skipped.

Each pass runs its layers through a runner (`runners`), with a wrapper for each feature that the pass needs.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from polyformer.core.kv_cache import KeyValueCache
from polyformer.core.sequence.context import Context
from polyformer.core.sequence.tokens import Tokens
from polyformer.nn.block import merge_streams, split_streams
from polyformer.nn.depth import DepthInput, Halting
from polyformer.nn.stack.config import StackConfig
from polyformer.nn.stack.feature_layer import FeatureLayer
from polyformer.nn.stack.layer import LayerCall, LayerState, Source
from polyformer.nn.stack.reversible import recomputes_inputs, run_reversible
from polyformer.nn.stack.runners import (
    AddConvolution,
    DropLayers,
    LayerRunner,
    RecordInput,
    RunActive,
    RunCheckpointed,
    RunLayer,
    StackCall,
)
from polyformer.nn.stack.stack import Stack


def build_stack(config: StackConfig, hidden_size: int, max_positions: int, *parts: Any, **more: Any) -> Stack:
    """Return a stack: a `FeatureStack` if its configuration has features, else the plain `Stack`. A block
    with copies of the residual stream has a `HyperStack`.

    parts, more: further arguments of `Stack`.
    """
    kind = FeatureStack if config.has_features else Stack
    kind = HyperStack if config.block.stream_copies else kind
    stack = kind(config, hidden_size, max_positions, *parts, **more)
    stack.bindings.prepare(stack)
    return stack


class FeatureStack(Stack):
    """A stack with a memory, an adaptive depth, reversible or skipped layers, a convolution or T5's range.

    A reversible stack needs no switch `recompute`: it keeps no activations whenever gradients are enabled
    (stack/reversible.py).
    """

    def __init__(self, config: StackConfig, *sizes: Any, **more: Any):
        super().__init__(config, *sizes, **more)
        # Depth policies and memories compute with the residual stream, in the type of their weights.
        fixed = self.depth is None and self.memory is None
        self.widens = config.block.exceeds_float16 and fixed

    def forward(
        self,
        x: Tensor,
        pos: Tensor,
        context: Context,
        source: Source | None = None,
        states: tuple[LayerState, ...] | None = None,
        collect: list[Tensor] | None = None,
        *,
        halting: Halting | None = None,
    ) -> tuple[Tensor, tuple[LayerState, ...] | None]:
        """Return the same as `Stack.forward`.

        halting: from `start_halting`, for a caller that reads it later.
        """
        if context.q_doc is not None:
            self.mechanism.require("supports_packing")
        if self.widens and x.dtype == torch.float16:
            x = x.float()
        halting = halting or self.start_halting(x, pos, context, source)
        dtype, x = x.dtype, self.split(x)
        first_values = cast(FeatureLayer, self.sequence[0]).values(x) if self.value_residual else None
        call = StackCall(pos, context, source, states, collect, halting, dtype, first_values)
        if self.reversible and recomputes_inputs(call):
            return self._run_reversible(x, call)
        run_layer = self._layer_runner(call)
        new_states: list[LayerState] = []
        for index, layer in enumerate(self.sequence, self.layer_range.start):
            # The embedding sum contains the positions of layer 0 already.
            x = self.position.embed(x, pos, index) if index else x
            x, state = run_layer(index, layer, x)
            if state is not None:
                new_states.append(self._next_state(state))
            if call.is_over:
                break
        return self._output(x, call), tuple(new_states) if states else None

    def split(self, x: Tensor) -> Tensor:
        """Return the input of the first layer: x [B, T, E], or its streams [n, B, T, E]."""
        return split_streams(x) if self.reversible else x

    def merge(self, x: Tensor, dtype: torch.dtype, join: str = "mean") -> Tensor:
        """Return the input or output x of a layer as [B, T, E]; `join` is for reversible layers."""
        return merge_streams(x, dtype, join) if self.reversible else x

    def _layer_runner(self, call: StackCall) -> LayerRunner:
        """Return the function that runs one layer in this call, with the features that the call needs."""
        calls = self._layer_calls(call)
        run: LayerRunner = RunLayer(calls)
        if self.checkpoints:
            run = RunCheckpointed(run)
        if self.convolution is not None:
            run = AddConvolution(run, self.convolution, call.context)
        # Later tokens read the keys of every layer in a KV cache, so no layer is skipped with a cache.
        if self.layerdrop and self.training and call.starts_without_cache:
            skipped = (torch.rand(len(self.groups)) < self.layerdrop).nonzero().flatten().tolist()
            run = DropLayers(run, skipped, calls)
        if call.halting is not None:
            run = RunActive(run, call.halting)
        if call.collect is not None:
            run = RecordInput(run, call.collect, self.merge, call.dtype)
        return run

    def _layer_calls(self, call: StackCall) -> list[LayerCall]:
        """Return the arguments of each layer of the stack."""
        features = {"memory": self.memory, "first_values": call.first_values}
        calls = self.calls(call.context, call.source, call.states, call.pos.device)
        return [dataclasses.replace(each, **features) for each in calls]

    def _run_reversible(self, x: Tensor, call: StackCall) -> tuple[Tensor, tuple[LayerState, ...] | None]:
        """Return the results of `forward`, with a graph that contains no activations."""
        y, memories = run_reversible(self.sequence, x, self._layer_calls(call), call.pos)
        y = self.finish(self.merge(y, call.dtype, self.join), call.context)
        return y, None if call.states is None else tuple(memories)

    def _output(self, x: Tensor, call: StackCall) -> Tensor:
        """Return the output of the stack from the output of its last layer."""
        x = self.merge(x, call.dtype, self.join)
        finish = functools.partial(self.finish, context=call.context)
        x = finish(x) if call.halting is None else call.halting.output(x, finish)
        if call.collect is not None:
            call.collect.append(x)
        return x

    def start_halting(
        self,
        x: Tensor,
        pos: Tensor,
        context: Context,
        source: Source | None = None,
        predict: Callable[[Tensor], Tensor] | None = None,
    ) -> Halting | None:
        """Return the object that decides which tokens of this call halt; None if no token can halt."""
        if self.depth is None:
            return None
        if source is None:
            return self.depth.start(DepthInput(x, pos, context, predict=predict))
        return self.depth.start(DepthInput(x, pos, context, source.hidden, source.context.kv_valid, predict))

    def _next_state(self, state: LayerState) -> LayerState:
        """Return the state for the next call: with a memory, only its last keys and values."""
        cache = state.self_attention
        if self.memory is None or not isinstance(cache, KeyValueCache):
            return state
        return dataclasses.replace(state, self_attention=cache.last(self.memory.length))

    def without_unread(
        self, states: tuple[LayerState, ...], context: Context, before: int
    ) -> tuple[LayerState, ...]:
        """Return the states without the keys that no later token reads; a memory keeps its own."""
        return states if self.memory is not None else super().without_unread(states, context, before)

    def remembered_tokens(self, tokens: Tokens, states: tuple[LayerState, ...]) -> Tokens:
        """Return the part of `tokens` that the next call needs: all tokens in the memory or in a cache."""
        if self.memory is None:
            return super().remembered_tokens(tokens, states)
        return self.memory.remembered_tokens(tokens)

    def new_states(self, reserve: int) -> tuple[LayerState, ...]:
        """Return the states before the first token, with caches for `reserve` tokens.

        With a memory they contain hidden states in training, and keys and values in evaluation. Raises
        `InputError` if the mechanism has no states.
        """
        memory = self.memory
        if memory is None:
            return super().new_states(reserve)
        self.mechanism.require("supports_kv_cache")
        if self.training or not memory.supports_kv_cache:
            states = [
                LayerState(memory=memory.new_state(index), feedforward=layer.feedforward.new_state())
                for index, layer in enumerate(self.sequence)
            ]
        else:
            # A cache keeps only the last `length` tokens, so a larger reserve would be unused.
            reserve = min(reserve, 2 * (memory.length + 1))
            states = [layer.new_state(reserve) for layer in self.sequence]
        return tuple(
            dataclasses.replace(state, store=memory.new_store(layer)) for layer, state in enumerate(states)
        )


class HyperStack(FeatureStack):
    """A stack whose layers pass on copies of the residual stream, [n, B, T, E] (hyper-connections)."""

    def __init__(self, config: StackConfig, *sizes: Any, **more: Any):
        super().__init__(config, *sizes, **more)
        self.copies = config.block.stream_copies

    def split(self, x: Tensor) -> Tensor:
        """Return the copies of x [B, T, E], [n, B, T, E]."""
        return x.expand(self.copies, *x.shape)

    def merge(self, x: Tensor, dtype: torch.dtype, join: str = "mean") -> Tensor:
        """Return the sum of the streams, [B, T, E]."""
        return x.sum(0)
