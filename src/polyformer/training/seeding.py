"""Random states as a function of the position in a run."""

import hashlib
import random

import numpy
import torch


def seed_step(seed: int, step: int, rank: int, device: torch.device) -> None:
    """Seed torch (on the CPU and `device`), numpy and random from the position in the run.

    The random states are therefore a function of (seed, step, rank): they need not be saved, and random
    numbers drawn in an evaluation do not change the training after it.
    """
    digest = hashlib.blake2b(f"{seed}/{step}/{rank}".encode(), digest_size=8).digest()
    number = int.from_bytes(digest) >> 1
    # torch.manual_seed also seeds every other device type, which takes half a millisecond per step.
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.manual_seed(number)
    numpy.random.seed(number % 2**32)
    random.seed(number)
