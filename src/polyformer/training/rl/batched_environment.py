"""Batches of an environment for TorchRL, with vectors of actions scaled to the bounds -1 and 1."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from polyformer.training.rl.environments import (
    check_installed,
    make_environment,
    scale_actions,
    vector_environment,
)

if TYPE_CHECKING:
    from torchrl.envs import TransformedEnv


def batched_environment(
    name: str, wrappers: Sequence[str], options: dict[str, Any], rows: int, device: torch.device
) -> "TransformedEnv":
    """Return `rows` environments as a batch in this process; each is reset when its episode ends."""
    check_installed("torchrl")
    from torchrl.envs import DTypeCastTransform, GymWrapper, InitTracker, TransformedEnv

    vector = vector_environment(
        rows, lambda: scale_actions(make_environment(name, options, wrappers)), resets=False
    )
    env = TransformedEnv(GymWrapper(vector, categorical_action_encoding=True, device=device), InitTracker())
    dtype = env.observation_spec["observation"].dtype
    return env.append_transform(DTypeCastTransform(dtype, torch.float32, in_keys=["observation"]))
