"""Images as rows {image, height, width}, from pixels or encoded images, and random views for training.

Files of pixels are IDX files (MNIST's), CIFAR's binary files, and scikit-learn's digits. Rows also have a
`label` if the source has labels.

`image` is 8-bit, a byte per pixel in raster order with 0 for black; colour images have three bytes per pixel,
red, green and blue. `quantised` reduces the bytes to a few levels, the tokens of an
image model. Encoded images (PNG, JPEG, ...) are converted by Pillow to a common size and mode.

A view is a flip, shift, rotation and resized crop as a single affine map: a matrix from the coordinates of
the new image to those in the old image, (x, y) from -1 to 1. The images of a batch are sampled together,
bilinearly. Areas outside the old image repeat its border. Each image has a separate generator for (seed,
epoch, row), so that a resumed run reads bitwise identical images.
"""

import dataclasses
import importlib
import io
import itertools
import math
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Interval
from torch import Tensor
from torch.nn import functional as F

from polyformer.core.config import Config
from polyformer.core.errors import InputError
from polyformer.core.imports import needs_extra
from polyformer.core.ranges import IMAGE_BYTES, LABELS, PIXELS, PositiveShare, UnitFloat
from polyformer.data.sources.files import Remote, opened_bytes, plain_name

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


Mode = Literal["grey", "rgb"]

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")

_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")  # untrusted bytes reach no other decoder
_MODES = {"grey": "L", "rgb": "RGB"}
_GREY = ("1", "L", "LA", "La", "I", "I;16", "I;16B", "I;16L", "F")


def read_image(path: Path | Remote, header: object = None) -> Iterator[Row]:
    """Yield {image}: the bytes of a file, unchanged; `decoded_rows` decodes them."""
    with opened_bytes(path) as file:
        data = file.read(IMAGE_BYTES + 1)
    if len(data) > IMAGE_BYTES:
        raise InputError(f"{path}: larger than {IMAGE_BYTES} bytes, which no image is here")
    yield {IMAGE: data, "path": str(path)}


def decoded_rows(
    rows: Iterable[Row], column: str, source: str, size: tuple[int, int] | None, mode: Mode | None
) -> Iterator[Row]:
    """Yield `rows` with decoded pixels in `column`, and with height and width.

    An image may be the bytes of a file, or {bytes, path} as in parquet files and saved data sets; rows with
    pixels are unchanged. With a `size` (height, width), the centre of each image is
    cropped to its proportions and scaled; `mode` converts all images to grey or colour.
    """
    for number, row in enumerate(rows, 1):
        value: Any = row.get(column)
        if isinstance(value, dict) and isinstance(value.get("bytes"), bytes):
            value = value["bytes"]
        raw = isinstance(value, bytes) and {"height", "width"} <= row.keys()
        if value is None or isinstance(value, str) or (raw and _fits(row, value, size, mode)):
            yield row  # the check of columns reports values that are no images
            continue
        where = row.get("path") or f"{source}, row {number}"
        picture = _of_pixels(row, bytes(value)) if raw else _opened(value, str(where))
        yield {**row, **_pixels(picture, str(where), size, mode, column)}


def picture_row(picture: Any, size: tuple[int, int] | None, mode: Mode | None) -> Row:
    """Return {image, height, width} of an image of Pillow, as `decoded_rows` does for the bytes of a file."""
    return _pixels(picture, "image", size, mode, IMAGE)


def _fits(row: Row, value: Any, size: tuple[int, int] | None, mode: Mode | None) -> bool:
    """Return whether pixels already have the size and the mode, so that Pillow is not needed."""
    own: Mode = "rgb" if len(value) == 3 * row["height"] * row["width"] else "grey"
    return size in (None, (row["height"], row["width"])) and mode in (None, own)


def _pillow(name: str) -> Any:
    with needs_extra("image", "data: Pillow, which reads PNG and JPEG images, is not installed"):
        return importlib.import_module(f"PIL.{name}")


def _of_pixels(row: Row, value: bytes) -> Any:
    height, width = row["height"], row["width"]
    mode = "RGB" if len(value) == 3 * height * width else "L"
    return _pillow("Image").frombytes(mode, (width, height), value)


def _opened(value: Any, where: str) -> Any:
    """Open an image with Pillow, and check its size before decoding."""
    images = _pillow("Image")
    if not isinstance(value, bytes):
        raise InputError(f"{where}: expected an image, got a {type(value).__name__}")
    most, images.MAX_IMAGE_PIXELS = images.MAX_IMAGE_PIXELS, None  # our limit raises, Pillow's only warns
    try:
        picture = images.open(io.BytesIO(value), formats=_FORMATS)
    except (OSError, ValueError, SyntaxError) as error:
        raise InputError(
            f"{where}: not an image ({', '.join(_FORMATS)}), or a damaged one; remove it"
        ) from error
    finally:
        images.MAX_IMAGE_PIXELS = most
    if picture.width * picture.height > PIXELS:
        raise InputError(
            f"{where}: {picture.height} x {picture.width} pixels, expected at most {PIXELS} in all"
        )
    return picture


def _pixels(picture: Any, where: str, size: tuple[int, int] | None, mode: Mode | None, column: str) -> Row:
    """Return {image, height, width}: 16-bit greys become 8-bit, transparency becomes white."""
    operations = _pillow("ImageOps")
    try:
        # Cameras store the orientation next to the pixels.
        picture = operations.exif_transpose(picture)
        if picture.mode.startswith("I"):
            picture = picture.point(lambda value: value / 256).convert("L")
        if picture.mode in ("RGBA", "LA", "PA") or "transparency" in picture.info:
            picture = _on_white(picture)
        picture = picture.convert(_MODES[mode] if mode else "L" if picture.mode in _GREY else "RGB")
        if size is not None:
            picture = operations.fit(picture, (size[1], size[0]))
        return {column: picture.tobytes(), "height": picture.height, "width": picture.width}
    except (OSError, ValueError, SyntaxError, EOFError) as error:
        raise InputError(f"{where}: a damaged image ({error}); remove it") from error


def _on_white(picture: Any) -> Any:
    grey = picture.mode in _GREY
    layered = picture.convert("RGBA")
    paper = _pillow("Image").new("RGBA", layered.size, "white")
    return _pillow("Image").alpha_composite(paper, layered).convert("L" if grey else "RGB")


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
