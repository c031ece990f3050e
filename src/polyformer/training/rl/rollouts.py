"""The steps of a policy, in the form that training reads and carries from update to update."""

import dataclasses
from typing import TYPE_CHECKING

from torch import Tensor

from polyformer.core.state import State

if TYPE_CHECKING:
    from tensordict import TensorDict

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
