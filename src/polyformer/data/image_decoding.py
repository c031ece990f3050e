"""Decoding of images (PNG, JPEG, ...) to pixels with Pillow, and conversion to a common size and mode."""

import importlib
import io
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from polyformer.core.errors import InputError
from polyformer.core.limits import IMAGE_BYTES, PIXELS
from polyformer.core.optional_packages import needs_extra
from polyformer.data.compressed_files import opened_bytes
from polyformer.data.images import IMAGE
from polyformer.data.remote import Remote

Row = dict[str, Any]
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
