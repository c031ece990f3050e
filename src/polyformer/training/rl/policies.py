"""Policies for recording episodes: random, scripted for classic control, and half-trained.

A policy maps an observation [S] to an action; a `Source` creates a policy for each episode.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from polyformer.core.errors import InputError
from polyformer.data.sources.minari import is_choice
from polyformer.training.rl.environments import space_sizes

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
