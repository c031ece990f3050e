"""Run an experiment (a published claim or your own YAML file): a grid of runs, with a table and a page."""

import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyformer.cli.commands.options import argument, option, recipe_settings
from polyformer.core.errors import InputError, unknown
from polyformer.core.parsing import dump_yaml
from polyformer.core.ranges import PositiveInt

if TYPE_CHECKING:
    from polyformer_lab.study import Study

EXAMPLES = """examples:
  polyformer reproduce warmup                          # post-norm needs warm-up, pre-norm does not
  polyformer reproduce warmup --training.steps 100     # any setting of the recipe
  polyformer reproduce warmup --print > mine.yaml      # the experiment as a file, to change
  polyformer reproduce mine.yaml --jobs 2              # your own experiment, two runs in parallel
  polyformer reproduce extrapolation --data DIR        # ALiBi: train short, test long; DIR has WikiText-2
  polyformer reproduce knn-lm --wikitext2 DIR --decoder DIR   # each source by its name
  polyformer reproduce all --quick                     # every claim for a few seconds, and an overview page
  polyformer reproduce all --data DIR --jobs 2         # all claims with data in DIR; a second call resumes
"""


@dataclass(frozen=True, kw_only=True)
class ReproduceOptions:
    """Options of `polyformer reproduce`."""

    claim: str = argument("a claim, a YAML file, or 'all'")
    data: str | None = option(
        "folder with the data sets by name, or with the single data set of the claim", metavar="DIR"
    )
    wikitext2: str | None = option("the folder of WikiText-2", metavar="DIR")
    sst2: str | None = option("the folder of SST-2", metavar="DIR")
    imdb: str | None = option("the folder of IMDB", metavar="DIR")
    multi30k: str | None = option("the folder of Multi30k", metavar="DIR")
    mnist: str | None = option("the IDX file of MNIST's images", metavar="FILE")
    book: str | None = option("the text file of a book with chapters", metavar="FILE")
    decoder: str | None = option("the folder of a decoder checkpoint", metavar="DIR")
    encoder: str | None = option("the folder of a sentence encoder", metavar="DIR")
    exits: str | None = option("the folder of a checkpoint with exits", metavar="DIR")
    out: str | None = option(
        "output folder (default: runs/CLAIM, or runs/CLAIM-quick)", metavar="DIR", output="folder"
    )
    seeds: tuple[int, ...] = option("seeds that replace those of the experiment", ())
    only: tuple[str, ...] = option("for 'all': only these claims", (), metavar="CLAIM")
    jobs: PositiveInt | None = option(
        "runs in parallel, one process each (default: 1; for 'all' one per core)"
    )
    quick: bool = option("very small sizes, so that a run takes seconds; the results are meaningless", False)
    print: bool = option("print the experiment as YAML and do not run it", False)
    changes: dict[str, Any] = recipe_settings("--training.steps 100 or --measure.lengths '[128, 256]'")


def claims() -> list[str]:
    """Return the names of all claims, as they are typed."""
    from polyformer_lab.study import study_names

    return [*study_names(), "all"]


def details(argv: list[str]) -> str:
    """Return the settings of the named experiment, or the names of all experiments."""
    from polyformer_lab.study import Study

    if argv and argv[0] in claims()[:-1]:
        return dump_yaml(Study.load(argv[0]).written())
    text = f"claims: {', '.join(claims())}"
    return textwrap.fill(text, 100, subsequent_indent="  ", break_on_hyphens=False)


def run(options: ReproduceOptions) -> None:
    """Run the experiment and print its results."""
    from polyformer_lab import engine
    from polyformer_lab.machine import SOURCES
    from polyformer_lab.rules import check_labels
    from polyformer_lab.study import Study

    if options.data is not None and not Path(options.data).exists():
        raise InputError(f"--data: no such file or folder: {options.data}")
    studies = [Study.load(name) for name in _names(options)]
    for study in studies:
        check_labels(study)  # of the whole grid, which `--quick` may make smaller
    studies = [_changed(study, options) for study in studies]
    if options.print:
        print(dump_yaml(studies[0].written()), end="")
        return
    name = "claims" if options.claim == "all" else studies[0].name
    out = Path(options.out or f"runs/{name}{'-quick' * options.quick}")
    named = {name: getattr(options, name) for name in SOURCES}
    running = []
    for study in studies:
        own = {name: path for name, path in named.items() if options.claim != "all" or name in study.needs}
        folder = out / study.name if options.claim == "all" else out
        command = f"polyformer reproduce {study.name if options.claim == 'all' else options.claim}"
        running.append(engine.opened(study, folder, options.data, own, command))
    engine.run(running, out / "claims.html", options.jobs, options.quick)


def _names(options: ReproduceOptions) -> list[str]:
    if options.claim != "all":
        return [options.claim]
    known = claims()[:-1]
    for name in options.only:
        if name not in known:
            raise unknown("claim", name, known)
    return [name for name in known if not options.only or name in options.only]


def _changed(study: "Study", options: ReproduceOptions) -> "Study":
    study = study.in_quick() if options.quick else study
    if options.seeds and study.seeds:
        study = study.changed({"seeds": options.seeds})
    return study.changed(options.changes) if options.changes else study
