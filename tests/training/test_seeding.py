"""Random states are a function of seed, step and rank."""

import random

import numpy
import torch

from polyformer.training.passes import seed_step


def draws(seed: int, step: int, rank: int) -> tuple[float, float, float]:
    seed_step(seed, step, rank, torch.device("cpu"))
    return torch.rand(()).item(), float(numpy.random.rand()), random.random()


def test_the_same_place_draws_the_same() -> None:
    first = draws(3, 17, 0)
    draws(3, 18, 0)
    torch.rand(5)
    assert draws(3, 17, 0) == first


def test_every_other_place_draws_something_else() -> None:
    places = [(seed, step, rank) for seed in (0, 1, 12) for step in (1, 2, 21) for rank in (0, 1)]
    seen = [draws(*place) for place in places]
    for source in zip(*seen):
        assert len(set(source)) == len(places)
