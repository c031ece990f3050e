"""The pictures of `polyformer show`: drawn into a file, or printed as text in the width of the terminal."""

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from polyformer.core.errors import InputError
from polyformer.core.parsing import parse_yaml
from polyformer.core.paths import check_format

if TYPE_CHECKING:
    from polyformer.attention.patterns.base import Pattern

LENGTH, BLOCK, HEADS = 64, 16, 4
LONGEST, FULLEST = 1024, 0.6
"""Without --length, the length doubles until a pattern has at most the share `FULLEST` of all pairs."""


def show_pattern(
    expression: str | None,
    *,
    length: int | None = None,
    heads: int = HEADS,
    causal: bool = False,
    block: int = BLOCK,
    layer: int = 0,
    paths: bool = False,
    out: str | None = None,
) -> None:
    """Print or draw the mask of a pattern, its block-sparse layout and the number of keys per query.

    With `paths`: the number of layers after which each token depends on each other token.
    """
    import polyformer.attention.mechanisms  # noqa: F401, the patterns must be known
    from polyformer.attention.patterns.base import Pattern
    from polyformer.cli.plots.characters import characters, pattern_text
    from polyformer.cli.plots.pattern import draw_paths, draw_pattern, path_picture, path_text, pictures
    from polyformer.core.sequence.context import Context

    if expression is None:
        raise InputError(
            "NAME is missing: expected a pattern such as 'Window(8) | Global(2)'; see "
            "`polyformer list pattern`"
        )
    path = output_file(out)
    pattern = Pattern.from_text(expression)
    length = sparse_length(pattern, causal, layer) if length is None else length
    context = Context(length, length, causal=causal)
    if paths:
        picture = path_picture(pattern, context, heads)
        if path:
            draw_paths(picture, path)
        print(path_text(picture))
    else:
        panels = pictures(pattern, context, block=block, heads=heads, layers=(layer,))
        if path:
            draw_pattern(panels, path)
        else:
            print(pattern_text(panels, columns(), characters(sys.stdout.encoding)))
    if path:
        print(f"Drawn in {path}")


def sparse_length(pattern: "Pattern", causal: bool, layer: int) -> int:
    """Return the first length at which the mask is sparse (see `FULLEST`), or `LENGTH` if there is none."""
    from polyformer.cli.plots.pattern import pictures
    from polyformer.core.sequence.context import Context

    length = LENGTH
    while length <= LONGEST:
        [picture, *_] = pictures(pattern, Context(length, length, causal=causal), heads=1, layers=(layer,))
        pairs = length * (length + 1) / 2 if causal else length**2
        if picture.mask.sum() <= FULLEST * pairs:
            return length
        length *= 2
    return LENGTH


def show_position(
    scheme: str | None,
    *,
    length: int = LENGTH,
    heads: int = HEADS,
    causal: bool = False,
    out: str | None = None,
) -> None:
    """Print or draw the effect of a position scheme, named by kind or in YAML, on the scores or the input."""
    from polyformer.attention.positions import PositionConfig
    from polyformer.cli.plots.characters import characters, position_text
    from polyformer.cli.plots.position import draw_position, position_picture

    if scheme is None:
        raise InputError(
            "NAME is missing: expected a position scheme such as 'alibi'; see `polyformer list position`"
        )
    path = output_file(out)
    picture = position_picture(PositionConfig.from_dict(as_data(scheme), "position"), length, heads, causal)
    if path:
        draw_position(picture, path)
        print(f"Drawn in {path}")
    else:
        print(position_text(picture, columns(), characters(sys.stdout.encoding)))


def as_data(text: str) -> object:
    """Parse YAML."""
    return parse_yaml(text, "position", "; expected a kind, or a mapping in YAML")


def output_file(out: str | None) -> Path | None:
    """Return the file to draw into; raise `InputError` for an unknown format."""
    if out is None:
        return None
    check_format(out, (".png", ".svg"), "--out")
    return Path(out)


def columns() -> int:
    """Return the width of the terminal in characters; 80 without a terminal."""
    return shutil.get_terminal_size().columns
