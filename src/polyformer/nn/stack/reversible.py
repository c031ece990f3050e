"""Training of a reversible stack: it keeps only its last outputs and recomputes all inputs from them.

    forward    (a, b) -> (b, a + f(b))
    backward   a = c - f(b), with only the graph of f(b); then the previous step
               grad_a = grad_c        grad_b = grad_b + (df / db)^T grad_c        c = a + f(b)

Each step is computed twice with the same state of the random generators and of autocast, and in the same way,
so that dropout drops the same numbers. Memory: two tensors [B, T, E] for any number of layers, and the graph
of a single sub-layer; time: one more forward pass. Gradients are equal to gradients from stored activations
up to rounding: recomputed inputs have an error of the order of rounding in float32, which grows with depth in
half precision. Gomez et al. 2017, algorithm 1. Auxiliary losses of sub-layers (core/ops/layers.py) are
passed on with their gradients.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import get_device_states, set_device_states

from polyformer.core.ops.autograd import first_order
from polyformer.core.ops.layers import AuxiliaryLosses, add_auxiliary_loss, collect_auxiliary_losses
from polyformer.core.state import State
from polyformer.nn.block import Reversible, SubLayer
from polyformer.nn.stack.feature_layer import FeatureLayer
from polyformer.nn.stack.layer import Layer, LayerCall, LayerState
from polyformer.nn.stack.runners import StackCall

STORE_ACTIVATIONS = (
    'pass output_hidden_states=True, which keeps activations, and build the model with backend="definition"'
)
"""The way to get second-order gradients, which require the inputs of the layers."""


@dataclasses.dataclass(frozen=True, eq=False)
class ResidualStep:
    """The step (a, b) -> (b, a + function(b)). `reads`: the tensors, besides b, that get gradients."""

    function: Callable[[Tensor], Tensor]
    reads: list[Tensor]

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, AuxiliaryLosses]:
        """Return the output streams, and the auxiliary losses of the step."""
        # The same computation as in `backward`, so that rounding is the same; its graph is dropped.
        with torch.enable_grad(), collect_auxiliary_losses() as losses:
            added = self.function(b.detach().requires_grad_())
        return b, a + added.detach(), {name: term.detach() for name, term in losses.items()}

    def backward(
        self, b: Tensor, c: Tensor, grad_b: Tensor, grad_c: Tensor, grad_terms: Sequence[Tensor]
    ) -> "StepInputs":
        """Return the input streams, their gradients, and the gradients of `reads`."""
        with torch.enable_grad(), collect_auxiliary_losses() as losses:
            # A leaf, so that the graph contains only this step.
            leaf = b.detach().requires_grad_()
            added = self.function(leaf)
        outputs = [(added, grad_c.to(added.dtype)), *zip(losses.values(), grad_terms, strict=True)]
        # d/db and the gradients of the parameters, all through f(b).
        grads = _gradients(outputs, [leaf, *self.reads])
        grad_b = grad_b if grads[0] is None else grad_b + grads[0]
        # a = c - f(b): the inputs of the step from its outputs.
        return c - added.detach(), b, grad_c, grad_b, grads[1:]


@dataclasses.dataclass(frozen=True, eq=False)
class PositionStep:
    """The step (a, b) -> (a + p, b + p), with the positions p that a scheme adds to the input of a layer."""

    function: Callable[[Tensor], Tensor]
    reads: list[Tensor]

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, AuxiliaryLosses]:
        """Return the output streams; there are no auxiliary losses."""
        # `embed` adds p to its argument, so that p = embed(0).
        p = self.function(torch.zeros_like(a)).detach()
        return a + p, b + p, {}

    def backward(
        self, a: Tensor, b: Tensor, grad_a: Tensor, grad_b: Tensor, grad_terms: Sequence[Tensor]
    ) -> "StepInputs":
        """Return the input streams, their gradients, and the gradients of `reads`."""
        with torch.enable_grad():
            p = self.function(torch.zeros_like(a))
        # p is added to both streams, so its gradient is the sum of both.
        grads = _gradients([(p, grad_a + grad_b)], self.reads)
        return a - p.detach(), b - p.detach(), grad_a, grad_b, grads


Step = ResidualStep | PositionStep
StepInputs = tuple[Tensor, Tensor, Tensor, Tensor, Sequence[Tensor | None]]


def recomputes_inputs(call: StackCall) -> bool:
    """Return whether a reversible stack keeps no activations in this call, because `run_reversible` runs it.

    It does so whenever it builds a graph, except for callers that read keys or hidden states of its layers.
    """
    keeps_nothing = call.starts_without_cache and call.collect is None
    return torch.is_grad_enabled() and keeps_nothing and not torch.compiler.is_compiling()


def run_reversible(
    layers: Sequence[nn.Module], x: Tensor, calls: Sequence[LayerCall], pos: Tensor
) -> tuple[Tensor, list[LayerState]]:
    """Run both streams x [2, B, T, E] through all layers; return them and the layers' next memories."""
    position, source, memory = calls[0].position, calls[0].source, calls[0].memory
    hidden = None if source is None else source.hidden
    # The steps read a leaf instead of `hidden`, so that the graph of `hidden` runs backward only once.
    source_leaf: list[Tensor] = []
    if source is not None and hidden is not None:
        source_leaf = [hidden.detach().requires_grad_(hidden.requires_grad)]
        source = dataclasses.replace(source, hidden=source_leaf[0])
    steps: list[Step] = []
    memories: list[LayerState] = []
    memory_parameters = [] if memory is None else list(memory.parameters())
    for index, layer in enumerate(layers):
        assert isinstance(layer, Layer)
        # The embedding sum has the positions of layer 0 already.
        if index and position.embed(x, pos, index) is not x:
            embed = functools.partial(position.embed, pos=pos, layer=index)
            steps.append(PositionStep(embed, _requiring_grad(position.parameters())))
        parameters = *layer.parameters(), *position.parameters(), *memory_parameters
        reads = _requiring_grad([*parameters, *source_leaf])
        call = dataclasses.replace(calls[index], source=source)
        steps += _residual_steps(layer, reads, call, memories)
    tape = ReversibleTape(steps, _requiring_grad(tensor for step in steps for tensor in step.reads))
    inputs = [hidden if source_leaf and tensor is source_leaf[0] else tensor for tensor in tape.reads]
    y, *terms = _Reversible.apply(tape, x, *inputs)  # type: ignore[misc]
    for name, term in zip(itertools.chain.from_iterable(tape.loss_names), terms, strict=True):
        add_auxiliary_loss(name, term)
    return y, memories


