"""Measure which implementations are fastest on this machine, or show the results.

Some parts of the library choose between implementations by a measurement: which library computes a matrix
product, how many queries a tile has. The results are saved in the cache folder by processor, threads and
versions. Run nothing else on the machine during the measurement.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from polyformer.cli.commands.options import option
from polyformer.core.errors import InputError
from polyformer.core.ranges import PositiveInt

EXAMPLES = """examples:
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


def run(options: TuneOptions) -> None:
    """Measure or show the choices."""
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
