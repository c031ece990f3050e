"""Sharding of weights, gradients and optimizer state over processes, by torch's `fully_shard` (FSDP2).

Each layer of a stack is a unit: its weights are gathered before it runs, in either direction, and its
gradients are reduced and sharded afterwards. All other weights, including the token table, are one more unit,
gathered from the start of the forward pass to the end of the backward pass. Therefore a process holds its
shard of all weights, and at any moment about two whole layers and the tables. Zhao et al. 2023 (PyTorch
FSDP).

Weights and their communication stay in float32 (or the dtype of the model); products use bfloat16 by
autocast, as without sharding, so that the numbers are the same.

Initialization is deferred: weights are drawn one by one, and no process holds all. A model is built with
every matrix dropped as soon as it is registered in its module (it is then on the "meta" device), and sharded.
Each matrix is then drawn in turn, whole, from the same random numbers as in a model built whole, and every
process keeps its shard: the initial weights are bit for bit the same.
"""

import mmap
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.modules.module import register_module_module_registration_hook
from torch.overrides import TorchFunctionMode

from polyformer.core.errors import InputError, quote
from polyformer.core.ops.compiled_code import prepare_inductor
from polyformer.models.architectures import Transformer
from polyformer.models.initialization import Draw, fillings, shrink_residual
from polyformer.nn.stack import Layer, Stack


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


def apply_to_full_tensor(function: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """Return function(tensor), of the same shape, computed on the whole tensor and sharded like `tensor`."""
    if not isinstance(tensor, DTensor):
        return function(tensor)
    whole = function(tensor.full_tensor())
    own = local_part(whole, tensor)
    return DTensor.from_local(
        own.contiguous(),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def local_part(whole: Tensor, like: DTensor) -> Tensor:
    """Return the local shard of `whole`, sharded like `like`, as a view."""
    shape, offset = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    own = whole[tuple(slice(start, start + size) for start, size in zip(offset, shape))]
    return own.reshape(like.to_local().shape)


LARGE = 1 << 18
"""Minimum size in bytes of a tensor with separate memory pages."""


@contextmanager
def deferred_initialization() -> Iterator[None]:
    """Build models without the values that `initialize` would set, inside this context."""
    handle = register_module_module_registration_hook(_move_to_meta)
    try:
        with _SeparatePages():
            yield
    finally:
        handle.remove()


class _SeparatePages(TorchFunctionMode):
    """Allocate large tensors in separate pages, which are returned to the system when the tensors are freed.

    Between small tensors that stay, an allocator would keep the memory of most of the freed tensors.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Return func(*args, **kwargs), with the memory of a large `torch.empty` from `mmap`."""
        kwargs = kwargs or {}
        if func is not torch.empty or kwargs.get("device") is not None:
            return func(*args, **kwargs)
        like = func(*args, **{**kwargs, "device": "meta"})
        if like.nbytes < LARGE:
            return func(*args, **kwargs)
        return torch.frombuffer(mmap.mmap(-1, like.nbytes), dtype=like.dtype).view(like.shape)


def _move_to_meta(parent: nn.Module, name: str, module: nn.Module | None) -> None:
    """Move the parameters that `initialize` sets from `module`, the child `name` of `parent`, to "meta"."""
    if module is None:
        return
    set_later = isinstance(module, nn.Linear | nn.Embedding)
    head = isinstance(parent, Transformer) and name == "head"
    for key in ("weight", "bias") if set_later else ("weight",) if head else ():
        parameter = module._parameters.get(key)
        if parameter is not None:
            module._parameters[key] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)


def materialize(model: nn.Module, device: torch.device, draw: Draw | None) -> None:
    """Allocate on `device` the shards of parameters that have no values yet, and fill them by `draw`.

    Without `draw` they must be loaded from a checkpoint.
    """
    if not any(parameter.is_meta for parameter in model.parameters()):
        return
    model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
    if draw is not None:
        draw(model)


def deferred_draw(model: nn.Module, initializer_range: float | None) -> Draw:
    """Return a function that draws the missing weights of `model` after it is sharded and allocated.

    It uses the random numbers that follow now.
    """
    state, order = torch.get_rng_state(), [*fillings(model, initializer_range)]

    @torch.no_grad()
    def draw(divided: nn.Module) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(state)
            for module, name, fill in order:  # also weights of other processes, to advance the random numbers
                weight = getattr(module, name)
                whole = torch.empty(weight.shape, dtype=weight.dtype)
                fill(whole)
                if isinstance(weight, DTensor):
                    weight.to_local().copy_(local_part(whole, weight))
                elif not weight.is_meta:  # else only other processes have it
                    weight.copy_(whole)
        shrink_residual(divided, initializer_range)

    return draw
