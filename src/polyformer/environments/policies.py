"""Policies to record episodes by: random ones, scripted ones of classic control, and half-trained ones.

A policy maps an observation [S] to an action; a `Source` draws one for each episode.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from polyformer.core.errors import InputError

Policy = Callable[[np.ndarray], Any]
Source = Callable[[np.random.Generator], Policy]
Maker = Callable[[Any, int], Source]
"""Of an environment and a seed."""

POPULATION, ELITE, GENERATIONS = 24, 6, 4
"""Of the cross-entropy method: too few generations for a good policy, and enough for one above chance."""


def _cart_pole(seen: np.ndarray) -> int:
    """A linear controller, which never falls."""
    return int(0.1 * seen[0] + 0.3 * seen[1] + 3 * seen[2] + seen[3] > 0)


def _pendulum(seen: np.ndarray) -> np.ndarray:
    """Pump energy up to that of standing still on top, and hold it there."""
    cosine, sine, speed = seen
    energy = speed**2 / 2 + 15 * (cosine - 1)  # of the acceleration 15 sin(angle) + 3 torque
    pump = 2 * np.sign(-energy) * (1 if speed >= 0 else -1)
    torque = -(12 * sine + 3 * speed) if cosine > 0.8 else pump
    return np.clip([torque], -2, 2).astype(np.float32)


def _acrobot(seen: np.ndarray) -> int:
    """Push the way the second link turns."""
    return 2 if seen[5] > 0 else 0


def _mountain_car(seen: np.ndarray) -> int:
    """Push the way it rolls."""
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
    """The policy that is written down for this environment; `InputError` where there is none."""
    name = environment.spec.id
    if name not in SCRIPTED:
        raise InputError(
            f"--policies: no scripted policy for {name}, only for {', '.join(SCRIPTED)}; "
            "use random and half-trained"
        )
    return lambda generator: SCRIPTED[name]


def random(environment: Any, seed: int) -> Source:
    """Actions drawn from the space."""
    space = environment.action_space
    space.seed(seed)
    return lambda generator: lambda seen: space.sample()


def half_trained(environment: Any, seed: int) -> Source:
    """Linear policies near the best that a few generations of the cross-entropy method come to.

    Each generation draws weights from a normal distribution, tries each in an episode, and fits the
    distribution to the best (Rubinstein 1999). Every episode recorded has weights of its own, from the last.
    """
    generator = np.random.default_rng(seed)
    shape = _actions(environment), environment.observation_space.shape[0] + 1
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


POLICIES: dict[str, Maker] = {
    "random": random,
    "scripted": scripted,
    "half-trained": half_trained,
}


def noisy(policy: Policy, environment: Any, share: float, generator: np.random.Generator) -> Policy:
    """`policy`, but for a random action with probability `share` at every step."""
    space = environment.action_space
    return lambda seen: space.sample() if generator.random() < share else policy(seen)


def _return(environment: Any, policy: Policy, seed: int) -> float:
    """That of an episode under `policy`."""
    seen, _ = environment.reset(seed=seed)
    total, ended = 0.0, False
    while not ended:
        seen, reward, terminated, truncated, _ = environment.step(policy(seen))
        total, ended = total + float(reward), terminated or truncated
    return total


def _actions(environment: Any) -> int:
    space = environment.action_space
    return int(space.n) if hasattr(space, "n") else space.shape[0]


def _linear(environment: Any, weights: np.ndarray) -> Policy:
    """The choice of the largest value, or the vector inside its bounds."""
    space = environment.action_space

    def policy(seen: np.ndarray) -> Any:
        values = weights @ np.append(seen, 1.0)
        return (
            int(values.argmax())
            if hasattr(space, "n")
            else np.clip(values, space.low, space.high).astype(space.dtype)
        )

    return policy
