"""Acting as recorded: predict each action of an episode from the return that followed, and what was before.

Windows of `context` steps; returns are not discounted; mean squared error of vectors, cross-entropy of
choices. Chen et al. 2021 (Decision Transformer), section 3.

Deviation: returns are divided by the largest of the training data, where the paper has a number for each
environment.
"""

import dataclasses
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyformer.core.errors import InputError
from polyformer.data.batching import Batch, Row
from polyformer.data.episodes import ROLES, Episodes
from polyformer.data.windows import Windows
from polyformer.model import TrajectoryConfig
from polyformer.model.trajectory import squared_error
from polyformer.tasks.base import HeldOut, Rows, TaskConfig, TextTask
from polyformer.training.config import at_least

Numbers = tuple[float, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActingConfig(TaskConfig):
    """Predict the actions of recorded episodes. What is None is as the training episodes have it."""

    context: int = 20  # steps that are read at once, of three tokens each
    discrete: bool | None = None  # an action is a choice, not a vector
    usual_action: Numbers | None = None  # the mean vector, or the share of each choice
    bounded: bool | None = None  # all actions are between -1 and 1
    state_mean: Numbers | None = None
    state_std: Numbers | None = None
    return_scale: float | None = None  # what returns are divided by

    needs: ClassVar[tuple[str, ...]] = ROLES
    tokenized: ClassVar[bool] = False
    kind: ClassVar[str] = "act"
    paper: ClassVar[str] = "Chen et al. 2021 (Decision Transformer)"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, context=self.context)

    def resolve(self, rows: Rows) -> Self:
        if not hasattr(rows, "__len__"):
            raise InputError("data.streaming: episodes are held in memory; set it to false")
        found = Episodes.of(rows)
        if found.discrete and found.actions.min() < 0:
            raise InputError(f"actions: a choice is a number from 0 on, got {found.actions.min()}")
        if found.discrete:
            usual = np.bincount(found.actions) / len(found.actions)
        else:
            usual = found.actions.mean(0, dtype=np.float64)
        observations = found.observations.astype(np.float64)
        told = {
            "discrete": found.discrete,
            "usual_action": tuple(usual.tolist()),
            "bounded": not found.discrete and bool(np.abs(found.actions).max() <= 1),
            "state_mean": tuple(observations.mean(0).tolist()),
            "state_std": tuple((observations.std(0) + 1e-6).tolist()),  # as the paper's code
            "return_scale": float(np.abs(found.returns).max()) or 1.0,
        }
        return dataclasses.replace(
            self, **{name: value for name, value in told.items() if getattr(self, name) is None}
        )

    def build(self, tokenizer: Any = None) -> "Acting":
        return Acting(self)


