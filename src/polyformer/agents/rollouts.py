"""Steps that a policy took, as training learns from them and carries them from update to update."""

import dataclasses
from typing import TYPE_CHECKING

from torch import Tensor

from polyformer.core.state import State

if TYPE_CHECKING:
    from tensordict import TensorDict

MEMORY = "memory"
"""Where a policy's state stands in a tensordict."""


@dataclasses.dataclass(frozen=True)
class Rollout(State):
    """N runs of T steps. observations [N, T, O]; starts, whether an episode begins; actions, and the
    logarithms of their probabilities then; advantages and the targets of values: [N, T] each, actions that
    are vectors [N, T, A]. memory: of each run before its first step."""

    observations: Tensor
    starts: Tensor
    actions: Tensor
    log_probabilities: Tensor
    advantages: Tensor
    targets: Tensor
    memory: State

    def tensordict(self) -> "TensorDict":
        """By the names that TorchRL's losses have for them, [N, T]."""
        from tensordict import TensorDict

        runs = self.starts.shape
        columns = {
            "is_init": self.starts,
            "advantage": self.advantages,
            "value_target": self.targets,
        }
        memory = {
            field.name: getattr(self.memory, field.name)[:, None].expand(
                -1, runs[1], *getattr(self.memory, field.name).shape[1:]
            )
            for field in dataclasses.fields(self.memory)
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
