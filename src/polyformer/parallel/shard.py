"""Weights, gradients and the optimizer's memory divided over processes, by torch's `fully_shard` (FSDP2).

Each layer of a stack is a unit: its weights are gathered when it is called, in either direction, and its
gradients summed and divided when it is done. All other weights, the token table among them, are one unit
more, gathered from the beginning of the forward pass to the end of the backward pass. So a process holds its
part of all, and at any time the whole of about two layers and of the tables. Zhao et al. 2023 (PyTorch FSDP).

Weights and their exchange stay float32 (or what the model is in); products take bfloat16 by autocast, as
without sharding, so that the numbers are the same.
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
from polyformer.stack import Layer, Stack


def shard(model: nn.Module, mesh: DeviceMesh, root: nn.Module | None = None) -> list[str]:
    """Divide the parameters of `model` over `mesh`, [shard] or [data, shard]; returns notes for the user.

    root: what is called to run it, `model` itself or a module around it. The model may be on the CPU: each
    process takes its part of one unit after another to the mesh's device.
    """
    _check(model)
    notes = []
    for name, stack in stacks(model).items():
        reason = why_whole(model, stack)
        if reason:
            notes.append(f"shard: the layers of {name or 'the model'} are gathered all at once: {reason}")
            continue
        for layer in layers(stack):
            fully_shard(layer, mesh=mesh)
    outermost = fully_shard(model if root is None else root, mesh=mesh)
    # What has no gradient here may have one in another process: all exchange as much.
    outermost.set_reduce_scatter_unused_params(any(stack.leaves_out for stack in stacks(model).values()))
    return notes


def stacks(model: nn.Module) -> dict[str, Stack]:
    """The stacks in `model` of which this process has layers, by name."""
    named = model.named_modules()
    return {name: module for name, module in named if isinstance(module, Stack) and layers(module)}


def layers(stack: Stack) -> list[Layer]:
    """Those that this process has: of a pipeline's stage the others are in other processes."""
    return [layer for layer in stack.layers if isinstance(layer, Layer)]


def why_whole(model: nn.Module, stack: Stack) -> str | None:
    """Why the layers of `stack` cannot be gathered one at a time; None where they can.

    Every process must call the layers alike, by their `forward`, and no two units may own one parameter.
    """
    if stack.reversible:
        return "a reversible stack runs parts of layers again in the backward pass"
    if stack.leaves_out:
        return "each process may leave out others"
    inside: dict[int, set[int]] = {}  # of a module: the layers that it is in, for it may be in several
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
    """Compile every layer alone: what is exchanged between them stays outside the graphs."""
    for module in model.modules():
        if isinstance(module, Layer):
            module.compile()


def set_last_pass(model: nn.Module, last: bool) -> None:
    """Whether gradients are summed over whole copies of the model after this pass, or after a later one.

    Within a copy they are summed after every pass: else each process would hold those of all weights.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_all_reduce(last)


@contextmanager
def unsharded(model: nn.Module) -> Iterator[None]:
    """While it lasts, all weights outside the layers of stacks are gathered, for calls that do not come by
    `model.forward`, such as decoding's."""
    if not isinstance(model, FSDPModule):
        yield
        return
    model.unshard()
    try:
        yield
    finally:
        model.reshard()


def split_by_mesh(optimizer: torch.optim.Optimizer) -> None:
    """Split groups of a new optimizer so that in each all parameters lie on one mesh: its fused updates
    take no others together."""
    groups = []
    for group in optimizer.param_groups:
        parts: dict[DeviceMesh | None, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            parts.setdefault(_mesh(parameter), []).append(parameter)
        groups += [{**group, "params": part} for part in parts.values()]
    optimizer.param_groups[:] = groups


def update_parts(
    optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], clip: float | None, norm: Tensor
) -> Tensor:
    """Clip the gradients, update this process's parts of the weights, forget the gradients; returns `norm`,
    that of the whole gradient before clipping."""
    if clip is not None:
        clip_gradients(parameters, clip, norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The norm of the whole gradient, float64: every part of it counted once, wherever it lies."""
    squares: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            own = torch.linalg.vector_norm(local(parameter.grad), dtype=torch.float64).square()
            squares.setdefault(_divided_over(parameter.grad), []).append(own)
    totals = []
    for groups, terms in squares.items():
        total = torch.stack(terms).sum()
        for group in groups:
            dist.all_reduce(total, group=group)
        totals.append(total)
    return torch.stack(totals).sum().sqrt() if totals else torch.zeros((), dtype=torch.float64)


def clip_gradients(parameters: Iterable[nn.Parameter], most: float, norm: Tensor) -> None:
    """Scale the gradients, whose norm is `norm`, to a norm of at most `most`; as torch's clipping."""
    factor = (most / (norm + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            gradient = local(parameter.grad)
            gradient.mul_(factor.to(gradient.dtype))


def local(tensor: Tensor) -> Tensor:
    """This process's part of `tensor`: the memory itself; all of it where it is not divided."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full(tensor: Tensor) -> Tensor:
    """All of `tensor`, without its graph, in the processes that have parts of it, which all call it."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _mesh(tensor: Tensor) -> DeviceMesh | None:
    return tensor.device_mesh if isinstance(tensor, DTensor) else None


def _divided_over(tensor: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """The groups of processes that hold different parts of `tensor`."""
    if not isinstance(tensor, DTensor):
        return ()
    dimensions = enumerate(tensor.placements)
    return tuple(
        tensor.device_mesh.get_group(i) for i, placement in dimensions if not isinstance(placement, Replicate)
    )


def _check(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            raise InputError(
                f"shard: {quote(name)} holds {parameter.dtype}; only models in floating point are trained"
            )
