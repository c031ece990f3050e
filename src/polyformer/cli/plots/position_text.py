"""A position scheme as text: scores at some distances in numbers, and pictures in shades."""

import itertools

import torch
from torch import Tensor

from polyformer.cli.plots.characters import BLOCKS, Characters, shades, wrapped
from polyformer.cli.plots.position import PositionPicture

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
