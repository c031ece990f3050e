"""The interface of adaptive depth: policies for the number of layers that a token goes through.

The interface of adaptive depth: policies for the number of layers that a token goes through.

After each layer a policy decides which tokens halt. A halted token leaves the computation: its state is
copied to every later layer, where the other tokens attend to keys and values from this state. This is the
same in a single pass over a text and in generation of single tokens, in an encoder and in a decoder, and a
cache has the keys of every layer.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from polyformer.attention.positions import Shape
from polyformer.core.config import Config
from polyformer.core.instrumentation import Recorder
from polyformer.core.ops.norms import NormConfig
from polyformer.core.sequence.context import Context

_depths: Recorder[Tensor] = Recorder("depths")
_states: Recorder[list[Tensor]] = Recorder("states")
_full: contextvars.ContextVar[bool] = contextvars.ContextVar("full_depth", default=False)


def recorded_depths() -> AbstractContextManager[list[Tensor]]:
    """Collect the number of layers of each token, [B, T] for every call of a stack; 0 for padding."""
    return _depths.collect()


def record_depths(depths: Tensor) -> None:
    """Pass the `depths` [B, T] of a call to active recordings."""
    _depths.record(depths.detach())


@contextlib.contextmanager
def full_depth(full: bool = True) -> Iterator[None]:
    """Disable early exits of tokens inside `with`."""
    token = _full.set(full)
    try:
        yield
    finally:
        _full.reset(token)


def is_full_depth() -> bool:
    """Return whether early exits are disabled."""
    return not torch.compiler.is_compiling() and _full.get()


@contextlib.contextmanager
def recorded_states() -> Iterator[list[list[Tensor]]]:
    """Collect the states [B, T, E] after every exit's layer and after the last layer (before the final norm),
    in a list for each call of a stack with exits inside `with`. Early exits are disabled there."""
    with full_depth(), _states.collect() as records:
        yield records


def state_records() -> list[list[Tensor]] | None:
    """Return the states that were recorded so far; None without a recording."""
    return _states.records


@dataclasses.dataclass(frozen=True, kw_only=True)
class DepthConfig(Config):
    """The base class of policies: `build(shape, norm)` returns the module of a stack, or None.

    `encoder`: whether an encoder can have it. `eager`: the reason why `torch.compile(fullgraph=True)` does
    not support a member; empty if it does.
    """

    option: ClassVar[str] = "model.depth"
    encoder: ClassVar[bool] = True
    eager: ClassVar[str] = ""

    def build(self, shape: Shape, norm: NormConfig | None) -> "Depth | None":
        """Return the module for a stack of this shape with this final norm (None for no final norm)."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, eq=False)
class Active:
    """The active tokens of a call: where `mask` [B, T] is True; `index` [N]: the same places in [B T].

    Active tokens of all rows are concatenated, [1, N, E], for tokenwise computations: norms, queries, output
    projections and feed-forwards. There is no padding among them, even if the rows of a batch halt at
    different layers. Keys and values are of all tokens. On the meta device, which traces only shapes, all
    tokens are active and none halts.
    """

    mask: Tensor
    index: Tensor

    @classmethod
    def from_mask(cls, mask: Tensor) -> "Active":
        """Return the places where `mask` [B, T] is True."""
        if mask.is_meta:
            return cls(mask, torch.arange(mask.numel(), device=mask.device))
        return cls(mask, mask.flatten().nonzero().squeeze(-1))

    def __len__(self) -> int:
        return len(self.index)

    def gather(self, x: Tensor) -> Tensor:
        """Return the active tokens [1, N, E] of x [B, T, E]."""
        return x.flatten(0, 1).index_select(0, self.index).unsqueeze(0)

    def scatter(self, y: Tensor, into: Tensor) -> Tensor:
        """Return `into` [B, T, E] with the active tokens y [1, N, E] in their places."""
        return into.flatten(0, 1).index_copy(0, self.index, y[0].to(into.dtype)).view(into.shape)

    def scatter_to_zeros(self, y: Tensor) -> Tensor:
        """Return the active tokens y [1, N, E] in their places of [B, T, E], with zeros elsewhere."""
        return self.scatter(y, y.new_zeros(*self.mask.shape, y.shape[-1]))

    def without(self, halted: Tensor) -> "Active":
        """Return the active tokens without the tokens where `halted` [N] is True."""
        if self.mask.is_meta:
            return self
        # `halted` is indexed like `index`, so no [B, T] table is needed.
        index = self.index[~halted]
        mask = torch.zeros_like(self.mask).flatten().index_fill(0, index, True)
        return Active(mask.view(self.mask.shape), index)


