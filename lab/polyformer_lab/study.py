"""`Study`: a grid of runs over a base recipe, the measurement of each run, and the claims to decide.

A study is a YAML file. docs/experiments.md explains it with an example; `lab/claims` has the library's
studies.

The grid has axes with labels and their changes, and axes that list the values of one setting.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from polyformer.core.config import Config, decode
from polyformer.core.errors import InputError, quote
from polyformer.core.files import read_bounded
from polyformer.core.parsing import parse_yaml, parse_yaml_texts
from polyformer.core.ranges import CELLS, YAML_BYTES
from polyformer.core.registry import unknown_name
from polyformer.training.recipes import Recipe
from polyformer.training.recipes.recipe import merged, nested

GENERATE = "generate"
"""The key of an axis with labels that a function returns."""

MEASURE, PREPARE = "measure", "prepare"
"""Sections of a change that do not belong to the recipe."""

SECTIONS = (*(field.name for field in dataclasses.fields(Recipe)), MEASURE, PREPARE)
"""What the name of a setting starts with."""


def with_written_labels(data: dict[str, Any], texts_of_file: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a study's file with the labels of its grids as texts.

    Args:
        data: the content, in which the label 3e-3 is the number 0.003.
        texts_of_file: the same content in the same order, in which every scalar is a text as in the file.
    """
    result = dict(data)
    if "grid" in data:
        result["grid"] = _labelled(data["grid"], texts_of_file["grid"])
    if isinstance(quick := data.get("quick"), dict) and "grid" in quick:
        result["quick"] = {**quick, "grid": _labelled(quick["grid"], texts_of_file["quick"]["grid"])}
    return result


def _labelled(grid: object, texts_of_file: Any) -> object:
    if not isinstance(grid, dict):
        return grid
    axes = {}
    for axis, levels in grid.items():
        texts = texts_of_file.get(str(axis), levels)
        axes[axis] = levels
        if isinstance(levels, dict) and GENERATE not in levels:
            axes[axis] = dict(zip(map(str, texts), levels.values()))
        elif isinstance(levels, list) and _are_values(levels):
            axes[axis] = _levels(axis, levels, [*map(str, texts)])
    return axes


def checked_grid(grid: object) -> dict[str, Any]:
    """Return a grid with labels and changes on every axis.

    Raises:
        InputError: an axis has neither labels with their changes nor values of the setting that it names.
    """
    axes = decode(dict[str, Any], grid, "grid")
    return {axis: _checked_axis(axis, levels) for axis, levels in axes.items()}


def _checked_axis(axis: object, levels: Any) -> dict[Any, Any]:
    if isinstance(levels, list) and _are_values(levels):
        levels = _levels(axis, levels, [*map(str, levels)])
    if not isinstance(levels, dict) or not levels:
        raise InputError(
            f"grid.{axis}: expected labels with their changes, or the values of a setting that the axis "
            f"names, as in optimizer.lr: [1e-3, 3e-3]; got {quote(levels)}"
        )
    for label, changes in {} if GENERATE in levels else levels.items():
        if not isinstance(changes or {}, dict) or not all(isinstance(name, str) for name in changes or ()):
            raise InputError(
                f"grid.{axis}.{label}: expected settings by their dotted names, as in "
                f"{{model.block: post}}, got {quote(changes)}"
            )
    return levels


def _are_values(levels: list[Any]) -> bool:
    """Return whether a list is not empty and has only numbers, texts, truth values and nulls."""
    return bool(levels) and all(isinstance(value, str | int | float | None) for value in levels)


def _levels(axis: object, values: list[Any], labels: list[str]) -> dict[str, Any]:
    """Return the labels of an axis that is named like a setting, each with the value of the setting.

    Raises:
        InputError: no setting has the name of the axis, or two values have the same label.
    """
    if str(axis).partition(".")[0] not in SECTIONS:
        raise InputError(
            f"grid.{axis}: a list has the values of the setting that its axis names, as in "
            f"optimizer.lr: [1e-3, 3e-3]; no setting starts with {quote(axis)}, so write labels with "
            f"changes, as in {{{labels[0]}: {{optimizer.lr: {labels[0]}}}}}"
        )
    if len({*labels}) < len(labels):
        raise InputError(f"grid.{axis}: expected different values, got {quote(values)}")
    return {label: {str(axis): value} for label, value in zip(labels, values)}


