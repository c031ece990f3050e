"""Images as rows {image, height, width}: IDX files (MNIST's), CIFAR's binary files, or scikit-learn's digits.

Rows also have a `label` if the source has labels.

`image` is 8-bit, a byte per pixel in raster order with 0 for black; colour images have three bytes per pixel,
red, green and blue. Encoded images (PNG, JPEG) are read by `polyformer.data.image_decoding`. `quantised`
reduces the bytes to a few levels, the tokens of an image model.
"""

import importlib
import itertools
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from polyformer.core.errors import InputError
from polyformer.core.limits import LABELS, PIXELS
from polyformer.core.optional_packages import needs_extra
from polyformer.data.compressed_files import opened_bytes, plain_name

Row = dict[str, Any]

IMAGE = "image"  # the column of a row's pixels
GREYS = 256

_BYTES_OF_1, _BYTES_OF_3 = 0x00000801, 0x00000803  # the magic numbers: unsigned bytes, one or three axes
_HEAD = struct.Struct(">IIII")  # magic number, images, height, width; LeCun et al. 1998, the MNIST database
_LABELS_HEAD = struct.Struct(">II")  # magic number, labels


def read_idx(path: Path, header: object = None) -> Iterator[Row]:
    """Yield {image, height, width} for each image of an IDX file, plain or gzipped.

    Rows have a `label` too, the number as text, if the file of the labels is in the same folder.
    """
    beside = labels_file(path)
    labels = None if beside is None else _idx_labels(beside)
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
        if not 1 <= height * width <= PIXELS:
            raise InputError(f"{path}: expected images of 1 to {PIXELS} pixels, got {height} x {width}")
        if labels is not None and len(labels) != images:
            raise InputError(f"{beside}: {len(labels)} labels for the {images} images in {path}")
        for number in range(images):
            pixels = file.read(height * width)
            if len(pixels) < height * width:
                raise InputError(
                    f"{path}: truncated: it ends in image {number + 1} of {images}; fetch it again"
                )
            label = {} if labels is None else {"label": str(labels[number])}
            yield {IMAGE: pixels, "height": height, "width": width, **label}
        if file.read(1):
            raise InputError(f"{path}: damaged: it has more data than the {images} images in its header")


def labels_file(path: Path) -> Path | None:
    """Return the IDX file of the labels for the images in `path`, or None if there is none.

    It is identified by the names of MNIST's files: `t10k-images-idx3-ubyte.gz` and
    `t10k-labels-idx1-ubyte.gz`, with or without `.gz`.
    """
    if not isinstance(path, Path) or "images" not in path.name or "idx3" not in path.name:
        return None
    plain = plain_name(path.name).replace("images", "labels").replace("idx3", "idx1")
    names = [path.with_name(plain + ending) for ending in ("", ".gz", ".zst")]
    return next((name for name in names if name.is_file()), None)


def _idx_labels(path: Path) -> bytes:
    """Read an IDX file of labels, a byte each."""
    with opened_bytes(path) as file:
        head = file.read(_LABELS_HEAD.size)
        if len(head) < _LABELS_HEAD.size or _LABELS_HEAD.unpack(head)[0] != _BYTES_OF_1:
            raise InputError(
                f"{path}: not an IDX file of labels, which begins with {_BYTES_OF_1:#010x}; fetch it again"
            )
        count = _LABELS_HEAD.unpack(head)[1]
        if count > LABELS:
            raise InputError(f"{path}: its head announces {count} labels, expected at most {LABELS}")
        labels = file.read(count + 1)
    if len(labels) != count:
        raise InputError(f"{path}: damaged: its head announces {count} labels, got another number")
    return labels


def read_cifar10(path: Path, header: object = None) -> Iterator[Row]:
    """Yield {image, height, width, label}: the colour images in a binary file of CIFAR-10."""
    return _cifar(path, classes=(10,))


def read_cifar100(path: Path, header: object = None) -> Iterator[Row]:
    """Yield the same from a binary file of CIFAR-100, with the fine label."""
    return _cifar(path, classes=(20, 100))


def _cifar(path: Path, classes: tuple[int, ...]) -> Iterator[Row]:
    """Yield rows from records of one byte per label, then the red, green and blue planes of 32 x 32 pixels.

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
    """Yield 1797 handwritten digits of 8 x 8 pixels in 17 grey levels, in the order of scikit-learn.

    Source: `sklearn.datasets.load_digits`, the test part of Alpaydin and Kaynak 1998 (UCI machine learning).
    """
    reason = "data: scikit-learn, which brings the default images, is not installed"
    with needs_extra("image", reason, "or name images with --data PATH"):
        digits = importlib.import_module("sklearn.datasets").load_digits()
    for digit, number in zip(digits.images, digits.target):
        pixels = np.round(digit * ((GREYS - 1) / 16)).astype(np.uint8)
        yield {IMAGE: pixels.tobytes(), "height": 8, "width": 8, "label": str(number)}


def quantised(image: bytes, levels: int) -> np.ndarray:
    """Return the bytes as levels 0 <= level < levels of equal width, int64 [bytes]."""
    return np.frombuffer(image, np.uint8).astype(np.int64) * levels // GREYS