@dataclasses.dataclass(frozen=True, eq=False)
class DepthInput:
    """The inputs of a policy at the start of a call.

    x: [B, T, E], the embedding sum. pos: [T] or [B, T]. source: [B, S, E], the source of an encoder-decoder,
    with its real tokens source_valid [B, S], if available. predict: the head's predictions for hidden states
    [B, T, E], if there is a head.
    """

    x: Tensor
    pos: Tensor
    context: Context
    source: Tensor | None = None
    source_valid: Tensor | None = None
    predict: Callable[[Tensor], Tensor] | None = None

    @property
    def valid(self) -> Tensor:
        """Return which tokens are not padding, [B, T] bool."""
        valid, shape = self.context.q_valid, self.x.shape[:2]
        if valid is None:
            return torch.ones(shape, dtype=torch.bool, device=self.x.device)
        return valid.expand(shape)


class ExitLoss(Protocol):
    """The losses and predictions of the head for hidden states [B, T, E], with the labels."""

    @property
    def labels(self) -> Tensor:
        """Return the labels [B, T]."""
        ...

    @property
    def labelled(self) -> Tensor:
        """Return which tokens [B, T] have a label."""
        ...

    def loss(self, hidden: Tensor) -> Tensor:
        """Return the mean loss."""
        ...

    def tokens(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return log p of every label and the likeliest prediction, [B, T] each, without a graph."""
        ...


class Depth(nn.Module):
    """The policy of a stack.

    `trains_only_depth`: whether training leaves the rest of the model frozen. `reads_source`: whether every
    call needs the source.
    """

    trains_only_depth = False
    reads_source = False

    def init_added(self, final_norm: nn.Module) -> None:
        """Initialize a policy that is added to a trained model, so that it changes no output."""

    def start(self, inputs: DepthInput) -> "Halting":
        """Return the object that decides during a call."""
        raise NotImplementedError


class Halting:
    """The decisions of a call about the tokens that continue, layer by layer.

    `active`: the tokens that continue; None for all, so that no tokens need to be gathered. `previous`: the
    hidden states [B, T, E] of all tokens after the last layer so far, without the positions that the next
    layer adds.
    """

    def __init__(self, inputs: DepthInput):
        self.inputs = inputs
        self.previous = inputs.x
        self.active = (
            None if inputs.context.kv_valid is None else _none_if_all(Active.from_mask(inputs.valid))
        )
        self.depths = torch.zeros(inputs.x.shape[:2], dtype=torch.long, device=inputs.x.device)

    def update(self, layer: int, y: Tensor) -> Tensor:
        """Return the hidden states [B, T, E] after layer `layer`, and decide which tokens halt.

        y: the layer's output for the active tokens, [1, N, E], or [B, T, E] if all are active. Halted tokens
        keep their states.
        """
        active = self.active
        # `previous` has no positions of this layer, so a halted state does not accumulate them.
        x = y if active is None else active.scatter(y, self.previous)
        if active is None:
            active = Active.from_mask(torch.ones_like(self.depths, dtype=torch.bool))
        # Every active token has gone through one more layer.
        self.depths = self.depths + active.mask
        halted = self.select_halted(layer, x, active)
        if halted is not None:
            self.active = _none_if_all(active.without(halted))
        self.previous = x
        return x

    def select_halted(self, layer: int, x: Tensor, active: Active) -> Tensor | None:
        """Return which of the active tokens halt after this layer, [N] bool; None for none.

        x: the hidden states [B, T, E] after the layer.
        """
        raise NotImplementedError

    @property
    def all_halted(self) -> bool:
        """Return whether all tokens have halted."""
        return self.active is not None and not len(self.active)

    def output(self, x: Tensor, finish: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the stack's output from the last states x [B, T, E]. `finish`: final norm and dropout."""
        record_depths(self.depths)
        return finish(x)

    def losses(self, loss: Tensor, exit_loss: ExitLoss) -> dict[str, Tensor]:
        """Return the terms that are added to the training loss, by name; `loss` is the loss of the output."""
        return {}


def _none_if_all(active: Active) -> Active | None:
    """Return `active`, or None if all tokens are active."""
    # Without halted tokens, layers run on [B, T, E] and need no gather.
    return None if len(active) == active.mask.numel() else active


@dataclasses.dataclass(frozen=True, kw_only=True)
class FixedConfig(DepthConfig):
    """Fixed depth: every token goes through every layer."""

    kind: ClassVar[str] = "fixed"

    def build(self, shape: Shape, norm: NormConfig | None) -> None:
        """Return None."""
        return
