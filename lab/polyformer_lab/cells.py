"""The cells of a study: each trains or resumes a run, measures it, and keeps its rows in a folder."""

import dataclasses
import functools
import inspect
import json
import re
import time
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from polyformer.core.config import decode
from polyformer.core.errors import InputError, quote, unknown
from polyformer.core.files import read_json, write_json
from polyformer.core.registry import import_modules
from polyformer.data import load
from polyformer.models.architectures.pretrained import RECIPE
from polyformer.training.recipes import Recipe, Run, find_recipe
from polyformer.training.recipes.fit import Fitted, own_data, resolve_recipe
from polyformer.training.recipes.recipe import merged, nested
from polyformer_lab.costs import fitted_with_peak
from polyformer_lab.machine import Sources, run_facts
from polyformer_lab.study import GENERATE, MEASURE, Study

Row = dict[str, Any]
"""Numbers by metric, and labels of the measurement's own axes."""

Fill = Callable[[str], str | None]

ROWS, PREPARED = "rows.json", "prepared.json"

CELL = re.compile(r"\$cell\(([^()]*)\)")
"""A reference to the folder of another cell: the labels that differ from the cell's own."""


@dataclasses.dataclass(frozen=True)
class Function:
    """A registered measurement or preparation. index: the columns of its rows that are labels."""

    call: Callable[..., Any]
    index: tuple[str, ...] = ()


MEASURES: dict[str, Function] = {}
PREPARATIONS: dict[str, Function] = {}
AXES: dict[str, Function] = {}


