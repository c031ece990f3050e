"""Commands that measure: a model's outputs (audit), its heads (spectrum, ablate), and this machine (tune).

The results of an audit are lines, JSON, or a page.
"""

import importlib.util
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge

from polyformer.cli.commands.inputs import load, model_inputs
from polyformer.cli.commands.options import Device, argument, device, model_settings, option, preset_overrides
from polyformer.core.errors import InputError
from polyformer.core.paths import check_format
from polyformer.core.ranges import PositiveInt

if TYPE_CHECKING:
    from polyformer.applications.audit import Report, Result, Status
    from polyformer.applications.interventions import Ablation
    from polyformer.cli.plots.model import Spectrum
    from polyformer.core.files import Write
    from polyformer.models.architectures import Transformer


AUDIT_EXAMPLES = """examples:
  polyformer audit runs/demo-1
  polyformer audit model.gguf
  polyformer audit gpt2 --json audit.json --page audit.html
  polyformer audit checkpoint/ --checks "left padding,chunks,beams" --length 600
  polyformer audit checkpoint/ --accept accepted.yaml      # lines of CHECK: REASON
"""


@dataclass(frozen=True, kw_only=True)
class AuditOptions:
    """Options of `polyformer audit`."""

    model: str = argument(
        "folder of a trained run or of a checkpoint, a GGUF file, or the name of a model of transformers on "
        "the hub",
        metavar="MODEL",
    )
    checks: str | None = option(
        "names of checks, separated by commas (default: all)", metavar="NAME,NAME,..."
    )
    length: Annotated[int, Ge(12)] = option(
        "tokens of the longest input; more than a sliding window shows faults of its cache (default: 12)", 12
    )
    accept: str | None = option(
        "YAML file of accepted deviations, a line CHECK: REASON for each", metavar="FILE"
    )
    json: str | None = option("write the results to this JSON file", metavar="FILE", output="file")
    page: str | None = option("write the results to this HTML page", metavar="FILE", output="file")


def run_audit(options: AuditOptions) -> None:
    """Audit a model: check that padding, batches, caches, packing and precision do not change its outputs.

    The checks are the contracts of this library's own members, applied to any model of this library or of
    transformers. A finding is a sentence with a figure, the smallest input that shows it, and a line of
    Python that repeats it. Checks that do not concern the model say why. The exit status is 1 with findings.
    A module that is neither kind of model is audited in Python by polyformer.audit(model, call=...).
    """
    from polyformer.applications.audit import accepted_deviations, audit
    from polyformer.core.files import write_output

    accept = {} if options.accept is None else accepted_deviations(options.accept)
    checks = None if options.checks is None else [name.strip() for name in options.checks.split(",")]
    report = audit(options.model, checks=checks, accept=accept, length=options.length, progress=show)
    print(f"\n{report.summary}")
    if options.json is not None:
        write_output(
            options.json, (json.dumps(report.to_dict(), ensure_ascii=False, indent=1) + "\n").encode()
        )
    if options.page is not None:
        write_output(options.page, audit_page(report).encode())
    if report.status:
        sys.exit(report.status)


def show(result: "Result") -> None:
    """Print a result: a line, and how to repeat a finding."""
    from rich.console import Console

    styles = {"passed": "green", "finding": "bold red", "accepted": "yellow", "not applicable": "dim"}
    console = Console(highlight=False, soft_wrap=True)
    console.print(result.status, style=styles[result.status], end="  ")
    console.print(f"{result.name}{': ' if result.sentence else ''}{result.sentence}", markup=False)
    if result.repetition:
        sizes, code = result.repetition
        console.print(f"  smallest input: {sizes}\n  {code}", markup=False)


COLUMNS: "dict[Status, tuple[str, ...]]" = {
    "finding": ("side", "what was found", "smallest input", "repeat it by"),
    "accepted": ("side", "deviation and reason"),
    "not applicable": ("side", "reason"),
    "passed": ("side", "relative difference", "rounding explains"),
}


