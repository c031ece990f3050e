"""The figure of a fitted pattern: what every head got, and the quality at each budget."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polyformer.applications.pattern_fitting import FittedPattern
from polyformer.attention.patterns import Pattern
from polyformer.cli.commands.before_after import Comparison, TextMeasurement
from polyformer.core.files import Write
from polyformer.core.measuring import new_figure, save_figure


@dataclasses.dataclass(frozen=True, eq=False)
class FitQuality:
    """Dense and sparse attention compared on a text. before, after: the scores of tasks, from 0 to 1."""

    row: Comparison
    before: Mapping[str, float]
    after: Mapping[str, float]


def short_text(pattern: Pattern) -> str:
    """Return the expression of a pattern without the names of options."""
    return re.sub(r"\w+=", "", pattern.to_text())


def draw_fit(
    fits: Sequence[FittedPattern],
    results: Sequence[FitQuality],
    title: str,
    path: Path,
    write: Write,
) -> None:
    """Draw the share of the pairs of each head of the last fit, and the quality by budget if it is measured.

    `write` saves the figure; the suffix of `path` determines the format. Raises `InputError` without
    matplotlib.
    """
    shares = fits[-1].shares
    layers, heads = shares.shape
    figure = new_figure(4.5 + 4 * bool(results), 1.5 + 0.2 * layers)
    heat, *others = figure.subplots(1, 1 + bool(results), squeeze=False)[0]
    # A logarithm shows windows of all sizes.
    visible = shares.clamp_min(1e-3).numpy()
    shown = heat.imshow(visible, aspect="auto", norm="log", vmin=1e-3, vmax=1, cmap="Blues")
    bar = figure.colorbar(shown, ax=heat, label="pairs of a head", ticks=[1e-3, 1e-2, 1e-1, 1])
    bar.set_ticklabels(["0.1 %", "1 %", "10 %", "100 %"])
    heat.set(title=f"{fits[-1].share:.1%} of all pairs", xlabel="head", ylabel="layer", xticks=range(heads))
    for axes in others:
        _draw_quality(axes, fits, results)
    figure.suptitle(title, fontsize=10)
    save_figure(figure, path, write)


def _draw_quality(axes: Any, fits: Sequence[FittedPattern], results: Sequence[FitQuality]) -> None:
    """Draw perplexity, or the similarity of vectors, and the scores of tasks, by the share of the pairs."""
    shares = [fit.share for fit in fits]
    name = "similarity" if results[0].row.embeds else "perplexity / dense"
    axes.plot(shares, [quality(result.row) for result in results], marker="o", label=name)
    for task in results[0].after:
        axes.plot(shares, [result.after[task] for result in results], marker="s", label=task)
    axes.set(xlabel="share of all pairs", xscale="log")
    axes.set_xticks(shares, [f"{share:.0%}" for share in shares])
    axes.minorticks_off()
    axes.legend(frameon=False)


def quality(row: Comparison) -> float:
    """Return the similarity of the vectors, or the ratio of the perplexities, after to before."""
    if row.similarity is not None:
        return row.similarity
    assert isinstance(row.before, TextMeasurement)
    assert isinstance(row.after, TextMeasurement)
    return row.after.perplexity / row.before.perplexity
