"""The exits of one stack, and what happens at them during a call."""

import copy
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from polyformer.core.errors import InputError
from polyformer.depth.active import Active
from polyformer.depth.base import Call, Depth, Halting, Judge
from polyformer.depth.exits.base import Candidates, Course, ExitRule
from polyformer.depth.recording import is_whole
from polyformer.ops.linear import Linear
from polyformer.ops.norms import NormConfig


class Exit(nn.Module):
    """h [..., E] -> what the head reads: norm(h), or norm(h + A h)."""

    def __init__(self, hidden_size: int, norm: NormConfig | None, linear: bool):
        super().__init__()
        self.map = Linear(hidden_size, hidden_size) if linear else None
        self.norm = nn.Identity() if norm is None else norm.build(hidden_size)

    def forward(self, h: Tensor) -> Tensor:
        """Of the shape of h."""
        return self.norm(h if self.map is None else h + self.map(h))


class Exits(Depth):
    """The exits after `layers`, of which the last is the end of the stack and has no module of its own."""

    def __init__(
        self,
        hidden_size: int,
        layers: Sequence[int],
        norm: NormConfig | None,
        rule: ExitRule,
        linear: bool = False,
    ):
        super().__init__()
        self.layers, self.rule = list(layers), rule
        self.exits = nn.ModuleList(Exit(hidden_size, norm, linear) for _ in self.layers[:-1])
        self.thresholds: Sequence[float] = [1.0] * len(self.exits)
        self.decay: tuple[float, int] | None = None
        self.mixed, self.by_layer, self.rule_loss = False, True, 1.0
        self.reads_source = rule.reads_source

    def added(self, final_norm: nn.Module) -> None:
        """Begin where the end of the model is: the exits of a model that was trained without."""
        with torch.no_grad():
            for exit in self.exits:
                assert isinstance(exit, Exit)
                exit.norm = copy.deepcopy(final_norm)
                if exit.map is not None:
                    exit.map.weight.zero_()

    def begin(self, call: Call) -> "Exiting":
        """All tokens at the bottom."""
        return Exiting(self, call)

    def threshold(self, number: int, pos: Tensor) -> Tensor:
        """lambda'(t) of exit `number` at the positions [...], of their shape."""
        start = torch.full(pos.shape, self.thresholds[number], device=pos.device)
        if self.decay is None:
            return start
        decay, length = self.decay
        return (0.9 * start + 0.1 * torch.exp(-decay * pos / length)).clamp(0, 1)

    def weight(self, number: int) -> float:
        """Of the loss at way out `number`; all add up to 1."""
        own = self.layers if self.by_layer else [1] * len(self.layers)
        return own[number] / sum(own)


class Exiting(Halting):
    """One call: who left where, and with what."""

    def __init__(self, exits: Exits, call: Call):
        super().__init__(call)
        self.exits, self.before = exits, call.x
        self.left: Tensor | None = None  # [B, T] bool
        self.hidden = call.x  # [B, T, E], what the head reads of those who left
        self.kept: Tensor | None = None
        if call.source is not None:
            self.kept = exits.rule.read(call.source, call.source_valid)
        self.aligned = exits.training and not exits.mixed
        self.states: list[Tensor] = []
        self.planned: Tensor | None = None
        if exits.training and exits.mixed:
            self.planned = torch.randint(len(exits.layers), call.x.shape[:2], device=call.x.device)

    def halted(self, layer: int, x: Tensor, active: Active) -> Tensor | None:
        """Those who leave after this layer; none at the end, which all reach who are still there."""
        before, self.before = self.before, x
        if not layer and self.kept is None:
            self.kept = self.exits.rule.first(x)
        if layer + 1 not in self.exits.layers:
            return None
        number = self.exits.layers.index(layer + 1)
        if self.aligned:
            self.states.append(x)
            return None
        if number == len(self.exits.exits) or (is_whole() and self.planned is None):
            return None
        state = active.gathered(x)
        hidden = self.exits.exits[number](state)
        leaves = self._leaves(number, active, state, active.gathered(before), hidden)
        if bool(leaves.any()):
            out = Active(active.mask, active.index[leaves])
            self.hidden = out.scattered(hidden[:, leaves], self.hidden)
            left = torch.zeros_like(active.mask) if self.left is None else self.left
            self.left = left.flatten().index_fill(0, out.index, True).view(left.shape)
        return leaves

    def _leaves(self, number: int, active: Active, state: Tensor, before: Tensor, hidden: Tensor) -> Tensor:
        """Which of the active tokens leave at exit `number`, [N] bool."""
        if self.planned is not None:
            return self.planned.flatten()[active.index] == number
        rows, length = self.depths.shape
        kept = None
        if self.kept is not None:
            kept = self.kept if self.kept.dim() == 3 else self.kept.unsqueeze(1).expand(-1, length, -1)
            kept = kept.flatten(0, 1)[active.index]
        candidates = Candidates(number, state, before, hidden, self.call.predict, kept)
        pos = self.call.pos.expand(rows, length).flatten()[active.index]
        return self.exits.rule.confidence(candidates) >= self.exits.threshold(number, pos)

    def output(self, x: Tensor, finished: Callable[[Tensor], Tensor]) -> Tensor:
        """Of each token what its way out makes of its state."""
        y = super().output(x, finished)
        self.end = y
        return y if self.left is None else torch.where(self.left.unsqueeze(-1), self.hidden.to(y.dtype), y)

    def losses(self, loss: Tensor, judge: Judge) -> dict[str, Tensor]:
        """Where training is aligned: what the other exits add to the loss of the end, and the rule's own."""
        if not self.aligned or not self.exits.exits:
            return {}
        hidden = [exit(state) for exit, state in zip(self.exits.exits, self.states)]
        mean = self.exits.weight(len(hidden)) * loss
        for number, seen in enumerate(hidden):
            mean = mean + self.exits.weight(number) * judge.loss(seen)
        kept = self.kept if self.kept is None or self.kept.dim() == 3 else self.kept.unsqueeze(1)
        course = Course(self.states, [*hidden, self.end], judge, kept)
        terms = {"exits": mean - loss}
        rule = self.exits.rule.loss(course)
        if rule is not None:
            terms["exit_rule"] = self.exits.rule_loss * rule
        return terms


def set_threshold(model: nn.Module, threshold: float | Sequence[float]) -> None:
    """Every stack of `model` with exits from now on of this threshold, or of one for each exit.

    Raises `InputError` where there are no exits, or another number of them.
    """
    stacks = [module for module in model.modules() if isinstance(module, Exits)]
    if not stacks:
        raise InputError("threshold: this model has no exits; add some by `polyformer convert --depth exits`")
    for exits in stacks:
        count = len(exits.exits)
        values = [threshold] * count if isinstance(threshold, (int, float)) else list(threshold)
        if len(values) != count or not all(0.0 <= value <= 1.0 and math.isfinite(value) for value in values):
            raise InputError(
                f"threshold: expected a confidence from 0 to 1, or one for each of the {count} exits, "
                f"got {threshold}"
            )
        exits.thresholds = values
