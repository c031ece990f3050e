"""Encoded images (PNG, JPEG, ...) to rows of pixels, with Pillow; and images brought to one size and mode."""

import importlib
import io
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from polyformer.core.errors import InputError
from polyformer.data.images import IMAGE, MOST_PIXELS
from polyformer.data.opening import opened_bytes

Row = dict[str, Any]
Mode = Literal["grey", "rgb"]

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
LARGEST = 2**28
"""Bytes of the largest file of one image that is read."""

_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")  # no other decoder is handed a stranger's bytes
_MODES = {"grey": "L", "rgb": "RGB"}
_GREY = ("1", "L", "LA", "La", "I", "I;16", "I;16B", "I;16L", "F")


def read_image(path: Path, header: object = None) -> Iterator[Row]:
    """{image}: the bytes of one file, as they are; `decoded_rows` makes pixels of them."""
    with opened_bytes(path) as file:
        data = file.read(LARGEST + 1)
    if len(data) > LARGEST:
        raise InputError(f"{path}: larger than {LARGEST} bytes, which no image is here")
    yield {IMAGE: data, "path": str(path)}


def decoded_rows(
    rows: Iterable[Row], column: str, source: str, size: tuple[int, int] | None, mode: Mode | None
) -> Iterator[Row]:
    """`rows` with what stands in `column` as pixels beside their height and width.

    An image may be the bytes of a file, the {bytes, path} of a parquet file or Pillow's own object (as saved
    data sets give it); rows that have pixels already stay as they are. With a `size` (height, width) the
    middle of each image is cut out in that proportion and scaled; `mode` makes all of them grey or coloured.
    """
    for number, row in enumerate(rows, 1):
        value: Any = row.get(column)
        if isinstance(value, dict) and isinstance(value.get("bytes"), bytes):
            value = value["bytes"]
        raw = isinstance(value, bytes) and {"height", "width"} <= row.keys()
        if value is None or isinstance(value, str) or (raw and size is None and mode is None):
            yield row  # what is no image is said where the other columns are checked
            continue
        where = row.get("path") or f"{source}, row {number}"
        picture = _of_pixels(row, bytes(value)) if raw else _opened(value, str(where))
        yield {**row, **_pixels(picture, str(where), size, mode, column)}


def _pillow(name: str) -> Any:
    try:
        return importlib.import_module(f"PIL.{name}")
    except ImportError as error:
        raise InputError(
            "data: Pillow, which reads PNG and JPEG images, is not installed; pip install 'polyformer[image]'"
        ) from error


def _of_pixels(row: Row, value: bytes) -> Any:
    height, width = row["height"], row["width"]
    mode = "RGB" if len(value) == 3 * height * width else "L"
    return _pillow("Image").frombytes(mode, (width, height), value)


def _opened(value: Any, where: str) -> Any:
    """Pillow's image of the bytes of a file, its size checked before anything is decoded."""
    images = _pillow("Image")
    if isinstance(value, images.Image):
        return value
    if not isinstance(value, bytes):
        raise InputError(f"{where}: expected an image, got a {type(value).__name__}")
    most, images.MAX_IMAGE_PIXELS = images.MAX_IMAGE_PIXELS, None  # our own bound raises, theirs warns
    try:
        picture = images.open(io.BytesIO(value), formats=_FORMATS)
    except (OSError, ValueError, SyntaxError) as error:
        raise InputError(f"{where}: not an image ({', '.join(_FORMATS)}), or a damaged one") from error
    finally:
        images.MAX_IMAGE_PIXELS = most
    if picture.width * picture.height > MOST_PIXELS:
        raise InputError(
            f"{where}: {picture.height} x {picture.width} pixels, expected at most {MOST_PIXELS} in all"
        )
    return picture


def _pixels(picture: Any, where: str, size: tuple[int, int] | None, mode: Mode | None, column: str) -> Row:
    """{image, height, width}: with 16-bit greys as 8-bit ones, and without transparency."""
    operations = _pillow("ImageOps")
    try:
        # Cameras write which way is up beside the pixels.
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
        raise InputError(f"{where}: a damaged image ({error})") from error


def _on_white(picture: Any) -> Any:
    grey = picture.mode in _GREY
    layered = picture.convert("RGBA")
    paper = _pillow("Image").new("RGBA", layered.size, "white")
    return _pillow("Image").alpha_composite(paper, layered).convert("L" if grey else "RGB")
