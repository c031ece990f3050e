"""Rows of one gymnasium environment as a batch of TorchRL's: vectors in, choices out."""

import importlib
import importlib.util
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from polyformer.core.errors import QUOTED, InputError, quote, shortened
from polyformer.plugins import is_imported

if TYPE_CHECKING:
    import gymnasium
    from torchrl.envs import TransformedEnv

KNOWN = "gymnasium", "minigrid", "popgym"
"""Packages of environments and wrappers that a recipe may name; others are the user's to import."""

INSTALL = "pip install 'polyformer[agents]'"


def check_installed(*names: str) -> None:
    """Raises `InputError` unless these modules are there."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise InputError(f"environment: needs {name}: {INSTALL}")


def make_environment(name: str, wrappers: Sequence[str] = (), **options: Any) -> "gymnasium.Env":
    """The environment `name` ('CartPole-v1', 'popgym:popgym-RepeatPreviousEasy-v0') in `wrappers`
    ('module:Class', the first innermost), whose observations are vectors and whose actions are choices.

    Observations that are choices become vectors with a single 1; images, tuples and dicts are laid out flat.
    Raises `InputError` for a name or wrapper that is not there and for spaces that have no such form.
    """
    check_installed("gymnasium")
    import gymnasium
    from gymnasium.spaces.utils import flatten_space
    from gymnasium.wrappers import FlattenObservation

    if ":" in name:
        _check_known(name.partition(":")[0])
    try:
        environment = gymnasium.make(name, disable_env_checker=True, **options)
    except (gymnasium.error.Error, ImportError, TypeError) as error:
        why = " ".join(str(error).split())
        raise InputError(
            f"environment: gymnasium cannot make {quote(name)}: {why}; write 'module:name' for one that a "
            f"module registers; those of popgym and minigrid come with {INSTALL}"
        ) from error
    for wrapper in wrappers:
        environment = _wrapper(wrapper)(environment)
    spaces = gymnasium.spaces
    actions = environment.action_space
    if not isinstance(actions, spaces.Discrete) or actions.start != 0:
        raise InputError(
            f"environment: {name} has the actions {actions}, and a policy chooses among numbered ones; name "
            "a wrapper ('module:Class') that makes a Discrete space of them"
        )
    try:
        flat = flatten_space(environment.observation_space)
    except NotImplementedError:
        flat = None
    if not isinstance(flat, spaces.Box):
        raise InputError(
            f"environment: {name} has the observations {_shown(environment.observation_space)}, not all of "
            "which are vectors of one size; name a wrapper ('module:Class') that leaves out or changes them"
        )
    return FlattenObservation(environment)


def rows_of(
    name: str, wrappers: Sequence[str], options: dict[str, Any], rows: int, device: torch.device
) -> "TransformedEnv":
    """`rows` environments side by side in this process, each reset by itself when its episode ends."""
    check_installed("torchrl")
    from gymnasium.vector import AutoresetMode, SyncVectorEnv
    from torchrl.envs import DTypeCastTransform, GymWrapper, InitTracker, TransformedEnv

    make = partial(make_environment, name, wrappers, **options)
    vector = SyncVectorEnv([make] * rows, autoreset_mode=AutoresetMode.DISABLED)
    env = TransformedEnv(GymWrapper(vector, categorical_action_encoding=True, device=device), InitTracker())
    dtype = env.observation_spec["observation"].dtype
    return env.append_transform(DTypeCastTransform(dtype, torch.float32, in_keys=["observation"]))


def _wrapper(text: str) -> Any:
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
    return wrapper


def _check_known(module: str) -> None:
    """Raises `InputError` for a module that the user has not named: a run's folder makes none be imported."""
    if module.partition(".")[0] not in KNOWN and not is_imported(module):
        raise InputError(
            f"environment: {quote(module)} is a module of your own, which a recipe alone does not import; "
            f"pass --import {shortened(module, QUOTED)}"
        )


def _shown(space: Any) -> str:
    return quote(" ".join(str(space).split()))
