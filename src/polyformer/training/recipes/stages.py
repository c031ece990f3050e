"""Staged training: each stage doubles text and window lengths and halves the learning rate.

Stage i (from 0) of a recipe has windows and rows 2^i times longer and a learning rate of lr / 2^i, and starts
from the weights of the previous stage. Thus most updates are cheap, and the final model still has
the full length. Beltagy et al. 2020 (Longformer), section 4.2. Every stage is a separate run, with
its schedule from the start; longer rows mean fewer rows per batch. The first stage may start from a
checkpoint. Tables of learned positions are extended between stages by copying (section 5).
"""

import dataclasses
from pathlib import Path
from typing import Any

from polyformer.attention.patterns import Window
from polyformer.attention.patterns.base import Pattern
from polyformer.core.config import Config
from polyformer.core.errors import InputError, quote
from polyformer.models.architectures.pretrained import RECIPE
from polyformer.models.checkpoints import extend_positions
from polyformer.training.recipes.fit import Fitted, fit
from polyformer.training.recipes.recipe import ModelChoice, Recipe
from polyformer.training.recipes.run import Run
from polyformer.training.tasks import LanguageModellingConfig, MaskedModellingConfig

Staged = LanguageModellingConfig | MaskedModellingConfig


def stages(recipe: Recipe, number: int) -> list[Recipe]:
    """Return the recipes of `number` stages; the first is `recipe`.

    Raises `InputError` for a number below 1, and for tasks other than `lm` and `mlm`.
    """
    if number < 1:
        raise InputError(f"number: expected 1 stage or more, got {number}")
    if not isinstance(recipe.task, Staged):
        raise InputError(f"stages: expected the task 'lm' or 'mlm', got {quote(recipe.task.kind)}")
    return [recipe, *(_stage(recipe, recipe.task, 2**i) for i in range(1, number))]


def fit_stages(recipe: Recipe, out: str | Path, number: int) -> list[Fitted]:
    """Train `number` stages in sequence, in the folders `out`/stage-1, `out`/stage-2, ...

    Existing stages are continued: finished stages are skipped (and not returned), an interrupted stage is
    resumed. Raises `InputError` for stages of another recipe.
    """
    fitted: list[Fitted] = []
    start: Path | None = None
    for i, stage in enumerate(stages(recipe, number), 1):
        run = Run(Path(out) / f"stage-{i}")
        started = (run.folder / RECIPE).is_file()
        if started and run.recipe != stage:
            raise InputError(f"{run.folder}: a stage of another recipe; choose another --out")
        if not (started and run.finished and i < number):
            fitted.append(fit(stage, run.folder, resume=started, start=start))
        start = run.folder
    return fitted


def widen_windows(part: Any, factor: int) -> Any:
    """Return `part`, a pattern or a configuration, with every window `factor` times wider.

    The current token of a window counts with the tokens before it: a causal window of 256 becomes 512.
    """
    if isinstance(part, Window):
        after = part.keys_after
        before = part.before * factor if after else (part.before + 1) * factor - 1
        return dataclasses.replace(part, before=before, after=after * factor)
    if isinstance(part, tuple):
        return tuple(widen_windows(layer, factor) for layer in part)
    if not isinstance(part, Config | Pattern):
        return part
    fields = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
    changes = {name: widen_windows(value, factor) for name, value in fields.items()}
    return dataclasses.replace(
        part, **{name: value for name, value in changes.items() if value != fields[name]}
    )


def _stage(recipe: Recipe, task: Staged, factor: int) -> Recipe:
    length = task.row_length * factor
    config = recipe.model.config()
    if recipe.model.pretrained is not None:  # the first stage may need more positions than the checkpoint
        config = extend_positions(config, max(config.max_position_embeddings, task.row_length))
    return dataclasses.replace(
        recipe,
        model=ModelChoice(options=widen_windows(config, factor).to_dict()),
        task=dataclasses.replace(task, row_length=length, batch_tokens=max(task.batch_tokens, length)),
        optimizer=dataclasses.replace(recipe.optimizer, lr=recipe.optimizer.lr / factor),
    )
