"""Runners of the layers of a stack: a runner for the plain layer, and a wrapper for each feature.

A runner maps (index, layer, x) to (output, next state) of the layer. A stack starts each call with
`RunLayer`, which calls the layer, and wraps it for the features that the call needs (`Stack._layer_runner`):

    RunCheckpointed    activation checkpointing: the backward pass recomputes the layer
    AddConvolution     a convolution parallel to the first layer
    DropLayers         LayerDrop: training skips layers at random
    RunActive          adaptive depth: only active tokens are computed
    RecordInput        hidden states are recorded

A call without these features has only `RunLayer`. A reversible stack in training has no runner: its layers
run inside a single autograd function (stack/reversible.py).
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from polyformer.core.sequence.context import Context
from polyformer.nn.depth import Active, Halting
from polyformer.nn.stack.convolution import Convolution
from polyformer.nn.stack.feature_layer import FeatureLayer
from polyformer.nn.stack.layer import Layer, LayerCall, LayerState, Source
from polyformer.nn.stack.stack import run_checkpointed


@dataclasses.dataclass(frozen=True, eq=False)
class StackCall:
    """The arguments of a call of a stack (`Stack.forward`), and the dtype of its input."""

    pos: Tensor
    context: Context
    source: Source | None
    states: tuple[LayerState, ...] | None
    collect: list[Tensor] | None
    halting: Halting | None
    dtype: torch.dtype
    first_values: Tensor | None = None  # for a value residual

    @property
    def starts_without_cache(self) -> bool:
        """Return whether no later call reads keys of this call's layers: its states, if any, are memories."""
        return self.states is None or all(state.memory is not None for state in self.states)

    @property
    def is_over(self) -> bool:
        """Return whether the remaining layers can be left out.

        This requires that all tokens have halted, and that no later call reads the states of these layers and
        no caller reads their hidden states.
        """
        return (
            self.halting is not None and self.halting.all_halted and not self.states and self.collect is None
        )


LayerResult = tuple[Tensor, LayerState | None]


class LayerRunner(Protocol):
    """Run a layer: (index, layer, x) -> (output, next state), x [B, T, E] with the positions of the layer.

    active: the tokens for which the output is computed, [1, N, E]; None for all.
    """

    def __call__(self, index: int, layer: Layer, x: Tensor, active: Active | None = None) -> LayerResult: ...


@dataclasses.dataclass(frozen=True, eq=False)
class RunLayer:
    """Call the layer with its arguments.

    It holds no hidden states: with activation checkpointing the graph refers to it, and a hidden state refers
    to the graph.
    """

    calls: Sequence[LayerCall]

    def __call__(self, index: int, layer: Layer, x: Tensor, active: Active | None = None) -> LayerResult:
        """Return the layer's output, and its next state if it has a state."""
        call = self.calls[index]
        return layer(x, call) if active is None else layer(x, call, active)


@dataclasses.dataclass(frozen=True, eq=False)
class RunCheckpointed:
    """Activation checkpointing: keep only the layer's input, and run the layer again in the backward pass."""

    run: LayerRunner

    def __call__(self, index: int, layer: Layer, x: Tensor, active: Active | None = None) -> LayerResult:
        """Return the results of the inner runner."""
        return run_checkpointed(layer, self.run, index, layer, x, active)


@dataclasses.dataclass(frozen=True, eq=False)
class AddConvolution:
    """Add a convolution of the first layer's input to its output."""

    run: LayerRunner
    convolution: Convolution
    context: Context

    def __call__(self, index: int, layer: Layer, x: Tensor, active: Active | None = None) -> LayerResult:
        """Return the results of the inner runner, for the first layer with the convolution."""
        # The layer and the convolution read the same x; the sum is normalized once more.
        y, state = self.run(index, layer, x, active)
        return (y if index else self.convolution(x, y, self.context)), state


@dataclasses.dataclass(frozen=True, eq=False)
class DropLayers:
    """LayerDrop: return the input of the layers in `skipped`. Their memories are updated from it."""

    run: LayerRunner
    skipped: Sequence[int]
    calls: Sequence[LayerCall]

    def __call__(self, index: int, layer: Layer, x: Tensor, active: Active | None = None) -> LayerResult:
        """Return x and the updated memory for a skipped layer, else the results of the inner runner."""
        # A skipped layer is the identity: the residual stream passes unchanged.
        if index not in self.skipped:
            return self.run(index, layer, x, active)
        call = self.calls[index]
        if call.state is None:
            return x, None
        assert isinstance(layer, FeatureLayer)
        return x, layer.memory_state(layer.block.memory_input(x), call)


@dataclasses.dataclass(frozen=True, eq=False)
class RunActive:
    """Adaptive depth: compute only the active tokens, then let `halting` decide which tokens halt."""

    run: LayerRunner
    halting: Halting

    def __call__(self, index: int, layer: Layer, x: Tensor, active: Active | None = None) -> LayerResult:
        """Return the hidden states of all tokens, [B, T, E]; halted tokens keep theirs."""
        # y [1, N, E] has only the active tokens, but they attend to keys of all tokens in x.
        y, state = self.run(index, layer, x, self.halting.active)
        return self.halting.update(index, y), state


@dataclasses.dataclass(frozen=True, eq=False)
class RecordInput:
    """Append the input of every layer to `collect`, as a single stream (`FeatureStack.merge`)."""

    run: LayerRunner
    collect: list[Tensor]
    merge: Callable[[Tensor, torch.dtype], Tensor]
    dtype: torch.dtype

    def __call__(self, index: int, layer: Layer, x: Tensor, active: Active | None = None) -> LayerResult:
        """Return the results of the inner runner."""
        self.collect.append(self.merge(x, self.dtype))
        return self.run(index, layer, x, active)
