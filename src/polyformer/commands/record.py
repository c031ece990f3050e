"""Record episodes in an environment of gymnasium's, as a data set that Minari keeps.

The policies play in turn: `scripted` (of classic control), `half-trained` (linear, after a few generations of
the cross-entropy method) and `random`. Every episode has a share of random actions of its own, up to --noise,
so that returns of all sizes are recorded. `polyformer train dt --data minari:ID` learns from the data set.
"""

from dataclasses import dataclass

from polyformer.commands.options import argument, option

EXAMPLES = """examples:
  polyformer record CartPole-v1 --out cartpole/mixed-v0
  polyformer train dt --data minari:cartpole/mixed-v0
  polyformer record Pendulum-v1 --policies scripted --noise 1 --episodes 500 --out pendulum/noisy-v0
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `polyformer record` takes."""

    environment: str = argument("id of an environment, such as CartPole-v1", metavar="ENVIRONMENT")
    out: str = option("id of the new data set, such as cartpole/mixed-v0", "", "ID")
    policies: str = option(
        "some of scripted, half-trained, random, with commas (default: all three)",
        "scripted,half-trained,random",
        "NAMES",
    )
    episodes: int = option("how many", 300)
    noise: float = option("an episode's share of random actions is drawn between 0 and this", 0.5)
    max_steps: int | None = option("where an episode is cut (default: where the environment cuts it)")
    seed: int = option("of policies, noise and first states", 0)


def run(options: Options) -> None:
    """Record, and print how large the returns are."""
    import numpy as np

    from polyformer.core.errors import InputError
    from polyformer.environments.recording import Recording, record

    if not options.out:
        raise InputError("--out: name the new data set, such as cartpole/mixed-v0")
    policies = tuple(name.strip() for name in options.policies.split(",") if name.strip())
    settings = {name: value for name, value in vars(options).items() if name != "policies"}
    returns = record(Recording(policies=policies, **settings))
    low, quarter, half, three, high = np.percentile(returns, [0, 25, 50, 75, 100])
    print(
        f"{len(returns)} episodes of {options.environment}; returns: mean {np.mean(returns):.4g}, "
        f"least {low:.4g}, quartiles {quarter:.4g} {half:.4g} {three:.4g}, largest {high:.4g}"
    )
    print(f"minari:{options.out}")
