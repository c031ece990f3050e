"""Recording of a Minari data set of episodes by a mixture of policies, for a range of returns.

A policy maps an observation [S] to an action; a `Source` creates a policy for each episode. The policies are
random, scripted for classic control, and half-trained; trained models are added by the caller.
"""

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from polyformer.core.errors import InputError, unknown
from polyformer.core.ranges import PositiveInt, Share, check_ranges
from polyformer.data.episodes import is_choice, minari_library
from polyformer.training.rl import make_environment, space_sizes

Policy = Callable[[np.ndarray], Any]
Source = Callable[[np.random.Generator], Policy]
Maker = Callable[[Any, int], Source]
"""A function of an environment and a seed."""

POPULATION, ELITE, GENERATIONS = 24, 6, 4
"""Settings of the cross-entropy method: enough generations to beat chance, too few for a good policy."""


def _cart_pole(seen: np.ndarray) -> int:
    """Apply a linear controller, which never falls."""
    return int(0.1 * seen[0] + 0.3 * seen[1] + 3 * seen[2] + seen[3] > 0)


def _pendulum(seen: np.ndarray) -> np.ndarray:
    """Increase the energy until it suffices to balance at the top, and balance there."""
    cosine, sine, speed = seen
    energy = speed**2 / 2 + 15 * (cosine - 1)  # for the acceleration 15 sin(angle) + 3 torque
    pump = 2 * np.sign(-energy) * (1 if speed >= 0 else -1)
    torque = -(12 * sine + 3 * speed) if cosine > 0.8 else pump
    return np.clip([torque], -2, 2).astype(np.float32)


def _acrobot(seen: np.ndarray) -> int:
    """Push in the direction in which the second link rotates."""
    return 2 if seen[5] > 0 else 0


def _mountain_car(seen: np.ndarray) -> int:
    """Push in the direction of motion."""
    return 2 if seen[1] >= 0 else 0


def _mountain_car_continuous(seen: np.ndarray) -> np.ndarray:
    return np.array([0.4 if seen[1] >= 0 else -0.4], np.float32)


SCRIPTED: dict[str, Policy] = {
    "CartPole-v0": _cart_pole,
    "CartPole-v1": _cart_pole,
    "Pendulum-v1": _pendulum,
    "Acrobot-v1": _acrobot,
    "MountainCar-v0": _mountain_car,
    "MountainCarContinuous-v0": _mountain_car_continuous,
}


def scripted(environment: Any, seed: int) -> Source:
    """Return the scripted policy of this environment; raises `InputError` if there is none."""
    name = environment.spec.id
    if name not in SCRIPTED:
        raise InputError(
            f"--policies: no scripted policy for {name}, only for {', '.join(SCRIPTED)}; "
            "use random and half-trained"
        )
    return lambda generator: SCRIPTED[name]


def random(environment: Any, seed: int) -> Source:
    """Return a policy of actions sampled from the space."""
    space = environment.action_space
    space.seed(seed)
    return lambda generator: lambda seen: space.sample()


def half_trained(environment: Any, seed: int) -> Source:
    """Return linear policies near the optimum of a few generations of the cross-entropy method.

    Each generation samples weights from a normal distribution, tries each in an episode, and fits the
    distribution to the best (Rubinstein 1999). Every recorded episode samples new weights from the last
    distribution.
    """
    generator = np.random.default_rng(seed)
    sizes = space_sizes(environment)
    shape = sizes.action, sizes.observation + 1
    mean, deviation = np.zeros(shape), np.ones(shape)
    for _ in range(GENERATIONS):
        weights = mean + deviation * generator.normal(size=(POPULATION, *shape))
        seeds = generator.integers(2**31, size=POPULATION)
        returns = [
            _return(environment, _linear(environment, each), int(start))
            for each, start in zip(weights, seeds)
        ]
        elite = weights[np.argsort(returns, kind="stable")[-ELITE:]]
        mean, deviation = elite.mean(0), elite.std(0)
    return lambda draw: _linear(environment, mean + deviation * draw.normal(size=shape))


POLICIES: dict[str, Maker] = {"random": random, "scripted": scripted, "half-trained": half_trained}


def noisy(policy: Policy, environment: Any, share: float, generator: np.random.Generator) -> Policy:
    """Return `policy` with a random action at each step with probability `share`."""
    space = environment.action_space
    return lambda seen: space.sample() if generator.random() < share else policy(seen)


