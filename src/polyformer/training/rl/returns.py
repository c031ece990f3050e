"""Achieved returns compared with target returns, as lines of text and as a figure."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from polyformer.core.figures import new_figure, save_figure

Achieved = Mapping[float, Sequence[float]]
"""The returns of the episodes by target return."""


@dataclasses.dataclass(frozen=True)
class Panel:
    """A panel of the figure: achieved returns with a band of their spread, and reference levels by name."""

    title: str
    achieved: Achieved
    levels: Mapping[str, float]


def returns_table(achieved: Achieved, mean_return: float | None) -> list[str]:
    """Return a line per target return: mean, deviation, minimum and maximum of the achieved returns."""
    lines = [f"{'asked':>10}{'achieved':>12}{'deviation':>12}{'least':>10}{'largest':>10}"]
    for asked, returns in sorted(achieved.items()):
        lines.append(
            f"{asked:>10.4g}{np.mean(returns):>12.4g}{np.std(returns):>12.3g}{min(returns):>10.4g}"
            f"{max(returns):>10.4g}"
        )
    if mean_return is not None:
        lines.append(f"mean of the training episodes: {mean_return:.4g}")
    return lines


def draw_returns(path: Path, panels: Sequence[Panel]) -> None:
    """Draw the panels to `path`; bands are one standard deviation. Raises `InputError` without matplotlib."""
    figure = new_figure(5 * len(panels), 4.2)
    for axis, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels):
        asked = sorted(panel.achieved)
        means = np.array([np.mean(panel.achieved[each]) for each in asked])
        spread = np.array([np.std(panel.achieved[each]) for each in asked])
        axis.plot(asked, asked, color="gray", linestyle=":", label="as asked")
        axis.plot(asked, means, marker="o", label="achieved")
        axis.fill_between(asked, means - spread, means + spread, alpha=0.2)
        for number, (name, level) in enumerate(panel.levels.items(), 1):
            axis.axhline(level, color=f"C{number}", linestyle="--", label=name)
        axis.set_title(panel.title)
        axis.set_xlabel("return asked for")
        axis.set_ylabel("return achieved")
        axis.grid(alpha=0.3)
        axis.legend(frameon=False, fontsize="small")
    save_figure(figure, path)