def measurement(*index: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function `f(cell, **options)` that returns a row or yields rows that differ in `index`."""
    return _register(MEASURES, index)


def preparation(call: Callable[..., Any]) -> Callable[..., Any]:
    """Register a function `f(folder, **options)` that writes files which the cells share, `$prepared/...`."""
    return _register(PREPARATIONS, ())(call)


def axis(call: Callable[..., Any]) -> Callable[..., Any]:
    """Register a function `f(**options)` that returns the labels of an axis with their changes."""
    return _register(AXES, ())(call)


def _register(functions: dict[str, Function], index: tuple[str, ...]) -> Callable[..., Any]:
    def register(call: Callable[..., Any]) -> Callable[..., Any]:
        functions[call.__name__.replace("_", "-")] = Function(call, index)
        return call

    return register


def function_of(kind: str, functions: Mapping[str, Function]) -> Function:
    """Return a registered function by its name; `InputError` for an unknown name."""
    from polyformer_lab import measures

    import_modules(measures.__name__)
    if not isinstance(kind, str) or kind not in functions:  # a name from a file may have any type
        what = "measurement" if functions is MEASURES else "axis" if functions is AXES else "preparation"
        raise unknown(what, kind, functions)
    return functions[kind]


@dataclasses.dataclass(eq=False)
class Cell:
    """One run of the grid. recipe: None where nothing is trained. options: of the measurement."""

    labels: tuple[str, ...]
    seed: int | None
    folder: Path
    recipe: dict[str, Any] | None
    kind: str
    options: dict[str, Any]
    needs: frozenset["Cell"] = frozenset()
    kept: dict[str, Any] | None = dataclasses.field(default=None, init=False)
    """The content of `ROWS`, read once: the file is written last and does not change."""

    @property
    def title(self) -> str:
        """The name of the cell in messages."""
        seed = () if self.seed is None else (f"seed {self.seed}",)
        return ", ".join((*self.labels, *seed)) or self.kind

    @property
    def settings(self) -> dict[str, Any]:
        """All that decides what the cell measures, as plain data."""
        own = {"recipe": self.recipe, "kind": self.kind, "options": self.options, "seed": self.seed}
        return json.loads(json.dumps(own))

    @functools.cached_property
    def fitted(self) -> Fitted:
        """The finished run: trained, resumed or only read.

        Raises:
            InputError: the folder holds a run of another recipe.
        """
        assert self.recipe is not None, "the cell has no recipe"
        return resumed(Recipe.from_dict(self.recipe), self.folder)

    def rows(self) -> list[Row] | None:
        """Return the rows that were measured, None where the cell is not finished.

        Raises:
            InputError: they were measured with other settings.
        """
        file = self.folder / ROWS
        if self.kept is None and file.is_file():
            kept = read_json(file, dict)
            if kept.get("settings") != self.settings:
                raise InputError(f"{file} holds figures of other settings; choose another place with --out")
            if not _are_rows(kept.get("rows")) or not isinstance(kept.get("facts"), dict):
                raise InputError(f"{file} is damaged: it has no rows of figures; remove it to measure again")
            self.kept = kept
        return None if self.kept is None else self.kept["rows"]

    def run(self) -> list[Row]:
        """Train and measure, unless that is done; return the rows."""
        rows = self.rows()
        if rows is None:
            start = time.monotonic()
            measured = _called(MEASURES, self.kind, self.options, self)
            rows = [measured] if isinstance(measured, dict) else list(measured)
            facts = {**run_facts(), "seconds": round(time.monotonic() - start, 1)}
            self.folder.mkdir(parents=True, exist_ok=True)
            write_json(self.folder / ROWS, {"settings": self.settings, "rows": rows, "facts": facts})
        return rows

    @property
    def facts(self) -> str:
        """When, where and by which code the cell was measured, and how long its last call took."""
        facts = self.kept["facts"] if self.rows() is not None and self.kept else {}
        return ", ".join(f"{name} {value}" for name, value in facts.items())


def _are_rows(rows: object) -> bool:
    """Return whether a value is a list of rows: numbers and labels by name."""
    plain = str, int, float, types.NoneType
    return isinstance(rows, list) and all(
        isinstance(row, dict) and all(isinstance(value, plain) for value in row.values()) for row in rows
    )


def resumed(recipe: Recipe, folder: Path) -> Fitted:
    """Return the run in `folder`, trained or resumed; a finished run is only read and scored.

    Raises:
        InputError: the folder holds a run of another recipe.
    """
    begun = (folder / RECIPE).is_file()
    if begun:
        kept = Run.open(folder).recipe
        data = own_data(recipe) or load(recipe.data, recipe.task.needs) if kept != recipe else None
        if data is not None and kept != resolve_recipe(recipe, data):
            raise InputError(f"{folder} holds a run of other settings; choose another place with --out")
    return fitted_with_peak(recipe, folder, begun)


def checked_function(
    functions: Mapping[str, Function], kind: str, options: Mapping[str, Any], first: int
) -> Callable[..., Any]:
    """Return a registered function after a check of its options; it has `first` other arguments before them.

    Raises `InputError` for an unknown name, and for options that are unknown, missing or of another type.
    """
    call = function_of(kind, functions).call
    known = [*inspect.signature(call).parameters.values()][first:]
    for name in options:
        if name not in [each.name for each in known]:
            raise unknown(f"option of {kind}", name, [each.name for each in known])
    for each in known:
        if options.get(each.name) is not None:  # None: a source that is optional and absent
            _check_option(each.annotation, options[each.name], f"{kind}.{each.name}")
        elif each.name not in options and each.default is each.empty:
            raise InputError(f"{kind}: expected the option {quote(each.name)}")
    return call


def _check_option(hint: Any, value: Any, where: str) -> None:
    """Raise `InputError` for a value of another type, if the hint is of numbers, texts or lists of them."""
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) in (Sequence, list) and arguments[0] in _PLAIN:
        decode(tuple[arguments[0], ...], value, where)
    elif hint in _PLAIN or (typing.get_origin(hint) is types.UnionType and {*arguments} <= {*_PLAIN}):
        decode(hint, value, where)


_PLAIN = str, int, float, bool, types.NoneType


def _called(functions: Mapping[str, Function], kind: str, options: Mapping[str, Any], *first: object) -> Any:
    return checked_function(functions, kind, options, len(first))(*first, **options)


def levels(own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the labels of an axis with their changes, those of `generate: NAME` by the function NAME."""
    options = dict(own)
    return _called(AXES, options.pop(GENERATE), options) if GENERATE in own else options


def cells_of(study: Study, out: Path, sources: Sources) -> list[Cell]:
    """Return the cells of a study below the folder `out`.

    Raises:
        InputError: a reference has no cell or leads back to its own, or two cells would share a folder.
    """
    study = study.changed({"grid": {name: levels(own) for name, own in study.grid.items()}})
    base = dict(study.base)
    if "recipe" in base:
        base = merged(find_recipe(decode(str, base.pop("recipe"), "base.recipe")), base)
    every = {(labels, seed): changes for labels, seed, changes in study.combinations()}
    cells: dict[tuple[tuple[str, ...], int | None], Cell | None] = {}  # None while a cell is made

    def make(labels: tuple[str, ...], seed: int | None) -> Cell:
        if (labels, seed) not in cells:
            cells[labels, seed] = None
            cells[labels, seed] = _cell(labels, seed)
        if (cell := cells[labels, seed]) is None:
            raise InputError(f"$cell: {', '.join(labels)} refers to a cell that refers to it")
        return cell

    def _cell(labels: tuple[str, ...], seed: int | None) -> Cell:
        parts: dict[str, Any] = {"base": base, MEASURE: study.measure, "train": bool(base)}
        changes = every[labels, seed]
        for name, value in sorted(changes.items(), key=lambda change: _depth(change[0])):
            own = name == "train" or name.partition(".")[0] == MEASURE
            parts = merged(parts, nested(name if own else f"base.{name}", value))
        needs: set[Cell] = set()

        def refer(match: re.Match[str]) -> str:
            wanted = {label.strip() for label in match[1].split(",")}
            other = _nearest(study, labels, wanted)
            cell = make(other, seed)
            needs.add(cell)
            return str(cell.folder)

        def fill(text: str) -> str | None:
            filled = sources.fill(text)
            return None if filled is None else CELL.sub(refer, filled)

        recipe = _recipe(parts["base"], sources, seed, fill) if parts["train"] else None
        options = decode(dict[str, Any], _filled(parts[MEASURE], fill), MEASURE)
        kind = options.pop("kind", None)
        checked_function(MEASURES, kind, options, 1)
        folder = out / _folder(labels, seed)
        return Cell(labels, seed, folder, recipe, kind, options, frozenset(needs))

    result = [make(*key) for key in every]
    folders = {cell.folder: cell for cell in result}
    for cell in result:
        if (other := folders[cell.folder]) is not cell:
            raise InputError(f"grid: the labels {cell.title!r} and {other.title!r} name the same folder")
    return result


def _depth(name: str) -> int:
    """Return the depth of a setting: the kind of a part is set before its options, whatever the axes' order.

    Otherwise the axis `optimizer.lr` would lose its values to a later axis that changes the optimizer.
    """
    return name.removesuffix(".kind").count(".")


def _nearest(study: Study, labels: tuple[str, ...], wanted: set[str]) -> tuple[str, ...]:
    """The labels with those of `wanted` on the axes that have them."""
    levels = [{str(label) for label in axis} for axis in study.grid.values()]
    chosen = tuple(next(iter(wanted & level), own) for own, level in zip(labels, levels))
    if missing := wanted - {*chosen}:
        raise InputError(f"$cell({', '.join(sorted(missing))}): no axis of the grid has such a label")
    return chosen


def _recipe(base: Any, sources: Sources, seed: int | None, fill: Fill) -> dict[str, Any]:
    data = base.get("data", {})
    data = sources.data(data) if isinstance(data, str) else data
    filled = _filled({**base, "data": data}, fill)
    return filled if seed is None else {**filled, "seed": seed}


def _filled(value: Any, fill: Fill) -> Any:
    """The value with references in its texts replaced."""
    if isinstance(value, str):
        return fill(value)
    if isinstance(value, dict):
        return {name: _filled(item, fill) for name, item in value.items()}
    return [_filled(item, fill) for item in value] if isinstance(value, list | tuple) else value


def _folder(labels: Iterable[str], seed: int | None) -> str:
    words = [*labels, *(() if seed is None else (str(seed),))]
    name = "-".join(re.sub(r"[^\w.]+", "-", word).strip("-").lower() for word in words)
    return name if name.strip(".") else "cell"  # "..": the folder above


def prepare(study: Study, out: Path, sources: Sources) -> None:
    """Write the files that the cells share, unless they are there; note them as the source `prepared`."""
    if not study.prepare:
        return
    folder = (out / "data").absolute()
    options = _filled(study.prepare, sources.fill)
    file = folder / PREPARED
    kept = read_json(file, dict) if file.is_file() else None
    if kept is not None and kept != json.loads(json.dumps(options)):
        raise InputError(f"{file} is of other settings; choose another place with --out")
    sources.places["prepared"] = str(folder)
    if kept is None:
        folder.mkdir(parents=True, exist_ok=True)
        own = dict(options)
        _called(PREPARATIONS, own.pop("kind"), own, folder)
        write_json(file, options)


def ordered(cells: Iterable[Cell]) -> Iterator[list[Cell]]:
    """Yield the cells in groups, each of which needs only cells of earlier groups."""
    left = list(cells)
    done: set[Cell] = set()
    while left:
        ready = [cell for cell in left if cell.needs <= done]
        yield ready
        done |= {*ready}
        left = [cell for cell in left if cell not in done]
