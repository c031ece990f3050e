"""Commands that measure on this machine: audit checks what a model computes, tune how fast.

The results of an audit are lines, JSON, or a page.
"""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge

from polyformer.cli.commands.options import argument, option
from polyformer.core.errors import InputError
from polyformer.core.ranges import PositiveInt

if TYPE_CHECKING:
    from polyformer.applications.audit import Report, Result, Status

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
