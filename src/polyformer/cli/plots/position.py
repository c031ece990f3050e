"""A position scheme as data to draw (its effect on equal tokens, or its vectors) and as a figure.

All tokens are equal here, so that all differences come from their positions. Scores are means over the
directions that the tokens' vector may have: over the D unit vectors times sqrt(D), which have a score of
sqrt(D) with themselves. For a rotation this is the mean of the cosines by which it changes the score of any
vector.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyformer.attention.positions import Position, PositionConfig, Shape, Site
from polyformer.cli.plots.pattern import check
from polyformer.core.errors import InputError, quote
from polyformer.core.files import write_output
from polyformer.core.measuring import figure_svg, new_figure, save_figure
from polyformer.core.sequence.context import Context

LIMIT = 1024
"""The most tokens: scores are stored for every direction."""

WIDTH = 16  # head dimension


@dataclasses.dataclass(frozen=True, eq=False)
class PositionPicture:
    """The effect of one scheme on `length` tokens in the first layer.

    Args:
        scores: [H, T, T], the term added to the score of query (down) and key (across); None for a scheme
            that does not change scores. A pair that the scheme forbids has minus infinity.
        vectors: [T, E], the vectors added to the input; None for a scheme that does not change it.
        learned: whether there are parameters, which are drawn at random here.
    """

    kind: str
    scores: Tensor | None
    vectors: Tensor | None
    learned: bool

    @property
    def length(self) -> int:
        """The number of tokens."""
        values = self.scores if self.vectors is None else self.vectors
        assert values is not None
        return values.shape[-2]

    @property
    def effect(self) -> str:
        """The content of the picture, in words."""
        effect = "added to the scores of equal tokens" if self.scores is not None else "added to the input"
        return f"{effect}{', with random parameters' if self.learned else ''}"

    @property
    def title(self) -> str:
        """The scheme and its effect."""
        return f"{self.kind}: {self.effect}"

    @property
    def groups(self) -> dict[str, list[int]]:
        """The heads with equal scores, by label."""
        if self.scores is None:
            return {}
        groups: list[list[int]] = []
        for head, scores in enumerate(self.scores):
            for group in groups:
                if torch.allclose(self.scores[group[0]], scores):
                    group.append(head)
                    break
            else:
                groups.append([head])
        if len(groups) == 1:
            return {"all heads": groups[0]}
        return {f"head{'s' * (len(group) > 1)} {', '.join(map(str, group))}": group for group in groups}

    @property
    def panels(self) -> dict[str, Tensor]:
        """The matrices by label: the scores of heads that differ, and the vectors."""
        panels: dict[str, Tensor] = {}
        if self.scores is not None:
            panels = {f"scores, {label}": self.scores[heads[0]] for label, heads in self.groups.items()}
        return panels if self.vectors is None else {**panels, "vectors": self.vectors}

    @property
    def by_distance(self) -> Tensor | None:
        """The scores as [H, 2T - 1] over the distances -(T - 1)..T - 1, if they depend on nothing else."""
        if self.scores is None:
            return None
        length = self.scores.shape[-1]
        # Keys before the query: the last row reversed. Keys after it: the first row.
        table = torch.cat([self.scores[:, 0, 1:].flip(-1), self.scores[:, -1].flip(-1)], -1)
        distance = torch.arange(length).view(-1, 1) - torch.arange(length)
        same = torch.allclose(table[:, distance + length - 1], self.scores, rtol=1e-6, atol=1e-6)
        return table if same else None


def position_picture(
    config: PositionConfig, length: int, heads: int = 4, causal: bool = False
) -> PositionPicture:
    """Return the effect of a scheme; learned parameters are random, the same at every call.

    Raises `InputError` for a size that cannot be drawn, and for a scheme without effect.
    """
    check("length", length, LIMIT)
    check("heads", heads, 16)
    shape = Shape(hidden_size=heads * WIDTH, max_positions=length, num_heads=heads, head_size=WIDTH)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        position = config.build(shape).double().eval()
        for parameter in position.parameters():
            if not parameter.any():  # a table initialized with zeros would show no effect
                parameter.normal_()
        context = Context(length, length, causal=causal, relations=_relations(position, length))
        scores = added_scores(position, shape, context)
        nothing = torch.zeros(1, length, shape.hidden_size, dtype=torch.float64)
        vectors = position.embed(nothing, torch.arange(length), 0)[0]
    picture = PositionPicture(
        config.kind,
        scores if scores.any() else None,
        vectors if vectors.any() else None,
        any(True for _ in position.parameters()),
    )
    if picture.scores is None and picture.vectors is None:
        raise InputError(
            f"position {quote(config.kind)}: nothing to draw, it changes neither scores nor the input here"
        )
    return picture


def _relations(position: Position, length: int) -> Tensor | None:
    """Return clipped distances as labels, [1, T, T], for a scheme that takes labels."""
    if not position.num_relations:
        return None
    index, most = torch.arange(length), (position.num_relations - 1) // 2
    return ((index.view(-1, 1) - index).clamp(-most, most) + most).unsqueeze(0)


def added_scores(position: Position, shape: Shape, context: Context) -> Tensor:
    """Return the terms that the scheme adds to scores of equal tokens, the mean over directions [H, T, T]."""

    def split(vectors: Tensor) -> Tensor:
        return vectors.view(-1, shape.num_heads, shape.head_size).transpose(0, 1)

    site, length = Site(0, split, split), context.q_len
    scale = 1 / math.sqrt(shape.head_size)
    total = torch.zeros(shape.num_heads, length, length, dtype=torch.float64)
    for direction in torch.eye(shape.head_size, dtype=torch.float64) * math.sqrt(shape.head_size):
        q = k = direction.expand(1, shape.num_heads, length, -1)
        total += (_scores(position, q, k, scale, context, site) - q @ k.mT * scale)[0]
    # Rounded, so that sums of cosines that cancel are zero.
    return (total / shape.head_size).round(decimals=9)


def _scores(position: Position, q: Tensor, k: Tensor, scale: float, context: Context, site: Site) -> Tensor:
    """Return the scores after the scheme, [1, H, T, T]."""
    q, k = position.rotate(q, k, context, site)
    scores = q @ k.mT * scale
    index = torch.arange(context.q_len)
    place = (
        torch.zeros(1, 1, 1, 1).long(),
        torch.arange(q.shape[1]).view(1, -1, 1, 1),
        index.view(-1, 1),
        index,
    )
    relative = position.relative(q, k, context, site)
    if relative is not None:
        scores = relative.score_mod(q, k, scale, context)(scores, *place)
    mod = position.score_mod(q, k, context, site)
    return scores if mod is None else mod(scores, *place)


COLUMNS = 3
FEATURES = 4
"""The features of vectors that are drawn as lines in a small picture."""

DIGITS = 6
"""The precision to which numbers are rounded first, so that a picture is the same on every processor."""

ADDED, DISTANCE = "added to the score (logits)", "how far the key lies before the query (tokens)"


def draw_position(picture: PositionPicture, path: Path) -> None:
    """Draw into `path`; its suffix determines the format. Raises `InputError` without matplotlib."""
    panels, curves = picture.panels, picture.by_distance
    number = len(panels) + (curves is not None)
    columns, rows = min(number, COLUMNS), -(-number // COLUMNS)
    figure = new_figure(4.2 * columns, 3.4 * rows + 0.4)
    axes = list(figure.subplots(rows, columns, squeeze=False).flatten())
    for label, values in panels.items():
        axis, down, across, colour = axes.pop(0), "position (tokens)", "feature", "added to the input"
        if label.startswith("scores"):
            down, across, colour = "query (token)", "key (token)", ADDED
        image = axis.imshow(values.numpy(), aspect="auto", interpolation="nearest")
        figure.colorbar(image, ax=axis, label=colour)
        axis.set(title=label, ylabel=down, xlabel=across)
    if curves is not None:
        axis = axes.pop(0)
        axis.set_title("scores by distance")
        _draw_curves(axis, curves, picture.groups)
    for axis in axes:
        axis.set_visible(False)
    figure.suptitle(picture.title, fontsize=10)
    save_figure(figure, path, write_output)


def position_svg(picture: PositionPicture) -> str:
    """Return a small picture of lines: scores over distance, a line for each head.

    If scores depend on more than the distance, the lines are scores of the middle query over keys; for
    vectors they are some features over positions. Raises `InputError` without matplotlib.
    """
    figure = new_figure(5.2, 3.2)
    axis, curves = figure.subplots(), picture.by_distance
    if curves is not None:
        _draw_curves(axis, curves, picture.groups)
    elif picture.scores is not None:
        middle = picture.length // 2
        lines = {label: picture.scores[heads[0], middle] for label, heads in picture.groups.items()}
        _draw_lines(axis, torch.arange(picture.length), lines)
        axis.set(xlabel=f"key (token), for query {middle}", ylabel=ADDED)
    else:
        assert picture.vectors is not None
        features = range(0, picture.vectors.shape[1], -(-picture.vectors.shape[1] // FEATURES))
        lines = {f"feature {i}": picture.vectors[:, i] for i in features}
        _draw_lines(axis, torch.arange(picture.length), lines)
        axis.set(xlabel="position (tokens)", ylabel="added to the input")
    return figure_svg(figure)


def _draw_curves(axis: Any, curves: Tensor, groups: dict[str, list[int]]) -> None:
    """Draw scores [H, 2T - 1] over distance, a line for each group of heads."""
    farthest = curves.shape[1] // 2
    axis.axvline(0, color="lightgrey", linewidth=0.8)
    lines = {label: curves[heads[0]] for label, heads in groups.items()}
    _draw_lines(axis, torch.arange(-farthest, farthest + 1), lines)
    axis.set(xlabel=DISTANCE, ylabel=ADDED)


def _draw_lines(axis: Any, x: Tensor, lines: dict[str, Tensor]) -> None:
    """Draw lines with a legend; infinite values are omitted."""
    for label, y in lines.items():
        axis.plot(x.tolist(), y.double().round(decimals=DIGITS).tolist(), label=label, linewidth=1.2)
    axis.legend(fontsize=7, frameon=False)
