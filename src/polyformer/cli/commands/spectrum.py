"""Show the singular values of a model's attention matrices, by layer and head.

Prints for each layer the share of the largest quarter of the singular values in their sum. A share near 1
means that attention is close to low rank (Wang et al. 2020, Linformer, section 3). Texts are concatenated and
cut into rows of one length without padding. For an encoder-decoder, both stacks are shown, without
cross-attention.
"""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge

from polyformer.cli.commands.model_and_texts import load, model_inputs
from polyformer.cli.commands.options import Device, argument, device, model_settings, option, preset_overrides
from polyformer.core.paths import check_format
from polyformer.core.ranges import PositiveInt

if TYPE_CHECKING:
    from polyformer.cli.plots.heads import Spectrum
    from polyformer.core.files import Write
    from polyformer.models.architectures import Transformer

EXAMPLES = """examples:
  polyformer spectrum runs/demo-1
  polyformer spectrum runs/demo-1 --data notes.txt --length 256 --texts 16 --out spectrum.svg
  polyformer spectrum encoder-tiny                     # random weights
"""

LENGTH = 512


@dataclass(frozen=True, kw_only=True)
class SpectrumOptions:
    """Options of `polyformer spectrum`."""

    model: str = argument(
        "folder of a trained run, or of a model with its tokenizer; or a preset, with random weights"
    )
    data: str | None = option(
        "file or directory of texts (default: the training data of the run, or the default text)",
        metavar="PATH",
    )
    length: Annotated[int, Ge(4)] | None = option(
        "tokens per text (default: 512, or the model's limit if smaller)"
    )
    texts: PositiveInt = option("largest number of texts to average over (default: 8)", 8)
    out: str | None = option(
        "write the curves to this file, .png, .svg or .csv; a figure comes with a .csv file of the same name "
        "(default: spectrum.png in the model's folder; no file for a preset)",
        metavar="FILE",
        output="file",
    )
    device: Device = device()
    changes: dict[str, Any] = model_settings()


def run(options: SpectrumOptions) -> None:
    """Print the table and write the curves."""
    from polyformer.cli.plots.heads import check, spectra, spectrum_table
    from polyformer.core.files import atomic_write, write_output

    path = output_file(options)
    overrides = preset_overrides(options.model, options.changes)
    source = load(options.model, options.data, options.device, overrides)
    check(source.model)
    length = options.length or default_length(source.model)
    results = spectra(source.model, model_inputs(source, length, options.texts))
    for stack, spectrum in results.items():
        number = "1 text" if spectrum.texts == 1 else f"{spectrum.texts} texts"
        print(
            f"\n{stack}, {number} of {length} tokens: "
            f"share of the largest {spectrum.quarter} singular values in their sum\n"
        )
        print(spectrum_table(spectrum))
    if path:
        write(path, results, options.model, atomic_write if options.out is None else write_output)


def output_file(options: SpectrumOptions) -> Path | None:
    """Return the file to write, None for no file; raise `InputError` for an unknown format."""
    if options.out is None:
        return Path(options.model, "spectrum.png") if Path(options.model).is_dir() else None
    check_format(options.out, (".png", ".svg", ".csv"), "--out")
    return Path(options.out)


def default_length(model: "Transformer") -> int:
    """Return `LENGTH`, or the model's limit if smaller."""
    from polyformer.cli.commands.show import longest_text

    return min(LENGTH, longest_text(model.config))


def write(path: Path, results: "dict[str, Spectrum]", title: str, save: "Write") -> None:
    """Write the curves with `save` as .csv and, unless `path` is a .csv, as a figure."""
    from polyformer.cli.plots.heads import draw_spectra, spectrum_csv

    table = path.with_suffix(".csv")
    save(table, spectrum_csv(results).encode())
    print(f"\nWritten to {table}")
    if path.suffix.lower() == ".csv":
        return
    if importlib.util.find_spec("matplotlib") is None:
        print("Not drawn: requires matplotlib; pip install 'polyformer[plot]'")
        return
    draw_spectra(results, title, path, save)
    print(f"Drawn in {path}")
