"""The processes that share the evaluation of a sharded model."""

import torch

from polyformer.training.distributed.mesh import Mesh


class Copies:
    """The replicas of a sharded model, with the interface of an `Accelerator` that tasks use."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.process_index, self.num_processes = mesh.rank("data"), mesh.size("data")

    def reduce(self, tensor: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
        """Return the sum over the replicas."""
        total = tensor.clone()
        torch.distributed.all_reduce(total, group=self.mesh.group("data"))
        return total
