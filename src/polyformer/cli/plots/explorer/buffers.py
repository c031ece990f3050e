"""Typed arrays in one string of bytes, which a page reads without parsing numbers."""

import base64
import hashlib
from typing import Any

import numpy as np

ALIGNED = 8
"""The alignment of an array in bytes, so that a page can create a view of any type."""

TYPES = ("uint8", "int8", "int16", "int32", "float16", "float32")


class Buffers:
    """A collector of arrays; the results of `add` go into the page's JSON."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.size = 0  # bytes
        self.places: dict[tuple[str, bytes], int] = {}

    def add(self, array: np.ndarray) -> dict[str, Any]:
        """Return the array's offset, its type and its shape; equal arrays are stored once."""
        name = str(array.dtype)
        assert name in TYPES, name
        content = array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
        key = name, hashlib.sha256(content).digest()
        if key not in self.places:
            self.places[key] = self.size
            padding = -len(content) % ALIGNED
            self.parts += [content, bytes(padding)]
            self.size += len(content) + padding
        return {"at": self.places[key], "dtype": name, "shape": list(array.shape)}

    def base64(self) -> str:
        """Return all bytes, in order."""
        return base64.b64encode(b"".join(self.parts)).decode()
