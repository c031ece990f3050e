"""SPALM's head with the distances of the neighbours in its scores; a recipe imports this module.

    m_t = sum_i softmax_i(w_i . h_t - s d_i) w_i        s = exp(a), a trained

d_i is the squared distance of neighbour i, divided by the mean of the training text's neighbours. A model
takes no argument for distances, so `add_distances` appends them to the tokens of the neighbours, as integers:
`neighbour_ids` [B, T, 2 k] has k tokens, then round(50 d), at most V - 1.
"""

import dataclasses
import math
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from polyformer.applications.retrieval.neighbours import without
from polyformer.applications.retrieval.search import squared_distances
from polyformer.core.files import write_json
from polyformer.core.ranges import PositiveFloat
from polyformer.data.rows.neighbours import ABOUT, ROWS, NeighbourInfo
from polyformer.nn.heads import HeadInput, HeadShape, SemiparametricConfig
from polyformer.nn.heads.vocabulary import SemiparametricHead
from polyformer_lab.measures.spalm import RecordingStore

STEPS = 50
"""Integers per mean distance."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistanceHeadConfig(SemiparametricConfig):
    """SPALM's head for neighbours with distances.

    `scale` is s before training, None to ignore the distances. `factor` multiplies m_t: sqrt(E) gives token
    vectors the length that they have at the input of a decoder.
    """

    scale: PositiveFloat | None = None
    factor: PositiveFloat = 1.0

    kind: ClassVar[str] = "semiparametric_distances"

    def build(self, shape: HeadShape) -> "DistanceHead":
        """Return the head."""
        return DistanceHead(shape, self)


class DistanceHead(SemiparametricHead):
    """A head that divides tokens and distances, and subtracts the distances from the scores."""

    def __init__(self, shape: HeadShape, config: DistanceHeadConfig):
        super().__init__(shape, config)
        self.factor = config.factor
        self.log_scale = (
            None if config.scale is None else nn.Parameter(torch.tensor([math.log(config.scale)]))
        )

    def states(self, inputs: HeadInput, bias: Tensor | None = None) -> Tensor:
        """Return z [B, T, E] for `neighbour_ids` of 2 k integers per token."""
        if inputs.neighbour_ids is None:
            return super().states(inputs, bias)
        tokens, steps = inputs.neighbour_ids.chunk(2, -1)
        if self.log_scale is not None:
            bias = -self.log_scale.exp() * steps / STEPS
        return super().states(dataclasses.replace(inputs, neighbour_ids=tokens), bias, self.factor)


def add_distances(
    near: Path, about: NeighbourInfo, store: RecordingStore, vocab_size: int, mean: float | None
) -> float:
    """Append distances to the neighbours in `near`, for which `store` has answered all queries.

    mean: the distance by which all are divided; None for the mean of these distances. Returns it.
    """
    queries, rows = (torch.cat(parts) for parts in zip(*store.answers))
    if about.own:
        rows = without(rows, torch.arange(len(rows)))
    distances = squared_distances(queries, store.keys, rows)
    mean = mean or float(distances.mean())
    tokens = np.fromfile(near / ROWS, np.int32).reshape(-1, about.neighbours)
    steps = np.full_like(tokens, -1)
    steps[: len(rows)] = (distances / mean * STEPS).round().clamp(max=vocab_size - 1).numpy()
    (near / ROWS).write_bytes(np.hstack([tokens, steps]).tobytes())
    write_json(near / ABOUT, dataclasses.replace(about, neighbours=2 * about.neighbours).to_dict())
    return mean
