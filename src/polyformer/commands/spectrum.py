"""Show how low in rank a model's attention is: the singular values of every layer's and head's matrix.

The texts are laid end to end and cut into rows of one length, so that no row is padded. Of an encoder-decoder
both stacks are shown, without the attention between them.
"""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from polyformer.commands.base import argument, option
from polyformer.commands.subject import inputs, subject
from polyformer.core.errors import InputError, quote, unknown

if TYPE_CHECKING:
    from polyformer.model import Transformer
    from polyformer.visual.spectrum import Spectrum

EXAMPLES = """examples:
  polyformer spectrum runs/default-1
  polyformer spectrum runs/default-1 --data notes.txt --length 256 --texts 16 --out spectrum.svg
  polyformer spectrum encoder-tiny                     # fresh weights
"""

LENGTH = 512


@dataclass(frozen=True, kw_only=True)
class Options:
    model: str = argument(
        "folder of a run, or of a model with its tokenizer; or a preset, with fresh weights"
    )
    data: str | None = option("texts (default: those that the run was trained on, else the default text)")
    length: int | None = option("tokens of a text (default 512, or as many as the model takes)")
    texts: int = option("the mean is of so many texts at most", 8)
    out: str | None = option(
        "write the curves to this file, .png, .svg or .csv; beside a figure stands a .csv "
        "(default: spectrum.png in the model's folder, of a preset none)"
    )
    device: Literal["auto", "cpu", "cuda"] = option(
        "where to compute (default: CUDA where there is one)", "auto"
    )


def run(options: Options) -> None:
    from polyformer.visual.spectrum import LEAST, check, spectra
    from polyformer.visual.spectrum_figure import spectrum_table

    for name, least in (("length", LEAST), ("texts", 1)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise InputError(f"--{name}: expected {least} or more, got {value}")
    path = target(options)
    found = subject(options.model, options.data, options.device)
    check(found.model)
    length = options.length or default_length(found.model)
    results = spectra(found.model, inputs(found, length, options.texts))
    for side, one in results.items():
        number = "1 text" if one.texts == 1 else f"{one.texts} texts"
        print(
            f"\n{side}, {number} of {length} tokens: "
            f"the share of the greatest {one.quarter} singular values in the sum of all\n"
        )
        print(spectrum_table(one))
    if path:
        write(path, results, options.model)


def target(options: Options) -> Path | None:
    """The file to write."""
    if options.out is None:
        return Path(options.model, "spectrum.png") if Path(options.model).is_dir() else None
    formats = ".png", ".svg", ".csv"
    if Path(options.out).suffix.lower() not in formats:
        raise unknown(f"format of --out {quote(options.out)}", Path(options.out).suffix, formats)
    return Path(options.out)


def default_length(model: "Transformer") -> int:
    from polyformer.commands.show import reach

    return min(LENGTH, reach(model.config))


def write(path: Path, results: "dict[str, Spectrum]", title: str) -> None:
    """The curves as .csv and, unless `path` is that, as a figure."""
    from polyformer.core.files import atomic_write
    from polyformer.visual.spectrum_figure import draw_spectra, spectrum_csv

    table = path.with_suffix(".csv")
    atomic_write(table, spectrum_csv(results).encode())
    print(f"\nWritten to {table}")
    if path.suffix.lower() == ".csv":
        return
    if importlib.util.find_spec("matplotlib") is None:
        print("Not drawn: that needs matplotlib; pip install 'polyformer[plot]'")
        return
    draw_spectra(results, title, path)
    print(f"Drawn in {path}")