def same_label(wanted: object, known: Iterable[str]) -> str | None:
    """Return the label in `known` that an expression means: the same text, or the same number.

    In an expression 3e-3 is a number, and the label of the grid the text "3e-3". None if no label fits.
    """
    labels = list(known)
    if str(wanted) in labels:
        return str(wanted)
    if isinstance(wanted, int | float):
        return next((label for label in labels if _number(label) == wanted), None)
    return None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


CLAIMS = next(
    folder
    for folder in (Path(__file__).parent / "claims", Path(__file__).parents[1] / "claims")
    if folder.is_dir()
)
"""The folder of the library's studies: inside the package if it is installed, next to it in a checkout."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim(Config):
    """A statement, and the rule that decides from the results whether it holds.

    A published statement, with its source, is reproduced or not; a hypothesis without a source
    is supported or not.

    define: expressions by name, which later definitions and the conditions may use. shown: conditions without
    which the runs cannot decide. holds: conditions under which it holds.
    """

    claim: str = ""
    source: str = ""
    published: str = ""
    measured: str = ""
    scale: str = ""
    rule: str = ""
    define: dict[str, Any] = dataclasses.field(default_factory=dict)
    shown: tuple[str, ...] = ()
    holds: tuple[str, ...] = ()

    @property
    def is_published(self) -> bool:
        """Return whether this is the statement of a source, rather than a hypothesis of the user."""
        return bool(self.source or self.published)


OF_A_CLAIM = tuple(field.name for field in dataclasses.fields(Claim))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plot(Config):
    """The curve of a study: a metric over an axis, a line for each combination of the other labels."""

    x: str
    y: str
    log: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study(Config):
    """A grid of runs and the claims about it.

    needs: data sets and checkpoints by name, "required" or "optional"; without an optional text the
        default text is read.
    base: a recipe, with `recipe: NAME` as a start; empty if the study trains no model.
    grid: by axis and label the changes of the recipe, in dotted names; `measure.NAME` changes an option of
        the measurement, and `train: false` omits the recipe. An axis `{generate: NAME}` has the labels
        that a registered function returns. The name of a setting with a list, `optimizer.lr: [1e-3, 3e-3]`,
        is an axis with the values as labels, as they are written.
    seeds: empty for a study without random numbers.
    metrics: the columns of the table, by default all.
    quick: changes for a run of some seconds, with another `grid` or `seeds` if necessary.
    alone: times are measured, so that no other process may run at the same time.
    """

    name: str = ""
    claims: dict[str, Any] = dataclasses.field(default_factory=dict)
    note: str = ""
    needs: dict[str, str] = dataclasses.field(default_factory=dict)
    prepare: dict[str, Any] = dataclasses.field(default_factory=dict)
    base: dict[str, Any] = dataclasses.field(default_factory=dict)
    grid: dict[str, Any] = dataclasses.field(default_factory=dict)
    seeds: tuple[int, ...] = ()
    measure: dict[str, Any] = dataclasses.field(default_factory=lambda: {"kind": "scores"})
    metrics: tuple[str, ...] = ()
    plot: Plot | None = None
    quick: dict[str, Any] = dataclasses.field(default_factory=dict)
    alone: bool = False

    @classmethod
    def load(cls, name: str) -> Self:
        """Read one of the library's studies by its name, or a YAML file.

        Raises:
            InputError: there is no such study, or the file is no study.
        """
        file = Path(name) if name.endswith((".yaml", ".yml")) else CLAIMS / f"{name}.yaml"
        if file.parent == CLAIMS and name not in study_names():
            raise unknown_name("claim", name, study_names())
        text = read_bounded(file, YAML_BYTES)
        data = parse_yaml(text, file)
        if not isinstance(data, dict):
            raise InputError(f"{file}: expected a mapping of claim, base, grid and so on, got {quote(data)}")
        try:
            return cls.from_dict(
                {"name": file.stem, **with_written_labels(data, parse_yaml_texts(text, file))}
            )
        except InputError as error:
            raise InputError(f"{file}: {error}") from error

    @classmethod
    def from_dict(cls, data: object, where: str = "") -> Self:
        """Read a study; the keys of a claim may be at the top level, for its only claim or all its claims."""
        if isinstance(data, dict):
            shared = {key: data[key] for key in OF_A_CLAIM if key in data}
            rest = {key: value for key, value in data.items() if key not in OF_A_CLAIM}
            claims = rest.get("claims") or ({rest.get("name", ""): {}} if "claim" in shared else {})
            if not isinstance(claims, dict) or not all(isinstance(own, dict) for own in claims.values()):
                raise InputError(f"claims: expected the keys of each claim by its name, got {quote(claims)}")
            data = {**rest, "claims": {str(name): {**shared, **own} for name, own in claims.items()}}
        return super().from_dict(data, where)

    def __post_init__(self) -> None:
        if self.name in (".", "..") or {"/", "\\", "\0"} & {*self.name}:
            raise InputError(f"name: expected the name of a file without its folder, got {quote(self.name)}")
        parsed = {name: Claim.from_dict(claim, f"claims.{name}") for name, claim in self.claims.items()}
        object.__setattr__(self, "claims", parsed)
        for section in ("base", MEASURE, PREPARE):  # `changed` may replace a whole section
            decode(dict[str, Any], getattr(self, section), section)
        self._check_grid()
        for section, functions in ((MEASURE, self.measure), (PREPARE, self.prepare)):
            if (functions or section == MEASURE) and not isinstance(functions.get("kind"), str):
                raise InputError(
                    f"{section}: expected a mapping with the name of its kind, got {quote(functions)}"
                )
        for name, kind in self.needs.items():
            if kind not in ("required", "optional"):
                raise InputError(f"needs.{name}: expected 'required' or 'optional', got {quote(kind)}")

    def _check_grid(self) -> None:
        """Write out the grid; raise `InputError` if it has no labels with changes, or too many cells."""
        object.__setattr__(self, "grid", checked_grid(self.grid))
        count = math.prod(map(len, self.grid.values())) * max(
            1, len(decode(tuple[int, ...], self.seeds, "seeds"))
        )
        if count > CELLS:
            raise InputError(
                f"grid: expected at most {CELLS:,} runs, got {count:,}: labels of all axes times seeds"
            )

    def written(self) -> dict[str, Any]:
        """Return the study as it is in a file: the values that differ from the defaults."""
        usual = type(self)().to_dict()
        return {name: value for name, value in self.to_dict().items() if value != usual[name]}

    @property
    def axes(self) -> tuple[str, ...]:
        """Return the names of the grid's axes."""
        return tuple(self.grid)

    def changed(self, changes: Mapping[str, Any]) -> Self:
        """Return the study with other seeds, another grid, and changes of the base by dotted names."""
        own = {key: changes[key] for key in ("grid", "seeds") if key in changes}
        parts: dict[str, Any] = {"base": self.base, MEASURE: self.measure, PREPARE: self.prepare}
        for name, value in changes.items():
            if name not in own:
                section = name.partition(".")[0]
                path = name if section in (MEASURE, PREPARE) else f"base.{name}"
                parts = merged(parts, nested(path, value))
        own = {key: tuple(value) if isinstance(value, list) else value for key, value in own.items()}
        return dataclasses.replace(self, **parts, **own)

    def in_quick(self) -> Self:
        """Return the study at small sizes, at which every path runs but the figures mean nothing."""
        return self.changed({**({"seeds": self.seeds[:1]} if self.seeds else {}), **self.quick})

    def combinations(self) -> Iterator[tuple[tuple[str, ...], int | None, dict[str, Any]]]:
        """Yield labels, seed and changes of every cell, ordered by seed."""
        for seed in self.seeds or (None,):
            for chosen in itertools.product(*(levels.items() for levels in self.grid.values())):
                changes: dict[str, Any] = {}
                for _, change in chosen:
                    changes |= change or {}
                yield tuple(str(label) for label, _ in chosen), seed, changes


def study_names() -> list[str]:
    """Return the names of the library's studies."""
    return sorted(file.stem for file in CLAIMS.glob("*.yaml"))
