"""The processes of a run as a grid, torch's `DeviceMesh`, with the dimensions of `ParallelConfig`."""

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from polyformer.parallel.config import DIMENSIONS, ParallelConfig

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Mesh:
    """Where this process stands among all; `device_mesh` has `DIMENSIONS`, those of one process too."""

    device_mesh: "DeviceMesh"

    def size(self, name: str) -> int:
        """How many processes stand along dimension `name`."""
        return self.device_mesh.size(DIMENSIONS.index(name))

    def rank(self, name: str) -> int:
        """The place of this process along dimension `name`."""
        return self.device_mesh.get_local_rank(name)

    def group(self, name: str) -> "ProcessGroup":
        """This process and those that differ from it along `name` alone."""
        return self.device_mesh.get_group(name)

    @property
    def data_world(self) -> int:
        """How many processes, or groups of them, read batches of their own."""
        return self.size("data") * self.size("shard")

    @property
    def data_rank(self) -> int:
        """Which of those this process belongs to; those that share a batch have the same."""
        return self.rank("data") * self.size("shard") + self.rank("shard")

    @property
    def readers(self) -> list[int]:
        """The ranks of those that read batches, one of each group, by their `data_rank`."""
        return self.device_mesh.mesh[0, :, :, 0, 0].flatten().tolist()

    @property
    def sharding(self) -> "DeviceMesh":
        """What weights are divided over, [shard], with whole copies along its first dimension where there
        are several: [data, shard]. Processes that share texts divide the weights too: their gradients are
        averaged in the same exchange. A pipeline sums over its copies after the last microbatch."""
        copies, parts = self.device_mesh["data"], self.device_mesh["shard"]
        if self.size("pipeline") > 1:
            return parts
        if self.size("context") > 1:
            parts = self.device_mesh["shard", "context"]._flatten("shard_context")
            return type(parts)._concatenate([copies, parts]) if self.size("data") > 1 else parts
        return self.device_mesh["data", "shard"] if self.size("data") > 1 else parts


def open_mesh(config: ParallelConfig, device_type: str) -> Mesh:
    """The mesh of all processes, whose group is open already (`torch.distributed.init_process_group`).

    device_type: "cpu" or "cuda". Raises `InputError` in every process where their number does not fit.
    """
    import torch.distributed as dist

    sizes = config.sizes(dist.get_world_size())
    return Mesh(_device_mesh(tuple(sizes.values()), device_type, dist.group.WORLD))


@functools.cache
def _device_mesh(sizes: tuple[int, ...], device_type: str, world: "ProcessGroup") -> "DeviceMesh":
    """The same for all runs of a process: every group has threads of its own, which last as long as it."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device_type, sizes, mesh_dim_names=DIMENSIONS)
