"""A stack of layers: an encoder, a decoder with a causal context, or a decoder with cross-attention."""

import dataclasses
import functools
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from polyformer.attention.patterns.source_base import is_between_sequences
from polyformer.attention.positions import Shape
from polyformer.core.kv_cache import KeyValueCache
from polyformer.core.ops.norms import normalize
from polyformer.core.sequence.context import Context
from polyformer.core.sequence.image import Image
from polyformer.core.sequence.tokens import Tokens
from polyformer.nn.block import ReversibleConfig, merge_streams, split_streams
from polyformer.nn.depth import Depth, DepthInput, FixedConfig, Halting
from polyformer.nn.memory import Memory
from polyformer.nn.memory.base import check_position
from polyformer.nn.stack.attention_config import AttentionConfig, check_position_terms
from polyformer.nn.stack.convolution import Convolution
from polyformer.nn.stack.feature_layer import FeatureLayer
from polyformer.nn.stack.layer import Layer, LayerCall, LayerState, Source
from polyformer.nn.stack.reversible import recomputes_inputs, run_reversible
from polyformer.nn.stack.rolling import layer_context, stored_tokens, without_unread
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
from polyformer.nn.stack.stack_config import StackConfig


class Stack(nn.Module):
    """A sequence of layers: x [B, T, E] -> [B, T, E].

    `recompute` enables activation checkpointing in training (Chen et al. 2016): the activations inside each
    layer are recomputed in the backward pass. Memory: a single layer plus one tensor per layer; time: a third
    more. A reversible stack needs no switch: it keeps no activations whenever gradients are enabled
    (stack/reversible.py).
    """

    def __init__(
        self,
        config: StackConfig,
        hidden_size: int,
        max_positions: int,
        cross: AttentionConfig | None = None,
        embedding_size: int | None = None,
        image: Image | None = None,
    ):
        super().__init__()
        self.recompute = False
        self.reversible = config.block.reversible
        self.value_residual = config.attention.value_residual
        self.join = config.block.join if isinstance(config.block, ReversibleConfig) else "mean"
        self.mechanism = config.memory.limited(config.attention.mechanism)
        self.aligns_source = is_between_sequences(cross)  # then it needs the positions of both sequences
        shape = Shape(
            hidden_size=hidden_size,
            embedding_size=embedding_size,
            max_positions=max_positions,
            num_layers=config.num_hidden_layers,
            num_heads=config.attention.num_attention_heads,
            head_size=config.attention.rotary_width(hidden_size),
            image=image,
        )
        self.position = config.position.build(shape)
        check_position_terms(self.position, self.mechanism, config.attention.latent is not None)
        config.memory.count_positions(self.position)
        self.memory: Memory | None = config.memory.build(shape)
        if self.memory is not None:
            self.mechanism.require("supports_recurrence")
            check_position(self.position)
        attention = dataclasses.replace(config.attention, mechanism=self.mechanism)
        parts = attention, config.feedforward, config.block, config.norm, config.dropout
        fixed = isinstance(config.depth, FixedConfig)
        kind = Layer if fixed and self.memory is None and not self.value_residual else FeatureLayer
        self.layers = nn.ModuleList(
            kind(hidden_size, *parts, cross, config.shared_layers.index(number))
            for number in range(config.shared_layers[-1] + 1)
        )
        self.groups = config.shared_layers
        self.owner = config.owner(hidden_size, cross is not None)  # of states
        self.layer_range = range(config.num_hidden_layers)  # all layers, except in a pipeline stage
        first = self.layers[0].get_submodule("attention.mechanism")
        for layer in self.layers[1:]:
            layer.get_submodule("attention.mechanism").share_parameters(first)  # type: ignore[operator]
        convolution = config.convolution
        self.convolution = convolution and Convolution(convolution, hidden_size, config.norm, config.dropout)
        width = config.block.width(hidden_size)
        normed = config.block.normalizes_output or not config.final_norm
        self.final_norm = nn.Identity() if normed else config.norm.build(width)
        self.depth: Depth | None = config.depth.build(shape, None if normed else config.norm)
        self.final_dropout = nn.Dropout(config.final_dropout)
        self.layerdrop = config.layerdrop
        # Depth policies and memories compute with the residual stream, in the type of their weights.
        fixed = self.depth is None and self.memory is None
        self.widens = config.block.exceeds_float16 and fixed
        # Whether a training pass may run only some layers: the others have no gradient then.
        self.skips_layers = bool(self.layerdrop) or self.depth is not None

    @property
    def sequence(self) -> list[Layer]:
        """Return the layers in the order in which they run; layers that share weights are the same module."""
        return [cast(Layer, self.layers[self.groups[index]]) for index in self.layer_range]

    def forward(
        self,
        x: Tensor,
        pos: Tensor,
        context: Context,
        source: Source | None = None,
        states: tuple[LayerState, ...] | None = None,
        collect: list[Tensor] | None = None,
        halting: Halting | None = None,
    ) -> tuple[Tensor, tuple[LayerState, ...] | None]:
        """Return the last layer's output (normed), and the layers' next states, if there are any.

        x: the embedding sum, positions of layer 0 included. pos: [T] or [B, T]. `collect` receives the input
        of every layer and the final output. halting: from `start_halting`, for a caller that reads it later.
        Raises `InputError` for packed documents that the mechanism cannot separate.
        """
        if context.q_doc is not None:
            self.mechanism.require("supports_packing")
        if self.widens and x.dtype == torch.float16:
            x = x.float()
        halting = halting or self.start_halting(x, pos, context, source)
        first_values = cast(FeatureLayer, self.sequence[0]).values(x) if self.value_residual else None
        call = StackCall(pos, context, source, states, collect, halting, x.dtype, first_values)
        if self.reversible and recomputes_inputs(call):
            return self._run_reversible(x, call)
        run_layer = self._layer_runner(call)
        x = split_streams(x) if self.reversible else x
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

    def _layer_runner(self, call: StackCall) -> LayerRunner:
        """Return the function that runs one layer in this call, with the features that the call needs."""
        calls = self._layer_calls(call)
        run: LayerRunner = RunLayer(calls)
        if self.recompute and self.training and torch.is_grad_enabled():
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
            run = RecordInput(run, call.collect, self.reversible, call.dtype)
        return run

    def _layer_calls(self, call: StackCall) -> list[LayerCall]:
        """Return the arguments of each layer of the stack."""
        parts = self.position, call.source
        rest = self.memory, call.first_values
        if not call.states:
            return [LayerCall(call.context, *parts, None, *rest)] * len(self.groups)
        contexts = [layer_context(call.context, state, call.pos.device) for state in call.states]
        return [LayerCall(context, *parts, state, *rest) for context, state in zip(contexts, call.states)]

    def _run_reversible(self, x: Tensor, call: StackCall) -> tuple[Tensor, tuple[LayerState, ...] | None]:
        """Return the results of `forward`, with a graph that contains no activations."""
        y, memories = run_reversible(self.sequence, split_streams(x), self._layer_calls(call), call.pos)
        y = self._finish(merge_streams(y, call.dtype, self.join), call.context)
        return y, None if call.states is None else tuple(memories)

    def _output(self, x: Tensor, call: StackCall) -> Tensor:
        """Return the output of the stack from the output of its last layer."""
        x = merge_streams(x, call.dtype, self.join) if self.reversible else x
        finish = functools.partial(self._finish, context=call.context)
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

    def _finish(self, x: Tensor, context: Context) -> Tensor:
        if self.layer_range.stop < len(self.groups):
            return x
        return self.final_dropout(normalize(self.final_norm, x, context.q_valid))

    def _next_state(self, state: LayerState) -> LayerState:
        """Return the state for the next call: with a memory, only its last keys and values."""
        cache = state.self_attention
        if self.memory is None or not isinstance(cache, KeyValueCache):
            return state
        return dataclasses.replace(state, self_attention=cache.last(self.memory.length))

    def without_unread(
        self, states: tuple[LayerState, ...], context: Context, before: int
    ) -> tuple[LayerState, ...]:
        """Return the states without the keys that no token from `context` on reads; see `rolling`."""
        if self.memory is not None or self.position.num_relations is not None:
            return states
        reaches = [layer.attention.reach() for layer in self.sequence]
        return without_unread(states, reaches, context, before)

    def remembered_tokens(self, tokens: Tokens, states: tuple[LayerState, ...]) -> Tokens:
        """Return the part of `tokens` that the next call needs: all tokens in the memory or in a cache."""
        return stored_tokens(tokens, states) if self.memory is None else self.memory.remembered_tokens(tokens)

    def rerun_last_layer(self, x: Tensor, read: Tensor, context: Context) -> Tensor:
        """Return the (normed) output of an encoder's last layer for x [B, T, E], with keys and values from
        the layer's original input `read` [B, T, E]."""
        return self._finish(self.sequence[-1].rerun(x, read, context, self.position), context)

    def new_states(self, reserve: int) -> tuple[LayerState, ...]:
        """Return the states before the first token, with caches for `reserve` tokens.

        With a memory they contain hidden states in training, and keys and values in evaluation. Raises
        `InputError` if the mechanism has no states.
        """
        self.mechanism.require("supports_kv_cache")
        memory = self.memory
        if memory is None:
            # A cache that drops keys would not use a larger reserve.
            reaches = [layer.attention.reach() for layer in self.sequence]
            reserves = [reserve if reach is None else min(reserve, 2 * reach.most) for reach in reaches]
            return tuple(layer.new_state(slots) for layer, slots in zip(self.sequence, reserves))
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
