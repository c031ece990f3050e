"""Which runs a gallery is made of: for every experiment its settings, its folder, and what it lacks."""

import dataclasses
import importlib
import json
import pkgutil
import shlex
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from polyformer.bench import reproduce
from polyformer.bench.experiment import RECORD, SOURCES, Experiment, concluded
from polyformer.core.config import Config
from polyformer.core.errors import InputError


@dataclasses.dataclass(frozen=True)
class Measurable:
    """A module of `bench/reproduce`: its name as it is typed, its statement, `run`, its settings' class."""

    name: str
    experiment: Experiment
    run: Callable[[Any], object]
    settings: type[Config]


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
    """A run: `config` into `folder`, of one seed where the experiment takes one; `lacks`: data not there."""

    of: Measurable
    folder: Path
    options: Mapping[str, Any]
    config: Config | None
    seed: int | None = None
    lacks: str = ""

    @property
    def title(self) -> str:
        """What it is called where it is spoken of."""
        return self.of.name + (f", seed {self.seed}" if self.seed is not None else "")

    @property
    def command(self) -> str:
        """How it is run alone."""
        words = ["polyformer", "reproduce", self.of.name]
        for name, value in self.options.items():
            values = value if isinstance(value, list | tuple) else [value]
            words += [f"--{name.replace('_', '-')}", *map(_word, values or [[]])]
        return shlex.join(words)

    @property
    def finished(self) -> bool:
        """A run of these settings has come to its end here. `InputError` where it was one of others."""
        record = concluded(self.folder)
        if record is None or self.config is None:
            return False
        if record["settings"] != json.loads(json.dumps({**self.config.to_dict(), "out": None})):
            raise InputError(
                f"{self.folder / RECORD}: of a run with other settings; choose another place with --out"
            )
        return True


def _word(value: Any) -> str:
    """A value as it is typed."""
    return value if isinstance(value, str) else json.dumps(value)


def measurables(names: Sequence[str] = (), absent: dict[str, str] | None = None) -> list[Measurable]:
    """All modules that state an experiment, or those of these names.

    absent: gets the modules that cannot be imported for want of a package, and the package; an `ImportError`
    without it.
    """
    results = []
    for name in sorted(module.name for module in pkgutil.iter_modules(reproduce.__path__)):
        word = name.replace("_", "-")
        if names and word not in names:
            continue
        try:
            module = importlib.import_module(f"{reproduce.__name__}.{name}")
        except ImportError as error:
            if absent is None:
                raise
            absent[word] = error.name or str(error)
            continue
        if hasattr(module, "EXPERIMENT"):
            hints = typing.get_type_hints(module.run)
            results.append(Measurable(word, module.EXPERIMENT, module.run, hints["config"]))
    return results


def sources_in(root: str | None, named: Mapping[str, str | None]) -> dict[str, str]:
    """Where each of `SOURCES` lies: as named, else under its name in `root`; those that are nowhere left out.

    Raises `InputError` for a path that is not there.
    """
    places = {}
    for name in SOURCES:
        path = named.get(name)
        if path is not None and not Path(path).exists():
            raise InputError(f"{name}: no such file or folder: {path}")
        endings = (".txt", ".txt.gz") if name == "book" else ("",)
        inside = [Path(root, name + ending) for ending in endings] if root is not None else []
        there = [Path(path)] if path is not None else [place for place in inside if place.exists()]
        if there:
            places[name] = str(there[0].absolute())
    return places


def jobs_of(
    all_of: Sequence[Measurable], out: Path, places: Mapping[str, str], seeds: Sequence[int], quick: bool
) -> list[Job]:
    """The runs of these experiments, a run a seed where their settings take one."""
    jobs = []
    for each in all_of:
        options = dict(each.experiment.quick) if quick else {}
        wanted = each.experiment.sources
        options |= {name: places[source] for name, source in wanted.items() if source in places}
        takes_one = "seed" in {field.name for field in dataclasses.fields(each.settings)}
        for seed in seeds[: 1 if quick else None] if takes_one else (None,):
            own = {**options, **({} if seed is None else {"seed": seed})}
            folder = out / each.name if seed is None else out / each.name / f"seed-{seed}"
            absent = [f"{name} ({SOURCES[name]})" for name in wanted.values() if name not in places]
            try:
                config = each.settings.from_dict({**_listed(own), "out": str(folder.absolute())})
            except InputError:
                if not absent:
                    raise
                jobs.append(Job(each, folder, own, None, seed, "; ".join(absent)))
            else:
                jobs.append(Job(each, folder, own, config, seed))
    return jobs


def _listed(options: Mapping[str, Any]) -> dict[str, Any]:
    """Tuples as a file would have them."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()}
