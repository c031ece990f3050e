"""The processes that share an evaluation of a model that is divided."""

import torch

from polyformer.parallel.mesh import Mesh


class Copies:
    """The whole copies of a divided model, as far as tasks ask an `Accelerator` about processes."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.process_index, self.num_processes = mesh.rank("data"), mesh.size("data")

    def reduce(self, tensor: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
        """The sum over the copies."""
        total = tensor.clone()
        torch.distributed.all_reduce(total, group=self.mesh.group("data"))
        return total
