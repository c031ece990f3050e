"""The interface of adaptive depth: policies for the number of layers that a token goes through.

After each layer a policy decides which tokens halt. A halted token leaves the computation: its state is
copied to every later layer, where the other tokens attend to keys and values from this state. This is the
same in a single pass over a text and in generation of single tokens, in an encoder and in a decoder, and a
cache has the keys of every layer.
"""

import dataclasses
from collections.abc import Callable
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from polyformer.attention.positions import Shape
from polyformer.core.config import Config
from polyformer.core.ops.norms import NormConfig
from polyformer.core.sequence.context import Context
from polyformer.nn.depth.active import Active
from polyformer.nn.depth.recording import record_depths


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
        valid, rows, length = self.context.kv_valid, self.x.shape[0], self.x.shape[1]
        if valid is None:
            return torch.ones(rows, length, dtype=torch.bool, device=self.x.device)
        # With a cache, kv_valid also covers earlier tokens; the last T columns are the tokens of this call.
        offset = self.context.offset
        return valid[:, offset : offset + length].expand(rows, length)


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
