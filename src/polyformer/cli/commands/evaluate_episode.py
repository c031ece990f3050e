"""`evaluate --episode` of an agent: an episode as a sheet of its attention, or as a film."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyformer.core.errors import InputError, quote

if TYPE_CHECKING:
    from polyformer.training.recipes import Run

SUFFIXES = ".gif", ".png", ".svg", ".pdf"


def draw(path: str, run: "Run", model: Any) -> None:
    """Play an episode of the run's seed, the most probable action at each step, and draw it into `path`."""
    from polyformer.training.rl.episode import draw_sheet, play_episode
    from polyformer.training.rl.episode_gif import draw_gif

    task: Any = run.recipe.task
    if task.kind != "agent":
        raise InputError(
            f"--episode: goes with a run of the task 'agent', and {run.folder} is one of {quote(task.kind)}"
        )
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        raise InputError(
            f"--episode: expected a file that ends with {', '.join(SUFFIXES)}, got {quote(path)}"
        )
    environment = _drawing(task) if suffix == ".gif" else _made(task)
    try:
        episode = play_episode(model, environment, run.recipe.seed, task.episode_steps)
    finally:
        environment.close()
    (draw_gif if suffix == ".gif" else draw_sheet)(path, episode)
    print(f"{len(episode.rewards)} steps, return {sum(episode.rewards):.4g}: {path}")


def _made(task: Any, **options: Any) -> Any:
    from polyformer.training.rl.environments import make_environment

    return make_environment(task.environment, {**task.options, **options}, task.wrappers)


def _drawing(task: Any) -> Any:
    """The environment, which draws itself if it can."""
    environment = _made(task)
    if "rgb_array" not in environment.metadata.get("render_modes", ()):
        return environment
    environment.close()
    return _made(task, render_mode="rgb_array")
