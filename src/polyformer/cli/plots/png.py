"""The PNG encoding of pixels without a library, to show an image in a page. W3C, PNG specification."""

import struct
import zlib

import numpy as np

COLOUR_TYPES = {1: 0, 3: 2}  # by channels: grey, and red, green and blue


def png(pixels: np.ndarray) -> bytes:
    """Return the file of an image, uint8 [H, W, 1 or 3]."""
    height, width, channels = pixels.shape
    lines = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], 1)  # unfiltered
    head = struct.pack(">IIBBBBB", width, height, 8, COLOUR_TYPES[channels], 0, 0, 0)
    chunks = (b"IHDR", head), (b"IDAT", zlib.compress(lines.tobytes())), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(map(_chunk, *zip(*chunks)))


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
