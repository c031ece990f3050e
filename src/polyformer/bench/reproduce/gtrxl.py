"""The claim that GTrXL trains where a plain Transformer's policy fails, and solves what needs a memory
(Parisotto et al. 2019, section 4), CPU-sized.

Policies of as many parameters act in one environment and are trained by the same recipe at several learning
rates, each constant and without a warm-up: GTrXL, the Transformer-XL of the same depth with the norm after
the sum, an LSTM and feed-forward layers. A policy solves the task at a rate where the median over the seeds
of the last return is `solved` or more. The first claim holds where GTrXL solves it at every rate and the
plain Transformer-XL does not; the second where feed-forward layers solve it at none.

Deviations: popgym's RepeatPrevious or another environment that a recipe names in place of DMLab-30, PPO in
place of V-MPO, 4 layers in place of 12, a policy a thousand times smaller.
"""

import dataclasses
import functools
import itertools
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from polyformer.agents.episode import draw_sheet, played_episode
from polyformer.bench.claims import taken_up, write_csv
from polyformer.bench.experiment import UNSHOWN, Claim, Experiment, Verdict, conclude, verdict_of
from polyformer.bench.plot import line_plot
from polyformer.core.config import Config
from polyformer.core.errors import InputError, unknown
from polyformer.environments.making import make_environment
from polyformer.model import Policy, PolicyConfig, build_model
from polyformer.presets import model_config
from polyformer.recipes import Recipe, find_recipe
from polyformer.recipes.fit import Fitted
from polyformer.recipes.recipe import merged
from polyformer.tasks import AgentConfig
from polyformer.training.config import at_least
from polyformer.training.metrics import read_metrics

GTRXL, POST, LSTM, FEEDFORWARD = POLICIES = "gtrxl", "transformer-xl", "lstm", "feedforward"
ATTENDING = GTRXL, POST

Curve = list[tuple[int, float]]
"""Steps in the environment, and the return there."""

Curves = Mapping[tuple[str, float], list[Curve]]
"""A curve for each seed, by policy and learning rate."""


