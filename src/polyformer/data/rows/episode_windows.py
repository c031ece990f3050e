"""Batches of windows of episodes, in an order that is a function of (seed, epoch) only."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from polyformer.data.formats.episodes import Episodes
from polyformer.data.rows.batching import Batch, Position


@dataclass(frozen=True, eq=False)
class EpisodeWindows:
    """Windows of at most `context` steps, left-padded, in batches of `batch_size`.

    With shuffling, an epoch has a window from every step on, so that episodes are drawn in proportion to
    their lengths (Chen et al. 2021, their code); otherwise windows are consecutive, with each step in a
    single window. Choices among `choices` actions become one-hot vectors.
    """

    episodes: Episodes
    context: int
    batch_size: int
    seed: int = 0
    shuffle: bool = True
    choices: int = 0

    def epoch(self, epoch: int, *, position: Sequence[int] = Position()) -> Iterator[tuple[Position, Batch]]:
        """Yield `(position after it, batch)` from `position` on, see `Batches.epoch`."""
        firsts = self._firsts(epoch)
        number = Position(*position).batch
        for start in range(number * self.batch_size, len(firsts), self.batch_size):
            number += 1
            yield Position(0, number), self._batch(firsts[start : start + self.batch_size])

    def _firsts(self, epoch: int) -> np.ndarray:
        """Return the first step of every window."""
        starts = self.episodes.starts
        if self.shuffle:
            return np.random.default_rng([self.seed, epoch]).permutation(starts[-1])
        return np.concatenate([np.arange(start, end, self.context) for start, end in pairwise(starts)])

    def _batch(self, firsts: np.ndarray) -> Batch:
        """Return the input of a `TrajectoryTransformer` [B, context, ...], and the actions as labels."""
        own, starts = self.episodes, self.episodes.starts
        episode = np.searchsorted(starts, firsts, "right") - 1
        ends = np.minimum(firsts + self.context, starts[episode + 1])
        steps = ends[:, None] - self.context + np.arange(self.context)
        real = steps >= firsts[:, None]
        steps = np.where(real, steps, firsts[:, None])
        labels = actions = own.actions[steps]
        if self.choices:
            actions = np.eye(self.choices, dtype=np.float32)[actions]
        arrays = {
            "states": own.observations[steps] * real[..., None],
            "actions": actions * real[..., None],
            "returns_to_go": (own.returns[steps] * real)[..., None],
            "timesteps": (steps - starts[episode][:, None]) * real,
            "attention_mask": real.astype(np.int64),
            "labels": labels,
        }
        return {
            name: torch.from_numpy(array.astype(np.float32) if array.dtype.kind == "f" else array)
            for name, array in arrays.items()
        }