def audit_page(report: "Report") -> str:
    """Return the results as one HTML page: findings first, then accepted deviations and the other checks."""
    from polyformer.applications.audit import LABELS
    from polyformer.cli.plots.report.page import page, section, table, tiles

    counts = [(name.capitalize(), str(len(report.of(status))), "checks") for status, name in LABELS.items()]
    sections = [section("Summary", "Checks by their result.", tiles(counts))]
    for status, columns in COLUMNS.items():
        rows = {result.name: _cells(result) for result in report.results if result.status == status}
        if rows:
            name = LABELS[status].capitalize()
            sections.append(section(name, f"{len(rows)} checks.", table("", columns, rows)))
    return page(f"Audit of {report.model}", report.summary, sections)


def _cells(result: "Result") -> tuple[str, ...]:
    if result.status == "passed":
        return result.side, f"{result.figure:.1e}", f"{result.limit:.1e}"
    return result.side, result.sentence, *result.repetition


TUNE_EXAMPLES = """examples:
  polyformer tune                                # measure again, for this machine's threads and for one
  polyformer tune --show                         # show the choices in use
  polyformer tune --threads 8 --out tuning.json  # for a server; there: POLYFORMER_TUNING=tuning.json
  POLYFORMER_TUNING=fixed polyformer generate runs/demo-1   # plain torch products, the same everywhere
"""


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """Options of `polyformer tune`."""

    show: bool = option("do not measure; show the machine, the cache file and its choices", False)
    threads: PositiveInt | None = option(
        "number of threads to measure with (default: torch's number of threads, and 1)"
    )
    out: str | None = option(
        "also write the choices to this file, to use on other machines", metavar="FILE", output="file"
    )


def run_tune(options: TuneOptions) -> None:
    """Measure which implementations are fastest on this machine, or show the results.

    Some parts of the library choose between implementations by a measurement: which library computes a matrix
    product, how many queries a tile has. The results are saved in the cache folder by processor, threads and
    versions. Run nothing else on the machine during the measurement.
    """
    from polyformer.core.files import write_output
    from polyformer.core.ops import tuning as store
    from polyformer.core.ops.tuning import description

    if options.show and (options.threads or options.out):
        raise InputError("--show: does not measure; leave out --threads and --out")
    for name, value in description().items():
        print(f"{name}: {value}")
    pinned = store.pinned()
    if options.show:
        choices = store.stored() if pinned is None else pinned
    else:
        choices = {**store.stored(), **_measured(options.threads)}
        _save(store.path(), choices)
        if options.out is not None:
            write_output(options.out, store.as_json(choices))
    where = f"{store.PIN}={os.environ[store.PIN]}" if pinned is not None else str(store.path())
    print(f"choices: {where}")
    _print(choices)


def _measured(number: int | None) -> dict[str, dict[str, object]]:
    import torch

    import polyformer.models.architectures  # noqa: F401 - all parts that ask for choices
    from polyformer.core.ops.cpu import threads
    from polyformer.core.ops.tuning import remeasured

    choices: dict[str, dict[str, object]] = {}
    for count in sorted({1, torch.get_num_threads()} if number is None else {number}):
        with threads(count):
            choices |= remeasured()
    return choices


def _save(file: Path, choices: dict[str, dict[str, object]]) -> None:
    """Save the choices in the cache folder; print the error if that fails."""
    from polyformer.core.ops import tuning as store

    try:
        store.save(file, choices)
    except (InputError, OSError) as error:
        print(f"not saved: {error}")


def _print(choices: dict[str, dict[str, object]]) -> None:
    from polyformer.core.parsing import dump_yaml

    if not choices:
        print("none: defaults apply, and other choices are measured at their first use")
    for name, choice in choices.items():
        print(f"\n{name}:")
        print("\n".join(f"  {line}" for line in dump_yaml(choice).splitlines()))


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
    from polyformer.cli.plots.model import check, spectra, spectrum_table
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
    from polyformer.cli.plots.model import draw_spectra, spectrum_csv

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
    from polyformer.cli.plots.model import draw_head_map
    from polyformer.core.files import write_output

    effects = [{"layer": layer, "head": head, "effect": effect} for layer, head, effect in result.ranking()]
    record = {**settings, "loss": result.loss, "effects": effects}
    table = path.with_suffix(".json")
    write_output(table, (json.dumps(record, ensure_ascii=False, indent=1) + "\n").encode())
    print(f"Written to {table}")
    if path != table:
        draw_head_map(result.effects, settings["model"], "rise of the loss without the head", path)
        print(f"Drawn in {path}")
