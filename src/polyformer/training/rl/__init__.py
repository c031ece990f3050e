"""Agents: environments, recorded episodes, and reinforcement learning of policies.

gymnasium provides the environments, Minari the files of episodes, TorchRL the collector, the advantages and
the loss of PPO. A trial plays episodes with a trained model: a policy, or a model of recorded episodes that
receives a target return.

Here are the environments by id, in the form that models require: vectors in, choices or vectors out.
`Rollout` has the steps of a policy in them, in the form that training reads and carries from update to
update.
"""

import dataclasses
import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import Tensor

from polyformer.core.errors import QUOTED, InputError, quote, shortened
from polyformer.core.state import State
from polyformer.data.episodes import is_choice, is_vector
from polyformer.models.plugins import is_imported

if TYPE_CHECKING:
    from tensordict import TensorDict


KNOWN = "gymnasium", "minigrid", "popgym"
"""Packages of environments and wrappers that a recipe may name; users must import others themselves."""

INSTALL = "pip install 'polyformer[agents]'"


class SpaceSizes(NamedTuple):
    """The numbers in an observation, and the choices of an action or the numbers in it (`continuous`)."""

    observation: int
    action: int
    continuous: bool

    def __str__(self) -> str:
        kind = "numbers in an action" if self.continuous else "choices"
        return f"observations of {self.observation} numbers and {self.action} {kind}"


def space_sizes(environment: Any) -> SpaceSizes:
    """Return the sizes of an environment from `make_environment`."""
    seen, actions = environment.observation_space, environment.action_space
    choice = is_choice(actions)
    return SpaceSizes(seen.shape[0], int(actions.n) if choice else actions.shape[0], not choice)


