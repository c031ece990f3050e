"""`evaluate --episode` of an agent: draw an episode as a sheet of its attention, or as an animation."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyformer.core.errors import InputError, quote

if TYPE_CHECKING:
    from polyformer.training.recipes import Run

SUFFIXES = ".gif", ".png", ".svg", ".pdf"


def draw(path: str, run: "Run", model: Any) -> None:
    """Play an episode with the run's seed and the most probable actions, and draw it into `path`."""
    from polyformer.training.rl.episode import draw_sheet, play_episode
    from polyformer.training.rl.episode_gif import draw_gif

    task: Any = run.recipe.task
    if task.kind != "agent":
        raise InputError(
            f"--episode: requires a run of the task 'agent', and {run.folder} has the task {quote(task.kind)}"
        )
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        raise InputError(
            f"--episode: expected a file name that ends with one of {', '.join(SUFFIXES)}, got {quote(path)}"
        )
    environment = _rendered_environment(task) if suffix == ".gif" else _environment(task)
    try:
        episode = play_episode(model, environment, run.recipe.seed, task.episode_steps)
    finally:
        environment.close()
    (draw_gif if suffix == ".gif" else draw_sheet)(path, episode)
    print(f"{len(episode.rewards)} steps, return {sum(episode.rewards):.4g}: {path}")


def _environment(task: Any, **options: Any) -> Any:
    from polyformer.training.rl.environments import make_environment

    return make_environment(task.environment, {**task.options, **options}, task.wrappers)


def _rendered_environment(task: Any) -> Any:
    """Return the environment, with rendering if it supports that."""
    environment = _environment(task)
    if "rgb_array" not in environment.metadata.get("render_modes", ()):
        return environment
    environment.close()
    return _environment(task, render_mode="rgb_array")
