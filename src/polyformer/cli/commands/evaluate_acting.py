"""`evaluate` in an environment: returns of a Decision Transformer, or a drawn episode of an agent."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyformer.cli.commands.options import parse_numbers
from polyformer.core.errors import InputError, quote

if TYPE_CHECKING:
    from polyformer.training.recipes import Run
    from polyformer.training.rl.playing import Achieved


EPISODES = 20


def try_out(run: "Run", model: Any, options: Any) -> None:
    """Print `evaluate_returns`; skip a run without a known environment unless options require it."""
    config: Any = run.recipe.task
    if options.environment is None and config.environment is None:
        if options.returns or options.episodes or options.max_steps:
            raise InputError(
                f"--environment: {run.folder} does not contain the environment of its episodes; name it, for "
                "example --environment CartPole-v1"
            )
        return
    returns = None if options.returns is None else parse_numbers("--returns", options.returns)
    asked = {"episodes": EPISODES if options.episodes is None else options.episodes}
    if options.environment is not None:  # without the settings of the run's own
        asked |= {"environment": options.environment, "options": {}, "wrappers": ()}
    text, _ = evaluate_returns(run, model, returns, max_steps=options.max_steps, **asked)
    print(f"\n{text}")


def evaluate_returns(
    run: "Run", model: Any, returns: tuple[float, ...] | None = None, **asked: Any
) -> "tuple[str, Achieved]":
    """Return a table of target and achieved returns as text, and the returns; draw RUN/returns.png.

    asked: fields of the `Trial`, by default the environment of the run and `EPISODES` episodes.
    """
    from polyformer.training.rl.playing import Panel, Trial, achieved_returns, draw_returns, returns_table

    task: Any = run.task
    config = task.config
    defaults = {
        "environment": config.environment,
        "options": config.environment_options or {},
        "wrappers": config.environment_wrappers,
        "returns": returns or (config.asked if config.conditioned else config.asked[-1:]),
        "episodes": EPISODES,
        "seed": run.recipe.seed,
    }
    trial = Trial(**{**defaults, **asked})
    results = achieved_returns(model, task, trial)
    title = f"{trial.environment}: {trial.episodes} episodes per target return"
    lines = [title, *returns_table(results, config.mean_return)]
    path = run.folder / "returns.png"
    try:
        draw_returns(path, [Panel(trial.environment, results, {"data's mean": config.mean_return})])
        lines.append(f"Drawn: {path}")
    except InputError as error:  # matplotlib is missing
        lines.append(f"Not drawn: {error}")
    return "\n".join(lines), results


SUFFIXES = ".gif", ".png", ".svg", ".pdf"


def draw(path: str, run: "Run", model: Any) -> None:
    """Play an episode with the run's seed and the most probable actions, and draw it into `path`."""
    from polyformer.training.rl.playing import draw_gif, draw_sheet, play_episode

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
