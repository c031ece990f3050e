"""Spectra as a table of text, as rows of numbers, and as a figure."""

import csv
import io
import math
from collections.abc import Mapping
from pathlib import Path

from polyformer.cli.plots.spectrum import Spectrum
from polyformer.core.figures import new_figure, save_figure
from polyformer.core.files import Write


def spectrum_table(spectrum: Spectrum) -> str:
    """Return a row for each layer: share(n / 4) of every head, and their mean."""
    heads = range(spectrum.at_quarter.shape[1])
    lines = [f"{'layer':>5}" + "".join(f"{f'head {head}':>9}" for head in heads) + f"{'mean':>9}"]
    for layer, row in enumerate(spectrum.at_quarter):
        lines.append(
            f"{layer:>5}" + "".join(f"{share:>9.4f}" for share in [*row.tolist(), row.mean().item()])
        )
    return "\n".join(lines)


def spectrum_csv(spectra: Mapping[str, Spectrum]) -> str:
    """Return the columns stack, layer, head, index i, share(i): a row for each singular value."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["stack", "layer", "head", "index", "share"])
    for side, spectrum in spectra.items():
        for layer, heads in enumerate(spectrum.curves.tolist()):
            for head, curve in enumerate(heads):
                rows.writerows([side, layer, head, i, f"{share:.6g}"] for i, share in enumerate(curve, 1))
    return text.getvalue()


def draw_spectra(spectra: Mapping[str, Spectrum], title: str, path: Path, write: Write) -> None:
    """Draw a row for each stack: the curves of its layers (means over heads), and share(n / 4) of all heads.

    `write` saves the figure; the suffix of `path` determines the format. Raises `InputError` without
    matplotlib.
    """
    figure = new_figure(9.5, 3.6 * len(spectra) + 0.4)
    rows = figure.subplots(len(spectra), 2, squeeze=False)
    for (curves, heat), (side, spectrum) in zip(rows, spectra.items()):
        layers, heads = spectrum.at_quarter.shape
        colours = figure_colours(layers)
        index = range(1, spectrum.length + 1)
        for layer, curve in enumerate(spectrum.curves.mean(1).tolist()):
            curves.plot(index, curve, color=colours[layer], label=f"layer {layer}")
        curves.axvline(spectrum.quarter, color="0.7", linewidth=1, linestyle=":")
        curves.set(
            title=f"{side}: means over heads",
            xlabel="singular values",
            ylabel="share of their sum",
            xlim=(0, spectrum.length),
            ylim=(0, 1.02),
        )
        curves.legend(fontsize=7, frameon=False, loc="lower right", ncol=1 + (layers - 1) // 8)
        least = math.floor(20 * spectrum.at_quarter.min().item()) / 20  # colours from a round number up to 1
        shown = heat.imshow(spectrum.at_quarter.numpy(), aspect="auto", vmin=least, vmax=1)
        figure.colorbar(shown, ax=heat)
        heat.set(
            title=f"{side}: share of the greatest {spectrum.quarter}",
            xlabel="head",
            ylabel="layer",
            xticks=range(heads),
            yticks=range(layers),
        )
    figure.suptitle(title, fontsize=10)
    save_figure(figure, path, write)


def figure_colours(number: int) -> list[tuple[float, float, float]]:
    """Return shades from light (the first layer) to dark."""
    steps = [layer / max(number - 1, 1) for layer in range(number)]
    return [(0.75 - 0.7 * step, 0.8 - 0.6 * step, 0.9 - 0.45 * step) for step in steps]
