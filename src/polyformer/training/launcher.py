"""The settings of a launcher (torchrun, accelerate) for this process, known before processes connect."""

import os


def rank() -> int:
    """Return the number of this process; 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def world() -> int:
    """Return the number of launched processes; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))
