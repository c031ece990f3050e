"""The image behind a sequence: its patch tokens and their places in the image."""

from typing import NamedTuple


class Image(NamedTuple):
    """`first` tokens outside the image, such as a class token, followed by height x width patches.

    The patches are in raster order. Patterns and position schemes for images read the sizes here.
    """

    first: int
    height: int
    width: int

    @property
    def length(self) -> int:
        """The number of tokens."""
        return self.first + self.height * self.width
