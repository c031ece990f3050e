"""Images as rows {image, height, width}: IDX files (MNIST's), CIFAR's binary files, or scikit-learn's digits.

`image` is 8-bit, a byte a pixel in raster order and 0 for black; of a colour image three bytes a pixel, red,
green and blue. Encoded images (PNG, JPEG) are `polyformer.data.pictures`. `quantised` makes few levels of the
bytes, which are the tokens of an image model.
"""

import importlib
import itertools
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
MOST_PIXELS = 2**26
"""An image of more pixels is refused: its head is wrong, or made to fill a memory."""

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
        if not 1 <= height * width <= MOST_PIXELS:
            raise InputError(f"{path}: expected images of 1 to {MOST_PIXELS} pixels, got {height} x {width}")
        for number in range(images):
            pixels = file.read(height * width)
            if len(pixels) < height * width:
                raise InputError(
                    f"{path}: truncated: it ends in image {number + 1} of {images}; fetch it again"
                )
            yield {IMAGE: pixels, "height": height, "width": width}
        if file.read(1):
            raise InputError(f"{path}: damaged: it goes on after the {images} images that its head announces")


def read_cifar10(path: Path, header: object = None) -> Iterator[Row]:
    """{image, height, width, label}: the colour images of a file of CIFAR-10's binary version."""
    return _cifar(path, classes=(10,))


def read_cifar100(path: Path, header: object = None) -> Iterator[Row]:
    """The same of CIFAR-100's; the label is the fine one of the two."""
    return _cifar(path, classes=(20, 100))


def _cifar(path: Path, classes: tuple[int, ...]) -> Iterator[Row]:
    """Records of one byte a label, then the planes of red, green and blue of 32 x 32 pixels.

    Source: Krizhevsky 2009, the page of the CIFAR data sets, "Binary version".
    """
    side = 32
    size = len(classes) + 3 * side**2
    with opened_bytes(path) as file:
        for number in itertools.count(1):
            record = file.read(size)
            if not record:
                return
            if number == 1 and record[0] == 0x80:
                raise InputError(
                    f"{path}: a pickle (the Python version of CIFAR): reading one can run code, so it is "
                    "refused; take the binary version, whose files end in .bin"
                )
            if len(record) < size or any(label >= most for label, most in zip(record, classes)):
                raise InputError(
                    f"{path}: not a file of CIFAR-{classes[-1]}'s binary version, or a damaged one: record "
                    f"{number} has {len(record)} bytes of {size}, the first {list(record[: len(classes)])}"
                )
            planes = np.frombuffer(record, np.uint8, offset=len(classes)).reshape(3, side, side)
            pixels, label = planes.transpose(1, 2, 0).tobytes(), str(record[len(classes) - 1])
            yield {IMAGE: pixels, "height": side, "width": side, "label": label}


def default_images() -> Iterator[Row]:
    """1797 handwritten digits of 8 x 8 pixels in 17 grey levels, in the order of scikit-learn.

    Source: `sklearn.datasets.load_digits`, the test part of Alpaydin and Kaynak 1998 (UCI machine learning).
    """
    try:
        digits = importlib.import_module("sklearn.datasets").load_digits()
    except ImportError as error:
        raise InputError(
            "data: scikit-learn, which brings the default images, is not installed; pip install "
            "'polyformer[image]', or name images with --data PATH"
        ) from error
    for digit, number in zip(digits.images, digits.target):
        pixels = np.round(digit * ((GREYS - 1) / 16)).astype(np.uint8)
        yield {IMAGE: pixels.tobytes(), "height": 8, "width": 8, "label": str(number)}


def quantised(image: bytes, levels: int) -> np.ndarray:
    """The bytes as levels 0 <= level < levels of equal width; [bytes], int64."""
    return np.frombuffer(image, np.uint8).astype(np.int64) * levels // GREYS
