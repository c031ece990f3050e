"""The page: one file with data, style and script inside, which may not load or run anything else.

Typed arrays are in one string of bytes, which the page reads without parsing numbers.
"""

import base64
import hashlib
import html
import json
from importlib.resources import files
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


def write(header: dict[str, Any], buffers: Buffers) -> str:
    """Return the page of `header`, with references into `buffers`."""
    script, style = asset("explorer.js"), asset("explorer.css")
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    data = json.dumps(header, ensure_ascii=True, allow_nan=False).replace("<", "\\u003c")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(header['title'])}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        '<div id="explorer"></div>\n<noscript><p>This page is drawn by its script.</p></noscript>\n'
        f'<script type="application/json" id="explorer-data">{data}</script>\n'
        f'<script type="application/octet-stream;base64" id="explorer-buffers">{buffers.base64()}</script>\n'
        f"<script>{script}</script>\n</body>\n</html>\n"
    )


def asset(name: str) -> str:
    """Return the text of a file next to this module."""
    return (files("polyformer.cli.plots.explorer") / name).read_text(encoding="utf-8")


def _hash(content: str) -> str:
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
