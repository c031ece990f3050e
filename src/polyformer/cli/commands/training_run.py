"""Training from the command line: its folder, its interruption, and the output at its end."""

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyformer.core.errors import InputError

if TYPE_CHECKING:
    from polyformer.training.recipes import Recipe
    from polyformer.training.recipes.fit import Fitted


def train(recipe: "Recipe", name: str, out: str | None, resume: str | None, **how: Any) -> "Fitted":
    """Train in the folder `out` or `resume`, by default a new folder named after `name`; `how`: see `fit`.

    After a signal, exit with the usual status, 128 + the signal's number.
    """
    from polyformer.training.launcher import world
    from polyformer.training.machine import choose_device
    from polyformer.training.recipes.fit import fit, fit_stages
    from polyformer.training.recipes.run import new_folder
    from polyformer.training.run_control import Interrupted

    choose_device(recipe.training.engine.device)
    path = resume or out
    if path is None and world() > 1:
        raise InputError("--out is missing: with several processes, name the folder of the run")
    folder = Path(path) if path else new_folder(Path(name).stem)
    try:
        if "stages" in how:
            return fit_stages(recipe, folder, how["stages"])[-1]
        return fit(recipe, folder, resume=resume is not None, **how)
    except Interrupted as error:
        again, resumed = f"the same command and --out {folder}", f"polyformer train --resume {folder}"
        command = again if "stages" in how else resumed
        print(f"polyformer: {error}; resume with: {command}", file=sys.stderr)
        raise SystemExit(128 + error.signal) from None
    except KeyboardInterrupt:
        saved = any(folder.glob("checkpoints/step-*"))
        command = f"; resume with: polyformer train --resume {folder}" if saved else ""
        print(f"\npolyformer: interrupted{command}", file=sys.stderr)
        raise SystemExit(130) from None
    finally:
        with contextlib.suppress(OSError):
            folder.rmdir()  # only if nothing was written


def conclude(fitted: Any, seed: int) -> None:
    """Print the metrics with baselines, if any, a sample of the model, and the folder."""
    from polyformer.training.recipes.report import baselines, sample, table, verdict
    from polyformer.training.tasks import ActionPrediction, ImageModelling, LanguageModelling

    rows = [(f"this model, {split}", metrics) for split, metrics in fitted.scores.items()]
    others = baselines(fitted.task, fitted.splits)
    said = verdict(fitted.task, others, fitted.scores["validation"]) if others else ""
    if others:
        fitted.run.record(baselines=dict(others), verdict=said)
    if rows:
        print(f"\n{table(others + rows)}")
    if said:
        print(f"\n{said}")
    if isinstance(fitted.task, LanguageModelling):
        print(f"\nA sample:\n{sample(fitted.task, fitted.model, seed)}")
    if isinstance(fitted.task, ImageModelling):
        print(f"\n{draw_images(fitted, seed)}")
    if isinstance(fitted.task, ActionPrediction) and fitted.task.config.environment is not None:
        print(f"\n{try_out_if_possible(fitted)}")
    print(f"\nSaved in {fitted.run.folder}")
    if fitted.run.recipe.training.reporting.report:
        from polyformer.cli.plots.report import write_report

        print(f"Report: {write_report(fitted.run)}")


def try_out_if_possible(fitted: Any) -> str:
    """Evaluate a Decision Transformer in its environment; return its results as text, or the error."""
    from polyformer.cli.commands.evaluate_acting import evaluate_returns

    try:
        text, results = evaluate_returns(fitted.run, fitted.model.eval())
    except InputError as error:  # the environment is not here; the run is complete without it
        return f"Not evaluated in its environment: {error}"
    fitted.run.record(achieved={f"{asked:.6g}": returns for asked, returns in results.items()})
    return text


def draw_images(fitted: Any, seed: int) -> str:
    """Draw generated images into the run's folder; return a line with the path, or the error."""
    from polyformer.training.recipes.report import write_sheet

    path = fitted.run.folder / "images.png"
    try:
        write_sheet(path, fitted.task, fitted.model, fitted.splits, seed)
    except InputError as error:  # matplotlib is missing; the run is complete without it
        return f"No image sheet: {error}"
    return f"Held-out images in rows ({', '.join(fitted.task.pictures)}): {path}"
