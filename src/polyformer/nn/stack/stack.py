"""A stack of layers: an encoder, a decoder with a causal context, or a decoder with cross-attention."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from polyformer.attention.patterns.between_sequences import is_between_sequences
from polyformer.attention.patterns.global_tokens import reads_marks
from polyformer.attention.positions import Position, Shape
from polyformer.core.errors import InputError
from polyformer.core.ops.linear import SMALL, active_backend
from polyformer.core.ops.norms import normalize
from polyformer.core.parts import Bindings, bindings_of, is_inspected, submodule
from polyformer.core.sequence.context import Context, Image
from polyformer.core.sequence.tokens import Reach, Tokens
from polyformer.nn.block import ReversibleConfig
from polyformer.nn.depth import Depth, FixedConfig
from polyformer.nn.memory import Memory
from polyformer.nn.memory.base import check_position
from polyformer.nn.stack.config import AttentionConfig, StackConfig, check_position_terms
from polyformer.nn.stack.convolution import Convolution
from polyformer.nn.stack.feature_layer import FeatureLayer
from polyformer.nn.stack.layer import Layer, LayerCall, LayerState, Source
from polyformer.nn.stack.rolling import layer_context, stored_tokens, without_unread


class Stack(nn.Module):
    """A sequence of layers: x [B, T, E] -> [B, T, E].

    `build_stack` chooses between this class and `FeatureStack`, which has what only some models need, such
    as a memory or tokens that halt.

    `recompute` enables activation checkpointing in training (Chen et al. 2016): the activations inside each
    layer are recomputed in the backward pass. Memory: a single layer plus one tensor per layer; time: a third
    more.
    """

    position: Position = submodule()
    layers: nn.ModuleList = submodule()
    final_norm: nn.Module = submodule()

    recompute = False

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
        self._check(config)
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
        if config.attention.beside is not None:
            check_position_terms(self.position, config.attention.beside.second, latent=False)
        config.memory.count_positions(self.position)
        self.memory: Memory | None = config.memory.build(shape)
        if self.memory is not None:
            self.mechanism.require("supports_recurrence")
            check_position(self.position)
        attention = dataclasses.replace(config.attention, mechanism=self.mechanism)
        limited = dataclasses.replace(config, attention=attention)
        fixed = isinstance(config.depth, FixedConfig)
        kind = Layer if fixed and self.memory is None and not self.value_residual else FeatureLayer
        self.tokenwise = config.norm.tokenwise
        self.layers = nn.ModuleList(
            kind(hidden_size, limited, cross, config.shared_layers.index(number))
            for number in range(config.shared_layers[-1] + 1)
        )
        self.groups = config.shared_layers
        self.owner = config.owner(hidden_size, cross is not None)  # of states
        self.layer_range = range(config.num_hidden_layers)  # all layers, except in a pipeline stage
        _share_parameters(self.layers)
        convolution = config.convolution
        self.convolution = convolution and Convolution(convolution, hidden_size, config.norm, config.dropout)
        width = config.block.width(hidden_size)
        normed = config.block.normalizes_output or not config.final_norm
        self.final_norm = nn.Identity() if normed else config.norm.build(width)
        self.depth: Depth | None = config.depth.build(shape, None if normed else config.norm)
        self.final_dropout = nn.Dropout(config.final_dropout)
        self.layerdrop = config.layerdrop
        self.reads_marks = reads_marks(self.mechanism)
        self.drops_keys = any(self.reaches)  # whether the cache of some layer keeps only a window
        # Whether a training pass may run only some layers: the others have no gradient then.
        self.skips_layers = bool(self.layerdrop) or self.depth is not None

    def _check(self, config: StackConfig) -> None:
        """Raise `InputError` for a configuration with features, which this class would leave out."""
        if type(self) is Stack and config.has_features:
            raise InputError(
                "config: Stack is plain, and this configuration has a memory, an adaptive depth or another "
                "feature of FeatureStack; use build_stack"
            )

    @property
    def sequence(self) -> list[Layer]:
        """Return the layers in the order in which they run; layers that share weights are the same module."""
        layers: list[Any] = [*self.layers]
        return [layers[index] for index in self.groups[self.layer_range.start : self.layer_range.stop]]

    @property
    def reaches(self) -> list[Reach | None]:
        """Return which earlier keys of its cache a query may read in each layer; None for all."""
        return [layer.attention.reach() for layer in self.sequence]

    def forward(
        self,
        x: Tensor,
        pos: Tensor,
        context: Context,
        source: Source | None = None,
        states: tuple[LayerState, ...] | None = None,
        collect: list[Tensor] | None = None,
    ) -> tuple[Tensor, tuple[LayerState, ...] | None]:
        """Return the last layer's output (normed), and the layers' next states, if there are any.

        x: the embedding sum, positions of layer 0 included. pos: [T] or [B, T]. `collect` receives the input
        of every layer and the final output. Raises `InputError` for packed documents that the mechanism
        cannot separate.
        """
        if context.q_doc is not None:
            self.mechanism.require("supports_packing")
        position, checkpoints = self.position, self.recompute and self.checkpoints
        new_states: list[LayerState] = []
        calls = self.calls(context, source, states, pos.device)
        for index, (layer, call) in enumerate(zip(self.sequence, calls), self.layer_range.start):
            # The embedding sum contains the positions of layer 0 already.
            if index and position.embeds_layers:
                x = position.embed(x, pos, index)
            if collect is not None:
                collect.append(x)
            x, state = run_checkpointed(layer, layer, x, call) if checkpoints else layer(x, call)
            if state is not None:
                new_states.append(state)
        x = self.finish(x, context)
        if collect is not None:
            collect.append(x)
        return x, tuple(new_states) if states else None

    def run(self, x: Tensor, *arguments: Any, **features: Any) -> Any:
        """Return `forward` of the arguments, with bound parts if nothing watches them (`core.parts`)."""
        if is_inspected() or not self.bind(x.shape[0] * x.shape[1]):
            return self(x, *arguments, **features)
        try:
            return self(x, *arguments, **features)
        finally:
            self.bindings.end()

    @functools.cached_property
    def largest_weight(self) -> int:
        """The number of elements of the largest weight, as the stack was built."""
        return max((weight.numel() for weight in self.parameters()), default=0)

    @property
    def bindings(self) -> Bindings:
        """The bindings of the parts, see `core.parts`."""
        return bindings_of(self)

    def bind(self, rows: int) -> bool:
        """Bind the parts for calls of `rows` tokens until `bindings.end()`; return whether they are bound."""
        few_rows = rows * self.largest_weight <= SMALL and active_backend.get() is None
        return self.bindings.begin(self, few_rows)

    @property
    def checkpoints(self) -> bool:
        """Whether a pass keeps only the inputs of layers, and computes the layers again backward."""
        return self.recompute and self.training and torch.is_grad_enabled()

    def calls(
        self,
        context: Context,
        source: Source | None,
        states: tuple[LayerState, ...] | None,
        device: torch.device,
    ) -> list[LayerCall]:
        """Return the arguments of each layer of the stack."""
        if not states:
            return [LayerCall(context, self.position, source)] * len(self.groups)
        position = self.position
        return [LayerCall(layer_context(context, state, device), position, source, state) for state in states]

    def finish(self, x: Tensor, context: Context) -> Tensor:
        """Return the output of the last layer with the final norm, unless later layers are elsewhere."""
        if self.layer_range.stop < len(self.groups):
            return x
        x = self.final_norm(x) if self.tokenwise else normalize(self.final_norm, x, context.q_valid)
        return self.final_dropout(x) if self.training else x

    def start_halting(self, *arguments: Any) -> None:
        """Return None: no token halts before the last layer; see `FeatureStack`."""

    def without_unread(
        self, states: tuple[LayerState, ...], context: Context, before: int
    ) -> tuple[LayerState, ...]:
        """Return the states without the keys that no token from `context` on reads; see `rolling`."""
        if not self.drops_keys or not before or self.position.num_relations is not None:
            return states
        return without_unread(states, self.reaches, context, before)

    def remembered_tokens(self, tokens: Tokens, states: tuple[LayerState, ...]) -> Tokens:
        """Return the part of `tokens` that the next call needs: all tokens in a cache."""
        return stored_tokens(tokens, states) if tokens.has_tables else tokens

    def rerun_last_layer(self, x: Tensor, read: Tensor, context: Context) -> Tensor:
        """Return the (normed) output of an encoder's last layer for x [B, T, E], with keys and values from
        the layer's original input `read` [B, T, E]."""
        return self.finish(self.sequence[-1].rerun(x, read, context, self.position), context)

    def new_states(self, reserve: int) -> tuple[LayerState, ...]:
        """Return the states before the first token, with caches for `reserve` tokens.

        Raises `InputError` if the mechanism has no states.
        """
        self.mechanism.require("supports_kv_cache")
        # A cache that drops keys would not use a larger reserve.
        reserves = [reserve if reach is None else min(reserve, 2 * reach.most) for reach in self.reaches]
        return tuple(layer.new_state(slots) for layer, slots in zip(self.sequence, reserves))


def _share_parameters(layers: nn.ModuleList) -> None:
    """Let the mechanisms of all layers share the parameters that layers of their member share."""
    first = layers[0].get_submodule("attention.mechanism")
    for layer in layers[1:]:
        layer.get_submodule("attention.mechanism").share_parameters(first)  # type: ignore[operator]


def run_checkpointed(layer: Layer, run: Callable[..., Any], *arguments: Any) -> Any:
    """Return `run(*arguments)`, which runs `layer`; the graph keeps only the arguments, and runs it again.

    Raises `InputError` for a norm over all tokens: its statistics would change twice.
    """
    if not layer.tokenwise:
        raise InputError("recompute: a norm over all tokens would count every batch twice; set it to false")
    return torch.utils.checkpoint.checkpoint(run, *arguments, use_reentrant=False)
