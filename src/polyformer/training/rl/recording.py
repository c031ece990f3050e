"""Recording of a Minari data set of episodes by a mixture of policies, for a range of returns."""

import dataclasses
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from polyformer.core.errors import InputError, unknown
from polyformer.core.ranges import PositiveInt, Share, check_ranges
from polyformer.data.sources.minari import minari_library
from polyformer.training.rl.environments import make_environment
from polyformer.training.rl.policies import POLICIES, Maker, Policy, noisy


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