def _return(environment: Any, policy: Policy, seed: int) -> float:
    """Return the sum of the rewards of an episode under `policy`."""
    seen, _ = environment.reset(seed=seed)
    total, ended = 0.0, False
    while not ended:
        seen, reward, terminated, truncated, _ = environment.step(policy(seen))
        total, ended = total + float(reward), terminated or truncated
    return total


def _linear(environment: Any, weights: np.ndarray) -> Policy:
    """Return a linear policy: the choice with the largest value, or the vector clipped to its bounds."""
    space = environment.action_space

    def policy(seen: np.ndarray) -> Any:
        values = weights @ np.append(seen, 1.0)
        return (
            int(values.argmax())
            if is_choice(space)
            else np.clip(values, space.low, space.high).astype(space.dtype)
        )

    return policy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recording:
    """Options of a recording.

    policies: each plays the same number of episodes, in turn; names of `POLICIES`, or of `trained` policies.
    noise: the largest share of random actions; each episode draws its share uniformly from 0 to this.
    max_steps: limit of an episode (default: the environment's limit). wrappers: 'module:Class' each, the
    innermost first.
    """

    environment: str
    out: str
    policies: tuple[str, ...] = ("scripted", "half-trained", "random")
    episodes: PositiveInt = 300
    noise: Share = 0.5
    max_steps: PositiveInt | None = None
    wrappers: tuple[str, ...] = ()
    trained: Mapping[str, Maker] = dataclasses.field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        check_ranges(self)
        for name in self.policies:
            if name not in {**POLICIES, **self.trained}:
                raise unknown("policy", name, POLICIES)
        if not self.policies:
            raise InputError(f"policies: expected some of {', '.join(POLICIES)}, got none")


def record(recording: Recording) -> list[float]:
    """Play and store the episodes; return their returns. The same recording gives the same episodes.

    They are stored in Minari's folder of data sets (`MINARI_DATASETS_PATH`), in its format of Arrow files.
    """
    _check_id(recording.out)
    options = {} if recording.max_steps is None else {"max_episode_steps": recording.max_steps}
    environment = make_environment(recording.environment, options, recording.wrappers)
    if environment.spec.max_episode_steps is None:
        raise InputError(
            f"environment {recording.environment}: its episodes may never end; cut them with --max-steps"
        )
    makers = {**POLICIES, **recording.trained}
    sources = [makers[name](environment, recording.seed) for name in recording.policies]
    environment.action_space.seed(recording.seed)
    generator = np.random.default_rng(recording.seed)
    buffers = []
    for number in range(recording.episodes):
        policy = sources[number % len(sources)](generator)
        share = float(generator.uniform(0, recording.noise))
        seed = recording.seed * recording.episodes + number
        buffers.append(play_and_record(environment, noisy(policy, environment, share, generator), seed))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about missing names of authors and addresses
        minari_library().create_dataset_from_buffers(
            recording.out,
            buffers,
            env=environment,
            data_format="arrow",
            algorithm_name=f"{', '.join(recording.policies)}; noise 0 to {recording.noise}",
            description=f"{recording.episodes} episodes of {recording.environment}, seed {recording.seed}",
        )
    environment.close()
    return [sum(buffer.rewards) for buffer in buffers]


def play_and_record(environment: Any, policy: Policy, seed: int) -> Any:
    """Play an episode under `policy`; return Minari's `EpisodeBuffer`. (Its `DataCollector` needs jax.)"""
    from minari.data_collector import EpisodeBuffer

    seen, _ = environment.reset(seed=seed)
    observations, actions, ended = [seen], [], False
    episode = EpisodeBuffer(seed=seed, observations=observations, actions=actions)
    while not ended:
        action = policy(seen)
        seen, reward, terminated, truncated, _ = environment.step(action)
        ended = terminated or truncated
        observations.append(seen)
        actions.append(action)
        episode.rewards.append(float(reward))
        episode.terminations.append(terminated)
        episode.truncations.append(truncated)
    return episode


def _check_id(name: str) -> None:
    """Raise `InputError` for an id that is invalid in Minari or already exists."""
    minari_library()
    from minari.dataset.minari_dataset import parse_dataset_id
    from minari.storage import get_dataset_path

    try:
        parse_dataset_id(name)
    except ValueError as error:
        raise InputError(
            f"--out {name}: expected an id such as cartpole/mixed-v0, with a version behind the name"
        ) from error
    place = Path(get_dataset_path(name))
    if place.exists():
        raise InputError(
            f"--out {name}: {place} is there already; choose another id, or `minari delete {name}`"
        )
