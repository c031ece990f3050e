"""Random states that are a function of where a run stands."""

import hashlib
import random

import numpy
import torch


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed torch, numpy and random from where the run stands.

    So the random states are a function of (seed, step, rank): nothing to save, and nothing that an evaluation
    draws changes the training after it.
    """
    digest = hashlib.blake2b(f"{seed}/{step}/{rank}".encode(), digest_size=8).digest()
    number = int.from_bytes(digest) >> 1
    torch.manual_seed(number)
    numpy.random.seed(number % 2**32)
    random.seed(number)
