"""Record episodes in a gymnasium environment as a Minari data set.

The policies take turns: `scripted` (for classic control), `half-trained` (a linear policy after a few
generations of the cross-entropy method), `random`, and folders of agent runs, whose actions are sampled. The
share of random actions differs by episode, up to --noise, so that the data set contains returns of all sizes.
Train on the data set with `polyformer train dt --data minari:ID`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from polyformer.cli.commands.options import argument, option
from polyformer.core.ranges import COUNT

if TYPE_CHECKING:
    from polyformer.training.rl.recording import Maker

EXAMPLES = """examples:
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


def run(options: RecordOptions) -> None:
    """Record the episodes and print the distribution of the returns."""
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
