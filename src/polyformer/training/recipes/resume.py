"""Checks that a resumed run matches its start; errors are raised before anything is written."""

from pathlib import Path
from typing import Any

from polyformer.core.errors import InputError, quote
from polyformer.data.fingerprint import Fingerprint, data_changes
from polyformer.training.recipes.recipe import Recipe
from polyformer.training.recipes.run import Run

DATA = "data"  # the fingerprint of the data in run.json
PLACES = {"path", "validation", "test"}


def check_same_recipe(run: Run, recipe: Recipe) -> None:
    """Raise `InputError` if `recipe` cannot continue `run`.

    The model, the task, the tokenizer, the kind of optimizer, the seed and the reading of data must not
    change. The length, speed and device of training, and the paths of the data, may change.
    """
    before, now = _fixed(run.recipe), _fixed(recipe)
    if before["model"] != now["model"] and run.recipe.model.config() == recipe.model.config():
        now["model"] = before["model"]
    different = first_difference(before, now)
    if different:
        name, old, new = different
        way = f" --pretrained {run.folder} (with the weights of this one)" if run.finished else ""
        raise InputError(
            f"--resume {run.folder}: {name} is {quote(old)} there, got {quote(new)}; leave it as it is, or "
            f"begin another run: polyformer train RECIPE{way} --out NEW"
        )


def check_data(run: Run, now: Fingerprint) -> None:
    """Raise `InputError` if the data differ from the data that `run` was trained on."""
    changes = data_changes(run.facts.get(DATA, {}), now)
    if changes:
        raise InputError(
            f"data: changed since {run.folder} began: {'; '.join(changes[:3])}"
            f"{f'; and {len(changes) - 3} more' if len(changes) > 3 else ''}; put them back, or go on with "
            f"them as they are: polyformer train --resume {run.folder} --changed-data"
        )


def first_difference(before: Any, now: Any, name: str = "") -> tuple[str, Any, Any] | None:
    """Return the dotted name and both values of the first difference between two nested mappings."""
    if not isinstance(before, dict) or not isinstance(now, dict):
        return None if before == now else (name, before, now)
    for key in dict.fromkeys([*before, *now]):
        different = first_difference(before.get(key), now.get(key), f"{name}.{key}" if name else key)
        if different:
            return different
    return None


def _fixed(recipe: Recipe) -> dict[str, Any]:
    """Return the parts of a recipe that must not change."""
    plain = recipe.to_dict()
    fixed = {name: plain[name] for name in ("seed", "model", "task", "tokenizer", "vectors", "distillation")}
    if fixed["task"].get("neighbours"):
        fixed["task"]["neighbours"] = "where they lie may change"
    reading = {name: value for name, value in plain[DATA].items() if name not in PLACES}
    return {**fixed, "optimizer": {"kind": plain["optimizer"]["kind"]}, DATA: reading}


def folder_of(out: str | Path, resume: bool) -> Run:
    """Return the run in `out` to resume, or a new run; raise `InputError` if `resume` does not fit."""
    if resume:
        return Run.open(out)
    run = Run(Path(out))
    run.check_new()
    return run
