"""How many layers a token goes through: the seam of adaptive depth.

After each layer a policy says which tokens halt. A halted token leaves the computation: its state is copied
to every later layer, where the others attend to keys and values made of it. So it is in one pass over a
text and in writing token by token, in an encoder and in a decoder, and a cache holds every layer's keys.
"""

import dataclasses
from collections.abc import Callable
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from polyformer.core.config import Config
from polyformer.depth.active import Active
from polyformer.depth.recording import record_depths
from polyformer.ops.norms import NormConfig
from polyformer.position import Shape
from polyformer.sequence.context import Context


@dataclasses.dataclass(frozen=True, kw_only=True)
class DepthConfig(Config):
    """Family of policies: `build(shape, norm)` makes the module of a stack, None where all tokens go
    through all layers.

    `encoder`: whether an encoder can have it. `eager`: the reason why `torch.compile(fullgraph=True)` cannot
    take a member, empty where it can.
    """

    encoder: ClassVar[bool] = True
    eager: ClassVar[str] = ""

    def build(self, shape: Shape, norm: NormConfig | None) -> "Depth | None":
        """The module, for a stack of this shape that ends in such a norm; None where it ends in none."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """What a policy may look at when a call begins.

    x: [B, T, E], the embedding sum. pos: [T] or [B, T]. source: [B, S, E], what an encoder-decoder reads
    from, whose real tokens are source_valid [B, S], where it is at hand. predict: the head's predictions of
    hidden states [B, T, E], where there is one.
    """

    x: Tensor
    pos: Tensor
    context: Context
    source: Tensor | None = None
    source_valid: Tensor | None = None
    predict: Callable[[Tensor], Tensor] | None = None

    @property
    def real(self) -> Tensor:
        """[B, T] bool: the tokens that are no padding."""
        valid, rows, length = self.context.kv_valid, self.x.shape[0], self.x.shape[1]
        if valid is None:
            return torch.ones(rows, length, dtype=torch.bool, device=self.x.device)
        offset = self.context.offset
        return valid[:, offset : offset + length].expand(rows, length)


class Judge(Protocol):
    """What the head says of hidden states [B, T, E] beside the labels."""

    @property
    def labels(self) -> Tensor:
        """[B, T]."""
        ...

    @property
    def labelled(self) -> Tensor:
        """Which tokens [B, T] have a label."""
        ...

    def loss(self, hidden: Tensor) -> Tensor:
        """The mean loss."""
        ...

    def tokens(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The log-likelihood of every label and the likeliest prediction, [B, T] each, without a graph."""
        ...


class Depth(nn.Module):
    """The policy of one stack. `alone`: whether of a model only its depth is trained. `reads_source`:
    whether every call needs the source."""

    alone = False
    reads_source = False

    def added(self, final_norm: nn.Module) -> None:
        """Begin as what changes nothing: the depth of a model that was trained without."""

    def begin(self, call: Call) -> "Halting":
        """What decides during one call."""
        raise NotImplementedError


class Halting:
    """Which tokens of a call go on, layer by layer.

    `active`: those that do; None for all, so that nothing need be gathered.
    """

    def __init__(self, call: Call):
        self.call = call
        self.active = None if call.context.kv_valid is None else _fewer(Active.of(call.real))
        self.depths = torch.zeros(call.x.shape[:2], dtype=torch.long, device=call.x.device)

    def after(self, layer: int, x: Tensor) -> None:
        """Decide, after layer `layer` has run for the active tokens, whose states in x [B, T, E] are new."""
        active = self.active
        if active is None:
            active = Active.of(torch.ones_like(self.depths, dtype=torch.bool))
        self.depths = self.depths + active.mask
        halted = self.halted(layer, x, active)
        if halted is not None:
            self.active = _fewer(active.without(halted))

    def halted(self, layer: int, x: Tensor, active: Active) -> Tensor | None:
        """Which of the active tokens halt after this layer, [N] bool; None for none."""
        raise NotImplementedError

    @property
    def over(self) -> bool:
        """Whether no token goes on."""
        return self.active is not None and not len(self.active)

    def output(self, x: Tensor, finished: Callable[[Tensor], Tensor]) -> Tensor:
        """The stack's output, of the last states x [B, T, E]; `finished`: its final norm and dropout."""
        record_depths(self.depths)
        return finished(x)

    def losses(self, loss: Tensor, judge: Judge) -> dict[str, Tensor]:
        """What is added to the training loss, by name, where that of the output is `loss`."""
        return {}


def _fewer(active: Active) -> Active | None:
    """None for all of them."""
    return None if len(active) == active.mask.numel() else active
