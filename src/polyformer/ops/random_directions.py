"""Random directions: rows of N(0, I), independent or orthogonal, drawn without touching global random states.

Performer and random feature attention project queries and keys on them, LSH attention hashes keys by them.
Choromanski et al. 2021, section 2.4 (orthogonal rows in blocks).
"""

import torch
from torch import Tensor, nn


def directions(count: int, width: int, orthogonal: bool, generator: torch.Generator) -> Tensor:
    """W [count, width] in float64: rows of N(0, I), or such that blocks of `width` rows are orthogonal.

    Orthogonal rows have the lengths of independent ones, so that each row alone is still of N(0, I).
    """
    options = {"generator": generator, "dtype": torch.float64, "device": "cpu"}
    rows = torch.randn(count, width, **options)
    if not orthogonal:
        return rows
    q, r = torch.linalg.qr(torch.randn(-(-count // width), width, width, **options))
    rotations = q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)  # uniform, the same in every LAPACK
    return rotations.mT.flatten(0, 1)[:count] * rows.norm(dim=1, keepdim=True)


class RandomDirections(nn.Module):
    """W [count, width], drawn again every `redraw_every` training steps, never where that is None.

    Its whole state is a buffer of two integers, the seed and the steps so far: a file repeats it, and no
    change of precision rounds it. The seed is drawn from torch's generator, as initial weights are; the rest
    comes from a generator of its own. A step is counted by its backward pass, so that recomputed activations
    are the same. Evaluation never draws anew.
    """

    origin: Tensor

    def __init__(self, count: int, width: int, orthogonal: bool = True, redraw_every: int | None = None):
        super().__init__()
        self.count, self.width, self.orthogonal, self.redraw_every = count, width, orthogonal, redraw_every
        seed = int(torch.randint(2**62, (), device="cpu"))
        self.register_buffer("origin", torch.tensor([seed, 0]))
        self._numbers: tuple[object, int, int] | None = None
        self._drawn: tuple[object, Tensor] | None = None

    def forward(self, like: Tensor) -> Tensor:
        """W [count, width] of the present draw, in the precision of `like` and where it is."""
        seed, steps = self._read()
        draw = steps // self.redraw_every if self.redraw_every else 0
        key = seed, draw, like.dtype, like.device
        if self._drawn is None or self._drawn[0] != key:
            generator = torch.Generator("cpu").manual_seed((seed + 0x9E3779B97F4A7C15 * draw) % 2**63)
            drawn = directions(self.count, self.width, self.orthogonal, generator)
            self._drawn = key, drawn.to(like.device, like.dtype)
        return self._drawn[1]

    def watch(self, output: Tensor) -> None:
        """Counts a training step when the gradient of `output` comes."""
        if self.training and self.redraw_every and output.requires_grad:
            output.register_hook(self._count)

    def _count(self, grad: Tensor) -> None:
        self.origin[1] += 1

    def _read(self) -> tuple[int, int]:
        """Seed and steps; an accelerator is asked only after they have changed."""
        version = None if self.origin.is_inference() else (id(self.origin), self.origin._version)
        if version is None or self._numbers is None or self._numbers[0] != version:
            seed, steps = self.origin.tolist()
            self._numbers = version, seed, steps
        return self._numbers[1], self._numbers[2]
