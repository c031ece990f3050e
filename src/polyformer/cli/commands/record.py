"""Record episodes in a gymnasium environment, as a Minari data set.

The policies take turns: `scripted` (for classic control), `half-trained` (linear, after a few generations of
the cross-entropy method), `random`, and agents from the folders of their runs, with sampled actions. Each
episode has a different share of random actions, up to --noise, so the recorded returns vary widely.
`polyformer train dt --data minari:ID` learns from the data set.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from polyformer.cli.commands.options import argument, option
from polyformer.core.limits import COUNT

if TYPE_CHECKING:
    from polyformer.training.rl.policies import Maker

EXAMPLES = """examples:
  polyformer record CartPole-v1 --out cartpole/mixed-v0
  polyformer train dt --data minari:cartpole/mixed-v0
  polyformer record CartPole-v1 --policies runs/gtrxl-1,random --out cartpole/learnt-v0
  polyformer record Pendulum-v1 --policies scripted --noise 1 --episodes 500 --out pendulum/noisy-v0
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `polyformer record` takes."""

    environment: str = argument("id of an environment, such as CartPole-v1", metavar="ENVIRONMENT")
    out: str = option("id of the new data set, such as cartpole/mixed-v0", "", "ID")
    policies: str = option(
        "scripted, half-trained, random or folders of runs of agents, separated by commas (default: "
        "the first three)",
        "scripted,half-trained,random",
        "NAMES",
    )
    episodes: int = option("number of episodes", 300)
    noise: float = option("maximum share of random actions in an episode, drawn between 0 and this", 0.5)
    wrappers: str = option(
        "wrappers of the environment, module:Class separated by commas, innermost first", "", "NAMES"
    )
    max_steps: int | None = option("maximum steps of an episode (default: the environment's)", most=COUNT)
    seed: int = option("seed of policies, noise and first states", 0, most=COUNT)


def run(options: Options) -> None:
    """Record, and print how large the returns are."""
    import numpy as np

    from polyformer.core.errors import InputError
    from polyformer.training.rl.recording import Recording, record

    if not options.out:
        raise InputError("--out: name the new data set, such as cartpole/mixed-v0")
    policies, wrappers = words(options.policies), words(options.wrappers)
    runs = {name: trained(name) for name in policies if is_run(name)}
    settings = {name: value for name, value in vars(options).items() if name not in ("policies", "wrappers")}
    returns = record(Recording(policies=policies, wrappers=wrappers, trained=runs, **settings))
    low, quarter, half, three, high = np.percentile(returns, [0, 25, 50, 75, 100])
    print(
        f"{len(returns)} episodes of {options.environment}; returns: mean {np.mean(returns):.4g}, "
        f"least {low:.4g}, quartiles {quarter:.4g} {half:.4g} {three:.4g}, largest {high:.4g}"
    )
    print(f"minari:{options.out}")


def words(text: str) -> tuple[str, ...]:
    """What stands between commas."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


def is_run(name: str) -> bool:
    """Whether it is the folder of a run."""
    from polyformer.models.architectures.training_record import RECIPE

    return (Path(name) / RECIPE).is_file()


def trained(folder: str) -> "Maker":
    """The policy of the run; `InputError` for one that trained none."""
    from polyformer.core.errors import InputError
    from polyformer.models.architectures import Policy
    from polyformer.training.recipes import Run
    from polyformer.training.rl.policy_player import source_of

    policy = Run.open(folder).model("cpu")
    if not isinstance(policy, Policy):
        raise InputError(f"--policies: {folder} is no run of the task 'agent', which trains policies")
    return lambda environment, seed: source_of(policy.eval(), environment)
