"""Sharded weights of processes that read the same batches, and their differentiable communication."""

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, distribute_tensor


def shard_parameter(weight: nn.Parameter, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    """Return a parameter with the same values, sharded over `mesh`."""
    own = distribute_tensor(weight.detach(), mesh, [placement], src_data_rank=None)
    return nn.Parameter(own, weight.requires_grad)


def copy_to_group(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return x; its gradient is summed over all processes, because each process uses x differently."""
    whole = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    return whole.to_local(grad_placements=[Partial()])


def all_reduce(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the sum of x over all processes; the gradient of x is the gradient of the sum."""
    return (
        DTensor.from_local(x, mesh, [Partial()], run_check=False).redistribute(mesh, [Replicate()]).to_local()
    )


def local_shard(tensor: Tensor) -> Tensor:
    """Return the local shard of `tensor`, differentiably and without a copy, or `tensor` if not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
