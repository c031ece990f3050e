"""Grey images as rows {image, height, width}: an IDX file (MNIST's format), or scikit-learn's digits.

`image` is 8-bit grey, a byte a pixel in raster order, 0 for black. `quantised` makes few levels of it, which
are the tokens of an image model.
"""

import importlib
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from polyformer.core.errors import InputError
from polyformer.data.opening import opened_bytes

Row = dict[str, Any]

IMAGE = "image"  # the column of a row's pixels
GREYS = 256
_BYTES_OF_3 = 0x00000803  # the magic number: unsigned bytes, three axes
_HEAD = struct.Struct(">IIII")  # magic number, images, height, width; LeCun et al. 1998, the MNIST database


def read_idx(path: Path, header: object = None) -> Iterator[Row]:
    """{image, height, width}: the images of an IDX file, plain or gzipped."""
    with opened_bytes(path) as file:
        head = file.read(_HEAD.size)
        if len(head) < _HEAD.size:
            raise InputError(f"{path}: truncated: {len(head)} bytes, expected a head of {_HEAD.size}")
        magic, images, height, width = _HEAD.unpack(head)
        if magic != _BYTES_OF_3:
            raise InputError(
                f"{path}: not an IDX file of images: "
                f"it begins with {magic:#010x}, expected {_BYTES_OF_3:#010x}"
            )
        if not height or not width:
            raise InputError(f"{path}: expected images of 1 pixel or more, got {height} x {width}")
        for number in range(images):
            pixels = file.read(height * width)
            if len(pixels) < height * width:
                raise InputError(
                    f"{path}: truncated: it ends in image {number + 1} of {images}; fetch it again"
                )
            yield {IMAGE: pixels, "height": height, "width": width}
        if file.read(1):
            raise InputError(f"{path}: damaged: it goes on after the {images} images that its head announces")


def default_images() -> Iterator[Row]:
    """1797 handwritten digits of 8 x 8 pixels in 17 grey levels, in the order of scikit-learn.

    Source: `sklearn.datasets.load_digits`, the test part of Alpaydin and Kaynak 1998 (UCI machine learning).
    """
    try:
        digits = importlib.import_module("sklearn.datasets").load_digits()
    except ImportError as error:
        raise InputError(
            "data: scikit-learn, which brings the default images, is not installed; pip install "
            "'polyformer[image]', or name an IDX file of images with --data PATH"
        ) from error
    for digit in digits.images:
        pixels = np.round(digit * ((GREYS - 1) / 16)).astype(np.uint8)
        yield {IMAGE: pixels.tobytes(), "height": 8, "width": 8}


def quantised(image: bytes, levels: int) -> np.ndarray:
    """The pixels as levels 0 <= level < levels of equal width; [pixels], int64."""
    return np.frombuffer(image, np.uint8).astype(np.int64) * levels // GREYS
