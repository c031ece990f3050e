"""Environments of gymnasium's by their ids, as models read them: vectors in, choices or vectors out."""

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from polyformer.core.errors import QUOTED, InputError, quote, shortened
from polyformer.data.minari_source import is_choice, is_vector
from polyformer.plugins import is_imported

KNOWN = "gymnasium", "minigrid", "popgym"
"""Packages of environments and wrappers that a recipe may name; others are the user's to import."""

INSTALL = "pip install 'polyformer[agents]'"


def check_installed(*names: str) -> None:
    """Raises `InputError` unless these modules are there."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise InputError(f"environment: needs {name}: {INSTALL}")


def make_environment(
    name: str, options: Mapping[str, Any] | None = None, wrappers: Sequence[str] = ()
) -> Any:
    """The environment `name` ('CartPole-v1', 'popgym:popgym-RepeatPreviousEasy-v0'), made with `options`, in
    `wrappers` ('module:Class', the first innermost): a `gymnasium.Env` of vectors as observations, and of
    numbered choices or vectors as actions.

    Observations that are choices become vectors with a single 1; images, tuples and dicts are laid out flat.
    Raises `InputError` for a name or wrapper that is not there and for spaces that have no such form.
    """
    check_installed("gymnasium")
    import gymnasium
    from gymnasium.wrappers import FlattenObservation

    if ":" in name:
        _check_known(name.partition(":")[0])
    try:
        environment = gymnasium.make(name, disable_env_checker=True, **(options or {}))
    except Exception as error:  # gymnasium's own, and whatever the environment's code raises
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


def in_units(environment: Any) -> Any:
    """`environment`, whose vectors of actions count from -1, the lower bound, to 1, the upper, and end there;
    choices stay, and numbers without two bounds."""
    from gymnasium.spaces import Box
    from gymnasium.wrappers import TransformAction

    space = environment.action_space
    if is_choice(space):
        return environment
    unbounded = Box(-np.inf, np.inf, space.shape, np.float32)
    return TransformAction(environment, partial(from_units, space), unbounded)


def from_units(space: Any, action: np.ndarray) -> np.ndarray:
    """The action [A] in a Box that `in_units` makes of one in units."""
    bounded = np.isfinite(space.low) & np.isfinite(space.high)
    low, high = np.where(bounded, space.low, -1), np.where(bounded, space.high, 1)
    return np.clip(low + (action + 1) / 2 * (high - low), space.low, space.high).astype(space.dtype)


def side_by_side(count: int, make: Callable[[], Any], resets: bool = True) -> Any:
    """`count` environments as gymnasium's `SyncVectorEnv`; it `resets` an episode that ended in the step
    after, or leaves that to the caller."""
    from gymnasium.vector import AutoresetMode, SyncVectorEnv

    mode = AutoresetMode.NEXT_STEP if resets else AutoresetMode.DISABLED
    return SyncVectorEnv([make] * count, autoreset_mode=mode)


def _check_spaces(name: str, environment: Any) -> None:
    """Raises `InputError` unless observations have a form as vectors, and actions are choices or vectors."""
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
    """`environment` in the wrapper 'module:Class'."""
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
    except Exception as error:  # whatever the wrapper's code raises
        why = _reason(error)
        raise InputError(f"wrappers: {quote(text)} does not take this environment: {why}") from error


def _check_known(module: str) -> None:
    """Raises `InputError` for a module that the user has not named: a run's folder makes none be imported."""
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