class Acting(TextTask):
    """Metrics over every step of the held-out episodes:

    loss, baseline_loss          mean squared error of vectors, or nats of choices; that of the usual action
    accuracy, baseline_accuracy  of choices: the share that is guessed right
    """

    sums = 5

    def __init__(self, config: ActingConfig):
        if config.usual_action is None or config.state_mean is None or config.state_std is None:
            raise InputError("state_mean: not known before the training episodes are; call resolve(rows)")
        self.config, self.notes = config, []
        self.batch_tokens = config.batch_tokens
        self.usual = torch.tensor(config.usual_action, dtype=torch.float64)
        self.room: int | None = None  # of the model's table of timesteps

    def adapt(self, config: Any) -> Any:
        if not isinstance(config, TrajectoryConfig):
            raise InputError("model: this task needs a model of trajectories, such as the preset dt-gym")
        own = self.config
        assert own.usual_action is not None
        assert own.state_mean is not None
        bounded = config.head.bounded and bool(own.bounded)
        head = dataclasses.replace(
            config.head,
            state_size=len(own.state_mean),
            action_size=len(own.usual_action),
            bounded=bounded,
        )
        self.room = config.max_timesteps
        return dataclasses.replace(config, head=head)

    def prepare(self, rows: Any) -> list[Row]:
        raise NotImplementedError("episodes are served as windows: see `served`")

    def served(self, rows: Any, seed: int) -> Windows:
        return self._windows(rows, seed, shuffle=True)

    def held_out(self, rows: Rows) -> HeldOut:
        return HeldOut(self._windows(rows, 0, shuffle=False), {})

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return self._loss(self._actions(model, batch), batch)

    def weight(self, batch: Batch) -> int:
        """Real steps."""
        return int(batch["attention_mask"].sum())

    def totals(self, model: nn.Module, batch: Batch) -> Tensor:
        found, real = self._actions(model, batch).double(), batch["attention_mask"].bool()
        usual, steps = self.usual.to(found.device), real.sum().double()
        # a choice that training never had costs the baseline a lot, not everything
        usual = (usual.clamp_min(1e-6).log() if self.config.discrete else usual).expand_as(found)
        losses = [self._loss(one, batch) * steps for one in (found, usual)]
        right = [self._right(one, batch)[real].sum().double() for one in (found, usual)]
        return torch.stack([*losses, *right, steps])

    def metrics(self, totals: list[float], counts: dict[str, float]) -> dict[str, float]:
        *sums, steps = totals
        names = ("loss", "baseline_loss", "accuracy", "baseline_accuracy")[: 4 if self.config.discrete else 2]
        return {name: total / max(steps, 1) for name, total in zip(names, sums)}

    def _actions(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(**{name: one for name, one in batch.items() if name != "labels"}).actions

    def _loss(self, found: Tensor, batch: Batch) -> Tensor:
        real = batch["attention_mask"].bool()
        if self.config.discrete:
            return F.cross_entropy(found[real], batch["labels"][real])
        return squared_error(found, batch["labels"].to(found.dtype), real)

    def _right(self, found: Tensor, batch: Batch) -> Tensor:
        """Where the likeliest choice [B, T] was taken; nowhere for vectors."""
        real = batch["attention_mask"].bool()
        return found.argmax(-1) == batch["labels"] if self.config.discrete else torch.zeros_like(real)

    def _windows(self, rows: Any, seed: int, shuffle: bool) -> Windows:
        own, found = self.config, Episodes.of(rows)
        self._check(found)
        mean, deviation = (np.array(one, np.float32) for one in (own.state_mean, own.state_std))
        scaled = dataclasses.replace(
            found,
            observations=(found.observations - mean) / deviation,
            returns=found.returns / np.array(own.return_scale, np.float32),
        )
        size, choices = max(1, self.batch_tokens // (3 * own.context)), len(self.usual)
        return Windows(scaled, own.context, size, seed, shuffle, choices if own.discrete else 0)

    def _check(self, found: Episodes) -> None:
        """Raises `InputError` for episodes that are not as those of the training, or too long."""
        own = self.config
        assert own.state_mean is not None
        if found.observations.shape[1] != len(own.state_mean):
            raise InputError(
                f"observations: expected {len(own.state_mean)} numbers a step, as the training episodes "
                f"have, got {found.observations.shape[1]}"
            )
        size = 1 if found.discrete else found.actions.shape[1]
        if found.discrete != own.discrete or size != (1 if own.discrete else len(self.usual)):
            raise InputError("actions: expected them as the training episodes have them, choices or vectors")
        if found.discrete and not 0 <= found.actions.min() <= found.actions.max() < len(self.usual):
            raise InputError(
                f"actions: expected choices from 0 to {len(self.usual) - 1}, as the training episodes have, "
                f"got {found.actions.min()} to {found.actions.max()}"
            )
        if self.room is not None and found.longest > self.room:
            raise InputError(
                f"max_timesteps: an episode has {found.longest} steps, and the model's table {self.room}; "
                f"set --model.max_timesteps {found.longest}, or cut the episode"
            )
