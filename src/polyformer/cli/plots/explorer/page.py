"""The page: one file with data, style and script inside, which may not load or run anything else."""

import base64
import hashlib
import html
import json
from importlib.resources import files
from typing import Any

from polyformer.cli.plots.explorer.buffers import Buffers


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
