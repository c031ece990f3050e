"""Random directions: rows of N(0, I), independent or orthogonal, drawn without changing global random states.

Performer and random feature attention project queries and keys on them, LSH attention hashes keys with them.
Choromanski et al. 2021, section 2.4 (orthogonal rows in blocks).
"""

import torch
from torch import Tensor, nn


def directions(count: int, width: int, orthogonal: bool, generator: torch.Generator) -> Tensor:
    """Return W [count, width] in float64: rows of N(0, I), or orthogonal in blocks of `width` rows.

    Orthogonal rows have the lengths of independent rows, so that each single row is still distributed as N(0,
    I).
    """
    options = {"generator": generator, "dtype": torch.float64, "device": "cpu"}
    rows = torch.randn(count, width, **options)
    if not orthogonal:
        return rows
    q, r = torch.linalg.qr(torch.randn(-(-count // width), width, width, **options))
    rotations = q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)  # uniform, the same for every LAPACK
    return rotations.mT.flatten(0, 1)[:count] * rows.norm(dim=1, keepdim=True)


class RandomDirections(nn.Module):
    """W [count, width], drawn again every `redraw_every` training steps, or never if that is None.

    The whole state is a buffer of two integers, the seed and the steps so far: a checkpoint reproduces it,
    and no change of precision rounds it. The seed is drawn from torch's generator, like initial weights; the
    directions come from a separate generator. A step is counted in its backward pass, so that recomputed
    activations are the same. Evaluation never draws again.
    """

    origin: Tensor

    def __init__(self, count: int, width: int, orthogonal: bool = True, redraw_every: int | None = None):
        super().__init__()
        self.count, self.width, self.orthogonal, self.redraw_every = count, width, orthogonal, redraw_every
        seed = int(torch.randint(2**62, (), device="cpu"))
        self.register_buffer("origin", torch.tensor([seed, 0]))
        self._numbers: tuple[tuple[int, int] | None, int, int] | None = None
        self._drawn: tuple[object, Tensor] | None = None

    def forward(self, like: Tensor) -> Tensor:
        """Return W [count, width] of the current draw, in the dtype and on the device of `like`."""
        if self.origin.is_meta:  # tracing needs only shapes
            return like.new_empty(self.count, self.width)
        seed, steps = self._read()
        draw = steps // self.redraw_every if self.redraw_every else 0
        key = seed, draw, like.dtype, like.device
        if self._drawn is None or self._drawn[0] != key:
            generator = torch.Generator("cpu").manual_seed((seed + 0x9E3779B97F4A7C15 * draw) % 2**63)
            drawn = directions(self.count, self.width, self.orthogonal, generator)
            self._drawn = key, drawn.to(like.device, like.dtype)
        return self._drawn[1]

    def watch(self, output: Tensor) -> None:
        """Count a training step when the gradient of `output` arrives."""
        if self.training and self.redraw_every and output.requires_grad:
            output.register_hook(self._count)

    def _count(self, grad: Tensor) -> None:
        numbers, version = self._numbers, self._version()
        self.origin[1] += 1
        if (
            numbers is not None and version is not None and numbers[0] == version
        ):  # so that an accelerator need not be read
            self._numbers = self._version(), numbers[1], numbers[2] + 1

    def _version(self) -> tuple[int, int] | None:
        """Return a value that changes with the numbers of the buffer; None in inference mode."""
        return None if self.origin.is_inference() else (id(self.origin), self.origin._version)

    def _read(self) -> tuple[int, int]:
        """Return seed and steps; an accelerator is read only after another module has changed them."""
        version = self._version()
        if version is None or self._numbers is None or self._numbers[0] != version:
            seed, steps = self.origin.tolist()
            self._numbers = version, seed, steps
        return self._numbers[1], self._numbers[2]
