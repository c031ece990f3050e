"""All claims whose data are there, as processes side by side, and one page of them: OUT/claims.html.

Data sets and checkpoints are looked for in the folder `data` under the names below, or are named one by
one. A claim whose own are not there is listed with what it needs; one without `data` that can do with the
default text is run on that. A claim that takes one seed is run once for each of `seeds`, and counts as
reproduced where every run says so. A second call with the same OUT goes on with what was stopped, failed or
killed. What takes hours takes minutes with --quick, whose figures mean nothing.

    wikitext2, sst2, imdb, multi30k    folders as docs/data.md describes them
    book                               a text file with chapters, book.txt or book.txt.gz
    decoder, encoder, exits            folders of checkpoints: that writes, of sentences, with exits
"""

import dataclasses
import os
from pathlib import Path

from polyformer.bench.experiment import SOURCES
from polyformer.bench.gallery.jobs import Job, jobs_of, measurables, sources_in
from polyformer.bench.gallery.page import write_page
from polyformer.bench.gallery.processes import Processes
from polyformer.core.config import Config
from polyformer.core.errors import InputError, unknown
from polyformer.training.config import at_least


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllClaims(Config):
    """Where data lie, and how much is run at a time; a second call goes on with what OUT holds."""

    data: str | None = None  # the folder of all below
    wikitext2: str | None = None
    sst2: str | None = None
    imdb: str | None = None
    multi30k: str | None = None
    book: str | None = None
    decoder: str | None = None
    encoder: str | None = None
    exits: str | None = None
    only: tuple[str, ...] = ()  # names of claims, by default all
    seeds: tuple[int, ...] = (0, 1, 2)
    jobs: int | None = None  # processes at a time, by default as many as there are cores
    quick: bool = False
    out: str = "runs/claims"

    def __post_init__(self) -> None:
        at_least(1, jobs=1 if self.jobs is None else self.jobs)
        if not self.seeds:
            raise InputError("seeds: expected one or more")
        if self.data is not None and not Path(self.data).is_dir():
            raise InputError(f"data: no such folder: {self.data}")


def run(config: AllClaims) -> Path:
    """Run what is not finished, write the page after each, name what failed; returns where the page is.

    Raises `SystemExit` with status 1 where a claim has failed.
    """
    absent: dict[str, str] = {}
    known = measurables(absent=absent)
    for name in config.only:
        if name not in {*absent, *(each.name for each in known)}:
            raise unknown("only", name, [*absent, *(each.name for each in known)])
    places = sources_in(config.data, {name: getattr(config, name) for name in SOURCES})
    chosen = [each for each in known if not config.only or each.name in config.only]
    out, failures = Path(config.out), dict[Job, str]()
    jobs = jobs_of(chosen, out, places, config.seeds, config.quick)
    waiting = [job for job in jobs if job.config is not None and not job.finished]
    for name, package in absent.items():
        print(f"{name}: not run; needs the package {package}")
    for job in jobs:
        if job.lacks:
            print(f"{job.title}: not run; needs {job.lacks}")
    print(f"{len(jobs)} runs, {len(waiting)} of them to do", flush=True)
    page = write_page(out, jobs, failures, config.quick)

    def ended(job: Job, problem: str) -> None:
        failures[job] = problem
        print(f"{job.title}: {problem or 'done'}", flush=True)
        write_page(out, jobs, failures, config.quick)

    Processes(config.jobs or os.cpu_count() or 1).run(waiting, ended)
    print(f"page: {page}")
    if failed := [job.title for job in waiting if failures.get(job)]:
        print(f"failed: {'; '.join(failed)}; the same command goes on with them")
        raise SystemExit(1)
    return page
