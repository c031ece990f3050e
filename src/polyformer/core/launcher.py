"""What a launcher (torchrun, accelerate) says of this process, known before processes meet."""

import os


def rank() -> int:
    """The number of this process; 0 where nobody launched several."""
    return int(os.environ.get("RANK", "0"))


def world() -> int:
    """How many processes were launched; 1 where nobody launched several."""
    return int(os.environ.get("WORLD_SIZE", "1"))