def _residual_steps(
    layer: Layer, reads: list[Tensor], call: LayerCall, memories: list[LayerState]
) -> Iterator[ResidualStep]:
    """Yield the steps of a layer; the first appends the layer's next memory to `memories`."""
    block = layer.block
    assert isinstance(block, Reversible)
    new: dict[str, State | None] = {}
    is_recorded = call.state is None

    def residual_branch(index: int, sublayer: SubLayer, x: Tensor) -> Tensor:
        nonlocal is_recorded
        if not is_recorded:
            # x is the second stream at the start of the layer; the backward pass must not record it again.
            assert isinstance(layer, FeatureLayer)
            memories.append(layer.memory_state(x, call))
            is_recorded = True
        y = block.residual_branch(index, sublayer, x)
        new.clear()  # otherwise the projected source of every layer would stay in memory
        return y

    for index, sublayer in enumerate(layer.sublayers(call, new)):
        yield ResidualStep(functools.partial(residual_branch, index, sublayer), reads)


def _requiring_grad(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors that require gradients, each once."""
    return list({id(tensor): tensor for tensor in tensors if tensor.requires_grad}.values())


@dataclasses.dataclass(frozen=True, eq=False)
class ExecutionState:
    """The global state on which a step depends: random generators and autocast."""

    cpu_state: Tensor
    devices: Sequence[int]
    on_devices: Sequence[Tensor]
    device: str
    autocast: dict[str, Any]

    @classmethod
    def capture(cls, x: Tensor) -> "ExecutionState":
        """Return the present state, before a step on x."""
        devices, states = get_device_states(x)
        device = x.device.type
        autocast: dict[str, Any] = {"enabled": False}
        if torch.amp.is_autocast_available(device):
            autocast = {
                "enabled": torch.is_autocast_enabled(device),
                "dtype": torch.get_autocast_dtype(device),
            }
        return cls(torch.get_rng_state(), devices, states, device, autocast)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Restore this state for the duration of the context."""
        kind = self.device if self.devices else "cuda"
        with (
            torch.random.fork_rng(self.devices, device_type=kind),
            torch.autocast(self.device, **self.autocast, cache_enabled=False),
        ):
            torch.set_rng_state(self.cpu_state)
            set_device_states(list(self.devices), list(self.on_devices), device_type=kind)
            yield


@dataclasses.dataclass(frozen=True, eq=False)
class ReversibleTape:
    """The steps of a call, with the global state and the auxiliary losses' names before each step."""

    steps: list[Step]
    reads: list[Tensor]
    states: list[ExecutionState] = dataclasses.field(default_factory=list)
    loss_names: list[list[str]] = dataclasses.field(default_factory=list)


class _Reversible(torch.autograd.Function):
    """Both streams [2, B, T, E] after all steps and their auxiliary losses; `reads` are inputs."""

    @staticmethod
    def forward(ctx: Any, tape: ReversibleTape, x: Tensor, *reads: Tensor) -> tuple[Tensor, ...]:
        """Run all steps, and keep only the last streams."""
        a, b = x
        terms: list[Tensor] = []
        for step in tape.steps:
            tape.states.append(ExecutionState.capture(x))
            a, b, losses = step.forward(a, b)
            tape.loss_names.append(list(losses))
            terms += losses.values()
        y = torch.stack([a, b])
        ctx.tape = tape
        # Two tensors [B, T, E] for the whole stack; inputs of steps are recomputed.
        ctx.save_for_backward(y)
        return y, *terms

    @staticmethod
    @first_order("a reversible stack in training", STORE_ACTIVATIONS)
    def backward(ctx: Any, grad: Tensor, *grad_terms: Tensor) -> tuple[Tensor | None, ...]:
        """Run the steps backward from the last, each with only the graph of its function."""
        tape: ReversibleTape = ctx.tape
        (a, b), (grad_a, grad_b) = ctx.saved_tensors[0], grad
        index_of = {id(tensor): index for index, tensor in enumerate(tape.reads)}
        total: list[Tensor | None] = [None] * len(tape.reads)
        end = len(grad_terms)
        for step, state, loss_names in reversed(list(zip(tape.steps, tape.states, tape.loss_names))):
            # Auxiliary losses are in the order of the steps; this loop takes them from the end.
            start = end - len(loss_names)
            with state.restored():
                a, b, grad_a, grad_b, grads = step.backward(a, b, grad_a, grad_b, grad_terms[start:end])
            end = start
            for tensor, grad_tensor in zip(step.reads, grads, strict=True):
                if grad_tensor is not None:
                    # Layers with shared weights read the same tensor in several steps.
                    index = index_of[id(tensor)]
                    partial_sum = total[index]
                    total[index] = grad_tensor if partial_sum is None else partial_sum + grad_tensor
        return None, torch.stack([grad_a, grad_b]), *total


def _gradients(outputs: Sequence[tuple[Tensor, Tensor]], inputs: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Return the gradient of each input from (output, its gradient) pairs; None if it has no effect."""
    reached = [(output, grad) for output, grad in outputs if output.requires_grad]
    if not reached or not inputs:
        return [None] * len(inputs)
    ends, grads = zip(*reached)
    return torch.autograd.grad(ends, inputs, grads, allow_unused=True)
