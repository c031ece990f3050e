"""Commands that measure every attention head of a model on texts: spectrum, ablate."""

import importlib.util
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge

from polyformer.cli.commands.inputs import load, model_inputs
from polyformer.cli.commands.options import Device, argument, device, model_settings, option, preset_overrides
from polyformer.core.paths import check_format
from polyformer.core.ranges import PositiveInt

if TYPE_CHECKING:
    from polyformer.applications.interventions import Ablation
    from polyformer.cli.plots.heads import Spectrum
    from polyformer.core.files import Write
    from polyformer.models.architectures import Transformer

SPECTRUM_EXAMPLES = """examples:
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


def run_spectrum(options: SpectrumOptions) -> None:
    """Show the singular values of a model's attention matrices, by layer and head.

    Prints for each layer the share of the largest quarter of the singular values in their sum. A share near 1
    means that attention is close to low rank (Wang et al. 2020, Linformer, section 3). Texts are concatenated
    and cut into rows of one length without padding. For an encoder-decoder, both stacks are shown, without
    cross-attention.
    """
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
        write_spectrum(path, results, options.model, atomic_write if options.out is None else write_output)


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


def write_spectrum(path: Path, results: "dict[str, Spectrum]", title: str, save: "Write") -> None:
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


ABLATE_EXAMPLES = """examples:
  polyformer ablate runs/demo-1 --text notes.txt
  polyformer ablate model.gguf --text notes.txt --length 256 --texts 4 --by zero --out heads.svg
  polyformer ablate model.gguf --text notes.txt --estimate --out heads.json
"""


@dataclass(frozen=True, kw_only=True)
class AblateOptions:
    """Options of `polyformer ablate`."""

    model: str = argument(
        "folder of a trained run of a decoder, or of a checkpoint with its tokenizer; a GGUF file; or a "
        "preset, with random weights"
    )
    text: str | None = option(
        "file or directory of texts (default: the training data of the run, or the default text)",
        metavar="PATH",
    )
    length: Annotated[int, Ge(2)] | None = option(
        "tokens per text (default: 512, or the model's limit if smaller)"
    )
    texts: PositiveInt = option("largest number of texts (default: 2)", 2)
    by: Literal["mean", "zero"] = option("output of a head that is left out (default: mean)", "mean")
    estimate: bool = option("estimate all effects to first order, from gradients", False)
    top: PositiveInt = option("heads to print (default: 10)", 10)
    out: str | None = option(
        "write all effects to this file, .json, .png or .svg; a figure comes with a .json file of its name",
        metavar="FILE",
        output="file",
    )
    device: Device = device()
    changes: dict[str, Any] = model_settings()


def run_ablate(options: AblateOptions) -> None:
    """Show which attention heads a decoder needs: the rise of the loss of a text without each head.

    The output of a head is replaced by its mean over the text, or by zero. Prints the loss and the heads with
    the largest effects, and those that harm. --estimate computes all heads from a backward pass per text, to
    first order. Texts are concatenated and cut into rows of one length without padding.
    """
    from polyformer.applications.interventions import ablate
    from polyformer.core.ops.cpu import model_threads

    if options.out is not None:
        check_format(options.out, (".json", ".png", ".svg"), "--out")
    overrides = preset_overrides(options.model, options.changes)
    source = load(options.model, options.text, options.device, overrides)
    length = options.length or default_length(source.model)
    rows = [row["input_ids"] for row in model_inputs(source, length, options.texts)]
    with model_threads(source.model):
        result = ablate(source.model, rows, options.by, options.estimate, show_progress)
    print_table(result, options.top)
    if options.out is not None:
        settings = {"model": options.model, "texts": len(rows), "length": length, "by": options.by}
        write_effects(Path(options.out), result, settings | {"estimate": options.estimate})


def show_progress(done: int, total: int) -> None:
    """Print the number of finished texts to standard error."""
    print(f"text {done} of {total}", file=sys.stderr, flush=True)


def print_table(result: "Ablation", top: int) -> None:
    """Print the loss, the `top` heads by effect, and the heads that raise the loss by being present."""
    from rich.console import Console
    from rich.table import Table

    ranking = result.ranking()
    table = Table()
    for heading in ("layer", "head", "rise of the loss without it"):
        table.add_column(heading, justify="right")
    for layer, head, effect in ranking[:top]:
        table.add_row(str(layer), str(head), f"{effect:+.4f}")
    console = Console(width=100, highlight=False)
    console.print(f"loss {result.loss:.4f} nats per token")
    console.print(table)
    without = sum(effect <= 0 for *_, effect in ranking)
    console.print(f"{without} of {len(ranking)} heads do not lower the loss")


def write_effects(path: Path, result: "Ablation", settings: dict[str, Any]) -> None:
    """Write the effects as JSON, and as a heat map unless `path` is a .json file."""
    from polyformer.cli.plots.heads import draw_head_map
    from polyformer.core.files import write_output

    effects = [{"layer": layer, "head": head, "effect": effect} for layer, head, effect in result.ranking()]
    record = {**settings, "loss": result.loss, "effects": effects}
    table = path.with_suffix(".json")
    write_output(table, (json.dumps(record, ensure_ascii=False, indent=1) + "\n").encode())
    print(f"Written to {table}")
    if path != table:
        draw_head_map(result.effects, settings["model"], "rise of the loss without the head", path)
        print(f"Drawn in {path}")
