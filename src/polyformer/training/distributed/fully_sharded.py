"""Sharding of weights, gradients and optimizer state over processes, by torch's `fully_shard` (FSDP2).

Each layer of a stack is a unit: its weights are gathered before it runs, in either direction, and its
gradients are reduced and sharded afterwards. All other weights, including the token table, are one more unit,
gathered from the start of the forward pass to the end of the backward pass. Therefore a process holds its
shard of all weights, and at any moment about two whole layers and the tables. Zhao et al. 2023 (PyTorch
FSDP).

Weights and their communication stay in float32 (or the dtype of the model); products use bfloat16 by
autocast, as without sharding, so that the numbers are the same.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate

from polyformer.core.errors import InputError, quote
from polyformer.core.ops.compiled_code import prepare_inductor
from polyformer.nn.stack import Layer, Stack
from polyformer.training.distributed.collectives import local_shard


def apply_fsdp(model: nn.Module, mesh: DeviceMesh, root: nn.Module | None = None) -> list[str]:
    """Shard the parameters of `model` over `mesh`, [shard] or [data, shard]; return notes for the user.

    root: the module to call, `model` or a wrapper of it. The model may be on the CPU: each process moves its
    shard of one unit after another to the device of the mesh.
    """
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            raise InputError(
                f"shard: {quote(name)} holds {parameter.dtype}; only models in floating point are trained"
            )
    notes = []
    for name, stack in local_stacks(model).items():
        reason = why_not_per_layer(model, stack)
        if reason:
            notes.append(f"shard: the layers of {name or 'the model'} are gathered all at once: {reason}")
            continue
        for layer in local_layers(stack):
            fully_shard(layer, mesh=mesh)
    outermost = fully_shard(model if root is None else root, mesh=mesh)
    # A parameter without a gradient here may have a gradient in another process: reduce all of them.
    outermost.set_reduce_scatter_unused_params(
        any(stack.skips_layers for stack in local_stacks(model).values())
    )
    return notes


def local_stacks(model: nn.Module) -> dict[str, Stack]:
    """Return the stacks in `model` with layers in this process, by name."""
    named = model.named_modules()
    return {name: module for name, module in named if isinstance(module, Stack) and local_layers(module)}


def local_layers(stack: Stack) -> list[Layer]:
    """Return the layers of this process; in a pipeline the others are in other processes."""
    return [layer for layer in stack.layers if isinstance(layer, Layer)]


def why_not_per_layer(model: nn.Module, stack: Stack) -> str | None:
    """Return why the layers of `stack` cannot be gathered one by one; None if they can.

    Every process must call the same layers, by their `forward`, and no two units may own the same parameter.
    """
    if stack.reversible:
        return "a reversible stack runs parts of layers again in the backward pass"
    if stack.value_residual:
        return "all layers read the first layer's values"
    if stack.skips_layers:
        return "each process may leave out others"
    inside: dict[int, set[int]] = {}  # the layers that contain a module, which may be several
    for layer in stack.layers:
        for module in layer.modules():
            inside.setdefault(id(module), set()).add(id(layer))
    owners: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).update(inside.get(id(module), {0}))
    if any(len(units) > 1 for units in owners.values()):
        return "they share parameters with one another"
    return None


def compile_layers(model: nn.Module) -> None:
    """Compile every layer separately: the communication between layers stays outside the graphs."""
    prepare_inductor()
    for module in model.modules():
        if isinstance(module, Layer):
            module.compile()


@contextmanager
def unsharded(model: nn.Module) -> Iterator[None]:
    """Gather all weights outside of the layers of stacks, for calls that do not use `model.forward`.

    Decoding is an example of such calls.
    """
    if not isinstance(model, FSDPModule):
        yield
        return
    model.unshard()
    try:
        yield
    finally:
        model.reshard()


def split_groups_by_mesh(optimizer: torch.optim.Optimizer) -> None:
    """Split the groups of a new optimizer by mesh, because fused updates require a single mesh per group."""
    groups = []
    for group in optimizer.param_groups:
        parts: dict[DeviceMesh | None, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            parts.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
        groups += [{**group, "params": part} for part in parts.values()]
    optimizer.param_groups[:] = groups


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return the norm of the whole gradient, float64, in which every shard is counted once."""
    squares: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            own = torch.linalg.vector_norm(local_shard(parameter.grad), dtype=torch.float64).square()
            squares.setdefault(_shard_groups(parameter.grad), []).append(own)
    totals = []
    for groups, terms in squares.items():
        total = torch.stack(terms).sum()
        for group in groups:
            dist.all_reduce(total, group=group)
        totals.append(total)
    return torch.stack(totals).sum().sqrt() if totals else torch.zeros((), dtype=torch.float64)


def clip_gradients(parameters: Iterable[nn.Parameter], most: float, norm: Tensor) -> None:
    """Scale the gradients with norm `norm` to a norm of at most `most`, like torch's clipping."""
    factor = (most / (norm + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            gradient = local_shard(parameter.grad)
            gradient.mul_(factor.to(gradient.dtype))


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the whole of `tensor`, detached. Collective over the processes that have shards of it."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _shard_groups(tensor: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Return the groups of processes that hold different shards of `tensor`."""
    if not isinstance(tensor, DTensor):
        return ()
    dimensions = enumerate(tensor.placements)
    return tuple(
        tensor.device_mesh.get_group(i) for i, placement in dimensions if not isinstance(placement, Replicate)
    )
