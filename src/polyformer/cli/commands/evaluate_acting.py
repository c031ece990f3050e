"""`evaluate` of a Decision Transformer: achieved returns in its environment for each target return."""

from typing import TYPE_CHECKING, Any

from polyformer.cli.commands.options import parse_numbers
from polyformer.core.errors import InputError

if TYPE_CHECKING:
    from polyformer.training.recipes import Run
    from polyformer.training.rl.returns import Achieved

EPISODES = 20


def try_out(
    run: "Run",
    model: Any,
    returns: str | None,
    episodes: int | None,
    environment: str | None,
    max_steps: int | None,
) -> None:
    """Print the results of `evaluate_returns`; skip a run without a known environment unless options require
    it.
    """
    config: Any = run.recipe.task
    if environment is None and config.environment is None:
        if returns or episodes or max_steps:
            raise InputError(
                f"--environment: {run.folder} does not contain the environment of its "
                "episodes; name it, for example "
                "--environment CartPole-v1"
            )
        return
    text, _ = evaluate_returns(
        run,
        model,
        None if returns is None else parse_numbers("--returns", returns),
        episodes,
        environment,
        max_steps,
    )
    print(f"\n{text}")


def evaluate_returns(
    run: "Run",
    model: Any,
    returns: tuple[float, ...] | None = None,
    episodes: int | None = None,
    environment: str | None = None,
    max_steps: int | None = None,
) -> "tuple[str, Achieved]":
    """Return a table of target and achieved returns as text, and the returns; draw RUN/returns.png."""
    from polyformer.training.rl.returns import Panel, draw_returns, returns_table
    from polyformer.training.rl.trial import Trial, achieved_returns

    task: Any = run.task
    config = task.config
    known = environment is None
    trial = Trial(
        environment=environment or config.environment,
        options=(config.environment_options or {}) if known else {},
        wrappers=config.environment_wrappers if known else (),
        returns=returns or (config.asked if config.conditioned else config.asked[-1:]),
        episodes=EPISODES if episodes is None else episodes,
        max_steps=max_steps,
        seed=run.recipe.seed,
    )
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
