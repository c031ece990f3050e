"""Random views of training images: flips, shifts, rotations and resized crops as a single affine map.

Each image has a separate generator for (seed, epoch, row), so that a resumed run reads bitwise identical
images. A view is a matrix from the coordinates of the new image to those in the old image, (x, y) from -1 to
1. The images of a batch are sampled together, bilinearly. Areas outside the old image repeat its border.
"""

import dataclasses
import math
from typing import Annotated

import numpy as np
from annotated_types import Interval
from torch import Tensor
from torch.nn import functional as F

from polyformer.core.config import Config
from polyformer.core.ranges import PositiveShare, UnitFloat

TRIES = 10  # attempts to draw a crop before the whole image is used
ASPECT = 3 / 4, 4 / 3  # width over height of a crop, relative to the image's


@dataclasses.dataclass(frozen=True, kw_only=True)
class AugmentationConfig(Config):
    """Random changes of training images; none by default.

    flip: probability of a horizontal flip; unsuitable for digits and letters. shift: the most pixels in each
    direction, equivalent to cropping a padded image (He et al. 2016, section 4.2). rotation: the most degrees
    in either direction. crop: the least share of the area in a crop, which is scaled to the image's size
    (Szegedy et al. 2015, section 6); 1: no crop.
    """

    flip: UnitFloat = 0.0
    shift: Annotated[int, Interval(ge=0, le=1024)] = 0
    rotation: Annotated[float, Interval(ge=0, le=180)] = 0.0
    crop: PositiveShare = 1.0

    @property
    def changes(self) -> bool:
        """Return whether any change is enabled."""
        return self != AugmentationConfig()

    def view(self, size: tuple[int, int], generator: np.random.Generator) -> np.ndarray:
        """Draw a view, float32 [2, 3], of images of `size` (height, width)."""
        height, width = size
        view = np.eye(3)
        if self.crop < 1:
            view = view @ crop_view(self.crop, size, generator)
        if self.rotation:
            view = view @ rotation_view(generator.uniform(-self.rotation, self.rotation), size)
        if self.shift:
            down, right = generator.integers(-self.shift, self.shift + 1, 2)
            view = view @ np.array([[1, 0, -2 * right / width], [0, 1, -2 * down / height], [0, 0, 1]])
        if self.flip and generator.random() < self.flip:
            view = view @ np.diag([-1, 1, 1])
        return view[:2].astype(np.float32)


def rotation_view(degrees: float, size: tuple[int, int]) -> np.ndarray:
    """Return the view [3, 3] that rotates images of `size` counterclockwise around their centre."""
    height, width = size
    cosine, sine = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return np.array([[cosine, -sine * height / width, 0], [sine * width / height, cosine, 0], [0, 0, 1]])


def crop_view(least: float, size: tuple[int, int], generator: np.random.Generator) -> np.ndarray:
    """Draw the view [3, 3] of a crop with `least` to 1 of the area, in whole pixels of `size`.

    Returns the view of the whole image if no attempt fits.
    """
    height, width = size
    for _ in range(TRIES):
        area = generator.uniform(least, 1)
        aspect = math.exp(generator.uniform(math.log(ASPECT[0]), math.log(ASPECT[1])))
        high, wide = round(height * math.sqrt(area / aspect)), round(width * math.sqrt(area * aspect))
        if 0 < high <= height and 0 < wide <= width:
            top, left = generator.integers(0, height - high + 1), generator.integers(0, width - wide + 1)
            return box_view((int(top), int(left), high, wide), size)
    return np.eye(3)


def box_view(box: tuple[int, int, int, int], size: tuple[int, int]) -> np.ndarray:
    """Return the view [3, 3] of a box (top, left, height, width) of images of `size`."""
    (top, left, high, wide), (height, width) = box, size
    across, down = (2 * left + wide) / width - 1, (2 * top + high) / height - 1
    return np.array([[wide / width, 0, across], [0, high / height, down], [0, 0, 1]])


def viewed(images: Tensor, views: Tensor) -> Tensor:
    """Return images [B, C, H, W] as seen through `views` [B, 2, 3]."""
    grid = F.affine_grid(views, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, padding_mode="border", align_corners=False)
