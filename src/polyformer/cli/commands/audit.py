"""Audit a model: check that padding, batches, caches, packing and precision do not change its outputs.

The checks are the contracts of this library's own members, applied to any model of this library or of
transformers. A finding is a sentence with a figure, the smallest input that shows it, and a line of Python
that repeats it. Checks that do not concern the model say why. The exit status is 1 with findings. A module
that is neither kind of model is audited in Python by polyformer.audit(model, call=...).
"""

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge

from polyformer.cli.commands.options import argument, option

if TYPE_CHECKING:
    from polyformer.applications.audit import Result

EXAMPLES = """examples:
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


def run(options: AuditOptions) -> None:
    """Print the results and write the files; exit with status 1 if there are findings."""
    from polyformer.applications.audit import accepted_deviations, audit
    from polyformer.cli.plots.audit_page import audit_page
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
