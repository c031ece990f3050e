"""Parts of weights in processes that read the same batches, and what these exchange, differentiably."""

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, distribute_tensor


def divided(weight: nn.Parameter, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    """A parameter of the same numbers, of which each process of `mesh` keeps its part."""
    own = distribute_tensor(weight.detach(), mesh, [placement], src_data_rank=None)
    return nn.Parameter(own, weight.requires_grad)


def shown(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """x itself; its gradient is the sum of those of all processes, each of which uses x in its own way."""
    whole = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    return whole.to_local(grad_placements=[Partial()])


def summed(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """The sum of all processes' x, with x's gradient that of the sum."""
    return (
        DTensor.from_local(x, mesh, [Partial()], run_check=False).redistribute(mesh, [Replicate()]).to_local()
    )


def part(weight: Tensor) -> Tensor:
    """This process's rows or columns of a divided weight, differentiably."""
    return weight.to_local() if isinstance(weight, DTensor) else weight
