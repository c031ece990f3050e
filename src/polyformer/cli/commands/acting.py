"""Models that act in environments: the command record, and what evaluate does with such a model.

A Decision Transformer is evaluated by its returns, and the episode of an agent is drawn.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyformer.cli.commands.options import argument, option, parse_numbers
from polyformer.core.errors import InputError, quote
from polyformer.core.ranges import COUNT

if TYPE_CHECKING:
    from polyformer.training.recipes import Run
    from polyformer.training.rl.playing import Achieved
    from polyformer.training.rl.recording import Maker

RECORD_EXAMPLES = """examples:
  polyformer record CartPole-v1 --out cartpole/mixed-v0
  polyformer train dt --data minari:cartpole/mixed-v0
  polyformer record CartPole-v1 --policies runs/gtrxl-1,random --out cartpole/learnt-v0
  polyformer record Pendulum-v1 --policies scripted --noise 1 --episodes 500 --out pendulum/noisy-v0
"""


@dataclass(frozen=True, kw_only=True)
class RecordOptions:
    """Options of `polyformer record`."""

    environment: str = argument("id of an environment, such as CartPole-v1", metavar="ENVIRONMENT")
    out: str = option("id of the new data set, such as cartpole/mixed-v0", "", "ID")
    policies: str = option(
        "scripted, half-trained, random or folders of agent runs, separated by commas (default: the first "
        "three)",
        "scripted,half-trained,random",
        "NAMES",
    )
    episodes: int = option("number of episodes (default: 300)", 300)
    noise: float = option("largest share of random actions of an episode, from 0 to 1 (default: 0.5)", 0.5)
    wrappers: str = option(
        "wrappers of the environment, module:Class separated by commas, innermost first", "", "NAMES"
    )
    max_steps: int | None = option(
        "largest number of steps per episode (default: the environment's limit)", most=COUNT
    )
    seed: int = option("random seed of policies, noise and initial states (default: 0)", 0, most=COUNT)


def run_record(options: RecordOptions) -> None:
    """Record episodes in a gymnasium environment as a Minari data set.

    The policies take turns: `scripted` (for classic control), `half-trained` (a linear policy after a few
    generations of the cross-entropy method), `random`, and folders of agent runs, whose actions are sampled.
    The share of random actions differs by episode, up to --noise, so that the data set contains returns of
    all sizes. Train on the data set with `polyformer train dt --data minari:ID`.
    """
    import numpy as np

    from polyformer.core.errors import InputError
    from polyformer.training.rl.recording import Recording, record

    if not options.out:
        raise InputError("--out is missing: name the new data set, for example cartpole/mixed-v0")
    policies, wrappers = words(options.policies), words(options.wrappers)
    runs = {name: trained(name) for name in policies if is_run(name)}
    settings = {name: value for name, value in vars(options).items() if name not in ("policies", "wrappers")}
    returns = record(Recording(policies=policies, wrappers=wrappers, trained=runs, **settings))
    low, quarter, half, three, high = np.percentile(returns, [0, 25, 50, 75, 100])
    print(
        f"{len(returns)} episodes of {options.environment}; returns: mean {np.mean(returns):.4g}, "
        f"minimum {low:.4g}, quartiles {quarter:.4g} {half:.4g} {three:.4g}, maximum {high:.4g}"
    )
    print(f"minari:{options.out}")


def words(text: str) -> tuple[str, ...]:
    """Return the parts of `text` between commas."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


def is_run(name: str) -> bool:
    """Return whether `name` is the folder of a run."""
    from polyformer.models.architectures.pretrained import RECIPE

    return (Path(name) / RECIPE).is_file()


def trained(folder: str) -> "Maker":
    """Return the policy of a run; raise `InputError` if the run has none."""
    from polyformer.core.errors import InputError
    from polyformer.models.architectures import Policy
    from polyformer.training.recipes import Run
    from polyformer.training.rl.playing import source_of

    policy = Run.open(folder).model("cpu")
    if not isinstance(policy, Policy):
        raise InputError(f"--policies: expected a run of the task 'agent', and {folder} has no policy")
    return lambda environment, seed: source_of(policy.eval(), environment)


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
    from polyformer.training.rl import make_environment

    return make_environment(task.environment, {**task.options, **options}, task.wrappers)


def _rendered_environment(task: Any) -> Any:
    """Return the environment, with rendering if it supports that."""
    environment = _environment(task)
    if "rgb_array" not in environment.metadata.get("render_modes", ()):
        return environment
    environment.close()
    return _environment(task, render_mode="rgb_array")
