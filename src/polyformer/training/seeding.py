"""Random states that are a function of where a run stands."""

import hashlib
import random

import numpy
import torch


def seed_step(seed: int, step: int, rank: int, device: torch.device) -> None:
    """Seed torch (on the CPU and `device`), numpy and random from where the run stands.

    So the random states are a function of (seed, step, rank): nothing to save, and nothing that an evaluation
    draws changes the training after it.
    """
    digest = hashlib.blake2b(f"{seed}/{step}/{rank}".encode(), digest_size=8).digest()
    number = int.from_bytes(digest) >> 1
    # torch.manual_seed asks every kind of device there could be, at half a millisecond a step.
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.manual_seed(number)
    numpy.random.seed(number % 2**32)
    random.seed(number)
