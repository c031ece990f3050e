"""Measure which settings are fastest on this machine, or show the measured settings.

Each part of the library measures once which of its variants is fastest here: for example the library for a
matrix product, or the number of queries in a tile. The choices are stored in the cache folder, by processor,
threads and versions. Do not run anything else meanwhile.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from polyformer.cli.commands.options import option
from polyformer.core.errors import InputError

EXAMPLES = """examples:
  polyformer tune                                # measure again, for this machine's threads and for one
  polyformer tune --show                         # the choices in use
  polyformer tune --threads 8 --out tuning.json  # for a server; there: POLYFORMER_TUNING=tuning.json
  POLYFORMER_TUNING=fixed polyformer generate runs/demo-1   # plain torch products, the same everywhere
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `polyformer tune` takes."""

    show: bool = option("only show the machine, the file and the choices in it", False)
    threads: int | None = option("number of threads to measure for (default: torch's default, and one)")
    out: str | None = option(
        "also write the choices to this file, to pin them on other machines", metavar="FILE", output="file"
    )


def run(options: Options) -> None:
    """Measure or show."""
    from polyformer.core.files import write_output
    from polyformer.core.ops.tuning import store
    from polyformer.core.ops.tuning.machine import described

    if options.show and (options.threads or options.out):
        raise InputError("--show: measures and writes nothing; leave out --threads and --out")
    if options.threads is not None and options.threads < 1:
        raise InputError(f"--threads: expected 1 or more, got {options.threads}")
    for name, value in described().items():
        print(f"{name}: {value}")
    pinned = store.pinned()
    if options.show:
        choices = store.kept() if pinned is None else pinned
    else:
        choices = {**store.kept(), **_measured(options.threads)}
        _save(store.path(), choices)
        if options.out is not None:
            write_output(options.out, store.encoded(choices))
    where = f"{store.PIN}={os.environ[store.PIN]}" if pinned is not None else str(store.path())
    print(f"choices: {where}")
    _print(choices)


def _measured(number: int | None) -> dict[str, dict[str, object]]:
    import torch

    import polyformer.models.architectures  # noqa: F401 - all parts that ask for choices
    from polyformer.core.ops.tuning.section import remeasured
    from polyformer.core.ops.workers import threads

    choices: dict[str, dict[str, object]] = {}
    for count in sorted({1, torch.get_num_threads()} if number is None else {number}):
        with threads(count):
            choices |= remeasured()
    return choices


def _save(file: Path, choices: dict[str, dict[str, object]]) -> None:
    """Keep the choices where the library looks for them; say so where they cannot be kept."""
    from polyformer.core.ops.tuning import store

    try:
        store.save(file, choices)
    except (InputError, OSError) as error:
        print(f"not kept: {error}")


def _print(choices: dict[str, dict[str, object]]) -> None:
    from polyformer.core.parsing import dump_yaml

    if not choices:
        print("none: what is fixed in the code, or measured when first needed")
    for name, choice in choices.items():
        print(f"\n{name}:")
        print("\n".join(f"  {line}" for line in dump_yaml(choice).splitlines()))