EXPERIMENT = Experiment(
    quick={
        "policies": ("gtrxl", "transformer-xl", "feedforward"),
        "layers": 1,
        "width": 4,
        "memory": 3,
        "steps": 2,
        "evaluations": 1,
        "seeds": (0,),
        "rates": (0.002,),
    },
    claims=(
        Claim(
            name="gtrxl-trains",
            says="GTrXL trains where a plain Transformer's policy fails",
            paper="Parisotto et al. 2019 (GTrXL)",
            section="section 4",
            published="DMLab-30 and Memory Maze: post-norm Transformer-XL does not train, gated ones do, "
            "over many hyperparameters",
            measured="last return of policies of as many parameters",
            scale="RepeatPreviousEasy, 4 layers of 32, 800 updates of PPO, two learning rates, three seeds",
            rule="median over the seeds: GTrXL's last return is 0.5 or more at every rate, the plain "
            "one's is not",
        ),
        Claim(
            name="gtrxl-memory",
            says="GTrXL solves what a policy without a memory cannot",
            paper="Parisotto et al. 2019 (GTrXL)",
            section="section 4",
            published="memory tasks of DMLab-30: gated Transformers surpass LSTMs and policies without "
            "memory",
            measured="last return of policies of as many parameters",
            scale="RepeatPreviousEasy, 4 layers of 32, 800 updates of PPO, two learning rates, three seeds",
            rule="median over the seeds: GTrXL's last return is 0.5 or more at some rate, "
            "feed-forward layers' at none",
        ),
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GTrXLClaim(Config):
    """Sizes of the runs. A second call goes on with what OUT holds."""

    recipe: str = "gtrxl"  # of an agent: environment and training
    policies: tuple[str, ...] = POLICIES
    rates: tuple[float, ...] = (5e-4, 2e-3)
    layers: int = 4  # of the Transformers
    width: int = 32  # of GTrXL; the others' follow from its parameters
    memory: int = 16  # steps
    steps: int = 800  # updates
    evaluations: int = 10
    solved: float = 0.5  # the return from which the task counts as solved
    seeds: tuple[int, ...] = (0, 1, 2)
    out: str = "runs/gtrxl"

    def __post_init__(self) -> None:
        at_least(1, layers=self.layers, memory=self.memory, steps=self.steps, evaluations=self.evaluations)
        at_least(2, width=self.width)
        for name in self.policies:
            if name not in POLICIES:
                raise unknown("policies", name, POLICIES)
        if not self.seeds or not self.rates:
            raise InputError("seeds and rates: expected 1 or more of each, got none")


def run(config: GTrXLClaim) -> Curves:
    """Train all, seed by seed; write OUT/gtrxl.csv, gtrxl.png and episode.png; print a table and verdicts."""
    folder, sizes = Path(config.out), dict[str, int]()
    curves: dict[tuple[str, float], list[Curve]] = {}
    for seed, rate, name in itertools.product(config.seeds, config.rates, config.policies):
        fitted = taken_up(recipe(config, name, rate, seed), folder / f"{name}-{rate:g}-{seed}")
        sizes[name] = fitted.run.facts["parameters"]
        curves.setdefault((name, rate), []).append(curve(fitted))
        print(f"{name} at {rate:g}, seed {seed}: {curves[name, rate][-1][-1][1]:.3f}", flush=True)
        if name == GTRXL and seed == config.seeds[0]:
            _draw(fitted, folder / "episode.png")
    rows = [
        (name, rate, seed, steps, value)
        for (name, rate), all_seeds in curves.items()
        for seed, points in zip(config.seeds, all_seeds)
        for steps, value in points
    ]
    write_csv(folder / "gtrxl.csv", ("policy", "rate", "seed", "steps", "return"), rows)
    print("\n".join(table(curves, sizes)))
    medians = {f"{name} at {rate:g}": median(all_seeds) for (name, rate), all_seeds in curves.items()}
    line_plot(folder / "gtrxl.png", medians, "steps in the environment", "return, median of the seeds")
    print(f"curves: {folder / 'gtrxl.png'}")
    conclude(EXPERIMENT, config, verdicts(curves, config.solved))
    return curves


def recipe(config: GTrXLClaim, name: str, rate: float, seed: int) -> Recipe:
    """The run of one policy."""
    every = -(-config.steps // config.evaluations)
    changes = {
        "optimizer": {"lr": rate},
        "training": {
            "steps": config.steps,
            "reporting": {"evaluate_every": every},
            "saving": {"checkpoint_every": every, "final": "last"},
        },
        "seed": seed,
    }
    model = policy_options(config, name)
    return Recipe.from_dict({**merged(find_recipe(config.recipe), changes), "model": model})


def policy_options(config: GTrXLClaim, name: str) -> dict[str, Any]:
    """A recipe's model, of the width that comes nearest to GTrXL's number of parameters."""
    if name == GTRXL:
        return _options(config, name, config.width)
    goal = parameters(config, GTRXL, config.width)
    low, high = 2, 4
    while parameters(config, name, high) < goal:
        low, high = high, 2 * high
    widths = range(low, high + 1, 2)
    return _options(config, name, min(widths, key=lambda width: abs(parameters(config, name, width) - goal)))


def parameters(config: GTrXLClaim, name: str, width: int) -> int:
    """How many the policy has in the claim's environment."""
    options = _options(config, name, width)
    sizes: Any = model_config(options.pop("preset"), {**options, **_sizes(config.recipe)})
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build_model(sizes).parameters())


@functools.cache
def _sizes(recipe: str) -> dict[str, Any]:
    """The environment's, by the names of a policy's options."""
    sizes = Recipe.from_dict(find_recipe(recipe)).task.build(None).adapt(PolicyConfig())
    return {name: getattr(sizes, name) for name in ("observation_size", "num_actions", "continuous")}


def _options(config: GTrXLClaim, name: str, width: int) -> dict[str, Any]:
    preset = {"preset": GTRXL if name == GTRXL else f"policy-{name}", "hidden_size": width}
    if name not in ATTENDING:
        return preset
    sizes = {"num_hidden_layers": config.layers, "intermediate_size": 2 * width}
    return {**preset, **sizes, "memory_length": config.memory}


def curve(fitted: Fitted) -> Curve:
    """The returns that were measured while training."""
    task = fitted.run.recipe.task
    assert isinstance(task, AgentConfig)
    updates = task.passes * task.minibatches
    rows = [(row["step"], row.get("valid_return")) for row in read_metrics(fitted.run.folder)]
    return [
        (int(step or 0) * task.rows * task.steps // updates, value)
        for step, value in rows
        if value is not None
    ]


def median(curves: list[Curve]) -> Curve:
    """Point by point over the seeds."""
    return [(points[0][0], statistics.median(value for _, value in points)) for points in zip(*curves)]


def table(curves: Curves, sizes: Mapping[str, int]) -> list[str]:
    """Lines of text: a row for each policy and rate."""
    lines = [f"{'policy':<16}{'rate':>8}{'parameters':>12}{'half way':>10}{'last':>8}   last of each seed"]
    for (name, rate), all_seeds in curves.items():
        middle = median(all_seeds)
        last = ", ".join(f"{points[-1][1]:.3f}" for points in all_seeds)
        half = middle[(len(middle) - 1) // 2][1]
        lines.append(f"{name:<16}{rate:>8g}{sizes[name]:>12,}{half:>10.3f}{middle[-1][1]:>8.3f}   {last}")
    return lines


def verdicts(curves: Curves, solved: float) -> list[Verdict | None]:
    """What the figures say of both claims; None where the policies of one were left out."""
    last = {key: median(all_seeds)[-1][1] for key, all_seeds in curves.items()}
    by_name: dict[str, dict[float, float]] = {}
    for (name, rate), value in last.items():
        by_name.setdefault(name, {})[rate] = value
    if GTRXL not in by_name:
        return [Verdict(UNSHOWN, "no verdict: it needs GTrXL")] * 2
    ours, results = by_name[GTRXL], list[Verdict | None]((None, None))
    least, most = min(ours.values()), max(ours.values())
    if POST in by_name:
        plain = min(by_name[POST].values())
        differs = [] if least >= solved else [f"GTrXL does not reach {solved:g} at every rate"]
        differs += ["the other does"] if plain >= solved else []
        outcome = f"differs from the paper: {', '.join(differs)}" if differs else "reproduced"
        figures = f"at its worst rate {least:.3f}, a plain Transformer-XL {plain:.3f}"
        text = f"GTrXL trains where a plain Transformer-XL fails: {outcome} ({figures})"
        results[0] = verdict_of(not differs, text)
    if FEEDFORWARD in by_name:
        blind = max(by_name[FEEDFORWARD].values())
        differs = [] if most >= solved else [f"GTrXL does not reach {solved:g}"]
        differs += ["feed-forward layers reach it"] if blind >= solved else []
        outcome = f"differs from the paper: {', '.join(differs)}" if differs else "reproduced"
        figures = f"at its best rate {most:.3f}, feed-forward layers {blind:.3f}"
        text = f"GTrXL solves what a policy without a memory cannot: {outcome} ({figures})"
        results[1] = verdict_of(not differs, text)
    return results


def _draw(fitted: Fitted, path: Path) -> None:
    """An episode of the policy, as a sheet of its attention."""
    task, policy = fitted.run.recipe.task, fitted.model
    assert isinstance(task, AgentConfig)
    assert isinstance(policy, Policy)
    environment = make_environment(task.environment, task.options, task.wrappers)
    draw_sheet(path, played_episode(policy, environment, 0, task.episode_steps))
    environment.close()
    print(f"attention in an episode: {path}")
