"""The processes of a run as torch's `DeviceMesh`, with the dimensions of `ParallelConfig`."""

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from polyformer.training.config import DIMENSIONS, ParallelConfig

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Mesh:
    """The position of this process among all; `device_mesh` has all `DIMENSIONS`, even of size 1."""

    device_mesh: "DeviceMesh"

    def size(self, name: str) -> int:
        """Return the number of processes along dimension `name`."""
        return self.device_mesh.size(DIMENSIONS.index(name))

    def rank(self, name: str) -> int:
        """Return the rank of this process along dimension `name`."""
        return self.device_mesh.get_local_rank(name)

    def group(self, name: str) -> "ProcessGroup":
        """Return the group of processes that differ from this process only along `name`, including itself."""
        return self.device_mesh.get_group(name)

    @property
    def data_world(self) -> int:
        """Return the number of processes, or groups of processes, that read separate batches."""
        return self.size("data") * self.size("shard")

    @property
    def data_rank(self) -> int:
        """Return the data-parallel rank of this process; processes that share a batch have the same."""
        return self.rank("data") * self.size("shard") + self.rank("shard")

    @property
    def readers(self) -> list[int]:
        """Return the ranks of the processes that read batches, one per group, by their `data_rank`."""
        return self.device_mesh.mesh[0, :, :, 0, 0].flatten().tolist()

    @property
    def sharding(self) -> "DeviceMesh":
        """Return the mesh of sharded weights: [shard], or [data, shard] if there are several replicas.

        Processes that share texts (context) also shard the weights, so that their gradients are averaged in
        the same collective. A pipeline sums over its replicas after the last microbatch.
        """
        copies, parts = self.device_mesh["data"], self.device_mesh["shard"]
        if self.size("pipeline") > 1:
            return parts
        if self.size("context") > 1:
            parts = self.device_mesh["shard", "context"]._flatten("shard_context")
            return type(parts)._concatenate([copies, parts]) if self.size("data") > 1 else parts
        return self.device_mesh["data", "shard"] if self.size("data") > 1 else parts


class ReplicaGroup:
    """The replicas of a sharded model, with the interface of an `Accelerator` that tasks use."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.process_index, self.num_processes = mesh.rank("data"), mesh.size("data")

    def reduce(self, tensor: "torch.Tensor", reduction: str = "mean") -> "torch.Tensor":
        """Return the sum over the replicas."""
        import torch.distributed as dist

        total = tensor.clone()
        dist.all_reduce(total, group=self.mesh.group("data"))
        return total

    def gather_lists(self, values: list[Any]) -> list[Any]:
        """Return the lists of all replicas, concatenated; processes of one replica have the same list."""
        import torch.distributed as dist

        parts: list[list[Any]] = [[]] * self.num_processes
        dist.all_gather_object(parts, values, group=self.mesh.group("data"))
        return [value for part in parts for value in part]


def open_mesh(config: ParallelConfig, device_type: str) -> Mesh:
    """Return the mesh of all processes; `torch.distributed.init_process_group` must have been called.

    device_type: "cpu" or "cuda". Raises `InputError` in every process if their number does not fit.
    """
    import torch.distributed as dist

    sizes = config.sizes(dist.get_world_size())
    return Mesh(_device_mesh(tuple(sizes.values()), device_type, dist.group.WORLD))


@functools.cache
def _device_mesh(sizes: tuple[int, ...], device_type: str, world: "ProcessGroup") -> "DeviceMesh":
    """Return a cached mesh, because the threads of its groups live as long as the process."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device_type, sizes, mesh_dim_names=DIMENSIONS)