def check_installed(*names: str) -> None:
    """Raise `InputError` unless these modules are installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise InputError(f"environment: needs {name}: {INSTALL}")


def make_environment(
    name: str, options: Mapping[str, Any] | None = None, wrappers: Sequence[str] = ()
) -> Any:
    """Make the environment `name` with `options` and `wrappers` as a `gymnasium.Env`.

    name: for example 'CartPole-v1' or 'popgym:popgym-RepeatPreviousEasy-v0'. wrappers: 'module:Class' each,
    the first innermost. Observations are vectors, actions are numbered choices or vectors. Discrete
    observations become one-hot vectors; images, tuples and dicts are flattened. Raises `InputError` for a
    name or wrapper that does not exist and for spaces that cannot be converted.
    """
    check_installed("gymnasium")
    import gymnasium
    from gymnasium.wrappers import FlattenObservation

    if ":" in name:
        _check_known(name.partition(":")[0])
    try:
        environment = gymnasium.make(name, disable_env_checker=True, **(options or {}))
    except Exception as error:  # errors of gymnasium, and any error of the environment's code
        raise InputError(
            f"environment: gymnasium cannot make {quote(name)}: {_reason(error)}; write 'module:name' for "
            f"one that a module registers; those of popgym and minigrid come with {INSTALL}"
        ) from error
    try:
        for wrapper in wrappers:
            environment = _wrapped(environment, wrapper)
        _check_spaces(name, environment)
    except InputError:
        environment.close()
        raise
    return environment if is_vector(environment.observation_space) else FlattenObservation(environment)


def scale_actions(environment: Any) -> Any:
    """Return `environment` with vectors of actions scaled so that -1 and 1 are the lower and upper bounds.

    Actions beyond are clipped. Choices and numbers without two bounds are not scaled.
    """
    from gymnasium.spaces import Box
    from gymnasium.wrappers import TransformAction

    space = environment.action_space
    if is_choice(space):
        return environment
    unbounded = Box(-np.inf, np.inf, space.shape, np.float32)
    return TransformAction(environment, partial(rescale_action, space), unbounded)


def rescale_action(space: Any, action: np.ndarray) -> np.ndarray:
    """Scale an action [A] from -1 .. 1 to the bounds of the Box `space`, and clip it; see `scale_actions`."""
    bounded = np.isfinite(space.low) & np.isfinite(space.high)
    low, high = np.where(bounded, space.low, -1), np.where(bounded, space.high, 1)
    return np.clip(low + (action + 1) / 2 * (high - low), space.low, space.high).astype(space.dtype)


def vector_environment(count: int, make: Callable[[], Any], resets: bool = True) -> Any:
    """Return `count` environments as gymnasium's `SyncVectorEnv`.

    If `resets`, an episode that ended is reset in the next step; otherwise the caller must reset it.
    """
    from gymnasium.vector import AutoresetMode, SyncVectorEnv

    mode = AutoresetMode.NEXT_STEP if resets else AutoresetMode.DISABLED
    return SyncVectorEnv([make] * count, autoreset_mode=mode)


def _check_spaces(name: str, environment: Any) -> None:
    """Raise `InputError` unless observations can be flattened and actions are choices or vectors."""
    from gymnasium.spaces.utils import flatten_space

    actions = environment.action_space
    if not is_choice(actions) and not is_vector(actions):
        raise InputError(
            f"environment: {name} has the actions {_shown(actions)}, and a policy chooses among numbered "
            "ones or gives a vector; name a wrapper ('module:Class') that makes a Discrete space from 0 of "
            "them, or a Box of one dimension"
        )
    try:
        flat = flatten_space(environment.observation_space)
    except NotImplementedError:
        flat = None
    if flat is None or not is_vector(flat):
        raise InputError(
            f"environment: {name} has the observations {_shown(environment.observation_space)}, not all of "
            "which are vectors of one size; name a wrapper ('module:Class') that leaves out or changes them"
        )


def _wrapped(environment: Any, text: str) -> Any:
    """Return `environment` in the wrapper 'module:Class'."""
    import gymnasium

    module, _, name = text.partition(":")
    _check_known(module)
    try:
        wrapper = getattr(importlib.import_module(module), name, None)
    except (ImportError, ValueError):
        wrapper = None
    if not isinstance(wrapper, type) or not issubclass(wrapper, gymnasium.Wrapper):
        raise InputError(
            "wrappers: expected gymnasium's, 'module:Class', such as 'minigrid.wrappers:ImgObsWrapper', got "
            f"{quote(text)}"
        )
    try:
        return wrapper(environment)
    except Exception as error:  # any error of the wrapper's code
        why = _reason(error)
        raise InputError(f"wrappers: {quote(text)} does not take this environment: {why}") from error


def _check_known(module: str) -> None:
    """Raise `InputError` for a module that the user has not named: a run must not trigger imports."""
    if module.partition(".")[0] not in KNOWN and not is_imported(module):
        raise InputError(
            f"environment: {quote(module)} is a module of your own, which a recipe alone does not import; "
            f"pass --import {shortened(module, QUOTED)}"
        )


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return f"{text:.200}"


def _shown(space: Any) -> str:
    return quote(" ".join(str(space).split()))


MEMORY = "memory"
"""The key of a policy's state in a tensordict."""


@dataclasses.dataclass(frozen=True)
class Rollout(State):
    """N runs of T steps.

    observations: [N, T, O]. starts: whether an episode begins. actions: [N, T], vectors [N, T, A].
    log_probabilities: of the actions at the time of sampling. advantages, targets: [N, T], targets of the
    values. memory: the state before the first step of each run.
    """

    observations: Tensor
    starts: Tensor
    actions: Tensor
    log_probabilities: Tensor
    advantages: Tensor
    targets: Tensor
    memory: State

    def tensordict(self) -> "TensorDict":
        """Return the steps under the names that TorchRL's losses use, [N, T]."""
        from tensordict import TensorDict

        runs = self.starts.shape
        columns = {"is_init": self.starts, "advantage": self.advantages, "value_target": self.targets}
        memory = {
            name: tensor[:, None].expand(-1, runs[1], *tensor.shape[1:])
            for name, tensor in tensors_of(self.memory).items()
        }
        return TensorDict(
            {
                "observation": self.observations,
                "action": self.actions,
                "action_log_prob": self.log_probabilities,
                **{name: tensor[..., None] for name, tensor in columns.items()},
                MEMORY: memory,
            },
            runs,
        )


def tensors_of(state: State) -> dict[str, Tensor]:
    """Return a policy's state as tensors by the names of its fields."""
    return {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
