"""The pictures of `polyformer show`: drawn into a file, or printed as text, never wider than the terminal.

As text they consist of half blocks and shades. A character is about twice as high as wide. If the picture
fits, a character represents two queries and one key and shows both pairs; otherwise it represents 2s queries
and s keys, and its shade shows how many pairs are set.
"""

import dataclasses
import itertools
import shutil
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.cli.plots.pattern import FULL, SKIPPED, PatternPicture, labels, span
from polyformer.cli.plots.position import PositionPicture
from polyformer.core.errors import InputError
from polyformer.core.parsing import parse_yaml
from polyformer.core.paths import check_format

if TYPE_CHECKING:
    from polyformer.attention.patterns.base import Pattern


LEAST = 16
"""The number of columns below which a picture loses its margins."""


@dataclasses.dataclass(frozen=True)
class Characters:
    """The characters. halves: none, upper, lower, both; shades: none to all; work: skipped, full, masked."""

    halves: str = " ▀▄█"
    shades: str = " ░▒▓█"
    work: str = "·█▒"


BLOCKS = Characters()
ASCII = Characters(halves=" '.:", shades=" .:*#", work=".#+")


def characters(encoding: str | None) -> Characters:
    """Return the characters that a terminal of this encoding can show."""
    try:
        "".join(dataclasses.astuple(Characters())).encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return Characters()


def pattern_text(panels: list[PatternPicture], width: int, signs: Characters = BLOCKS) -> str:
    """Return the mask, the layout and the counts of every panel, in lines of at most `width` characters."""
    lines: list[str] = []
    for panel, label in zip(panels, labels(panels)):
        place = Margins(panel.counts, panel.mask.shape[1], width)
        lines += wrapped(f"{panel.text}{': ' + label if label else ''}", width)
        lines += wrapped(panel.summary(), width)
        size = f"one character: {2 * place.step} queries x {place.step} keys; right: keys per query"
        lines += [
            "",
            *wrapped(f"mask ({size})", width),
            *place.beside(mask_cells(panel.mask, place.step, signs)),
        ]
        skipped, full, masked = signs.work
        legend = f"layout ({full} computed in full, {masked} with a mask, {skipped} skipped)"
        lines += ["", *wrapped(legend, width), *place.beside(work_cells(panel.work, place.step, signs)), ""]
    return "\n".join(line.rstrip() for line in lines[:-1])


class Margins:
    """The number of keys per character, and the margins left (queries) and right (counts) of the picture."""

    def __init__(self, counts: list[int], keys: int, width: int):
        self.counts = counts
        self.left, self.right = len(str(len(counts) - 1)) + 1, len(span(counts)) + 1
        if width - self.left - self.right < LEAST:
            self.left = self.right = 0
        self.step = max(1, -(-keys // max(1, width - self.left - self.right)))

    def beside(self, cells: list[str]) -> list[str]:
        """Return the lines of a picture with their margins."""
        if not self.left:
            return cells
        rows = 2 * self.step
        return [
            f"{i * rows:>{self.left - 1}} {line} {span(self.counts[i * rows : (i + 1) * rows])}"
            for i, line in enumerate(cells)
        ]


def wrapped(text: str, width: int) -> list[str]:
    """Return words in lines; a word longer than a line is cut."""
    return textwrap.wrap(text, max(1, width))


def mask_cells(mask: Tensor, step: int, signs: Characters) -> list[str]:
    """Return a bool picture in characters of `2 * step` rows and `step` columns."""
    if step > 1:
        return shades(mask.double(), step, signs)
    rows = F.pad(mask.int(), (0, 0, 0, mask.shape[0] % 2))
    return _lines(rows[::2] + 2 * rows[1::2], lambda value: signs.halves[int(value)])


def work_cells(work: Tensor, step: int, signs: Characters) -> list[str]:
    """Return a layout in characters of the same size; a character with several kinds is shown as masked."""
    skipped, full = (reduced((work == state).double(), step) for state in (SKIPPED, FULL))
    kinds = (skipped < 1).int() * 2 - (full == 1).int()
    return _lines(kinds, lambda value: signs.work[int(value)])


def shades(values: Tensor, step: int, signs: Characters) -> list[str]:
    """Return values from 0 to 1 in such characters; a value above 0 is never blank, and only 1 is solid."""
    last = len(signs.shades) - 1

    def shade(value: float) -> str:
        return signs.shades[0 if value <= 0 else last if value >= 1 else 1 + int(value * (last - 1))]

    return _lines(reduced(values, step), shade)


def reduced(values: Tensor, step: int) -> Tensor:
    """Return means over cells of `2 * step` rows and `step` columns; cells at the edges may be incomplete."""
    return F.avg_pool2d(values[None], (2 * step, step), ceil_mode=True, count_include_pad=False)[0]


def _lines(cells: Tensor, sign: Callable[[float], str]) -> list[str]:
    return ["".join(map(sign, row)) for row in cells.tolist()]


CELL = 10  # characters of a number in the table


def position_text(picture: PositionPicture, width: int, signs: Characters = BLOCKS) -> str:
    """Return the table, if scores depend only on distance, then the panels, in lines of at most `width`."""
    lines, panels = wrapped(picture.title, width), list(picture.panels.items())
    curves = picture.by_distance
    if curves is not None:
        lines += [
            "",
            *wrapped("by how far the key lies before the query", width),
            *table(curves, picture.groups, width),
        ]
        panels = [panel for panel in panels if panel[0].startswith("vectors")] + panels[
            :1
        ]  # the table has all heads
    for label, values in panels:
        step = -(-values.shape[1] // width)
        known = values[values.isfinite()]
        low, high = known.min(), known.max()
        size = f"{2 * step} x {step} values a character, blank {low:.3g}, {signs.shades[-1]} {high:.3g}"
        scaled = (values.clamp_min(low) - low) / (high - low).clamp_min(1e-12)
        lines += ["", *wrapped(f"{label} ({size})", width), *shades(scaled, step, signs)]
    return "\n".join(line.rstrip() for line in lines)


def table(curves: Tensor, groups: dict[str, list[int]], width: int) -> list[str]:
    """Return the scores [H, 2T - 1] at 0 and the powers of two that fit, on both sides if they differ."""
    length, labels = curves.shape[1] // 2 + 1, ["distance", *groups]
    near = [0, *itertools.takewhile(lambda d: d < length, (2**i for i in range(length)))]
    both = not torch.allclose(curves, curves.flip(1))
    distances = [d for size in near for d in ({size, -size} if both else {size})]
    left = max(map(len, labels))
    shown = sorted(distances[: max(1, (width - left) // CELL)])
    lines = [f"{labels[0]:<{left}}" + "".join(f"{d:>{CELL}}" for d in shown)]
    for label, heads in groups.items():
        numbers = [float(curves[heads[0], d + length - 1]) for d in shown]
        lines.append(f"{label:<{left}}" + "".join(f"{x:>{CELL}.3g}" for x in numbers))
    return [line[:width] for line in lines]


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
