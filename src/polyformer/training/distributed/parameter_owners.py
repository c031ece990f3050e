"""The processes of a pipeline that hold each tensor, and the transfer of tensors to the first process."""

import itertools
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from polyformer.models.architectures import Transformer
from polyformer.training.distributed.fully_sharded import full_tensor
from polyformer.training.distributed.pipeline_stages import Placeholder, module_slots, modules_of_layers

TensorSlot = tuple[dict[str, Any], str]
"""The position of a tensor: the parameters or the buffers of a module, and its name there."""


class ParameterOwners:
    """The ranks that will hold each parameter and buffer of `model`, which is still complete.

    layers: for each rank of `group`, its ranges of layers.
    """

    def __init__(self, model: Transformer, layers: list[list[range]], group: dist.ProcessGroup):
        self.model, self.group, self.rank = model, group, dist.get_rank(group)
        self.dropped: list[tuple[nn.Module, str, nn.Module]] = []
        self.source: dict[int, int] = {}  # rank of each tensor of the rejoined model, by its id
        held = [{id(tensor) for tensor in _tensors(modules_of_layers(model, own))} for own in layers]
        uses: dict[int, list[TensorSlot]] = {}
        for module in model.modules():
            for table in (module._parameters, module._buffers):
                for name, tensor in table.items():
                    if tensor is not None:
                        uses.setdefault(id(tensor), []).append((table, name))
        ranks = range(len(layers))
        self.owned = [(use, tuple(rank for rank in ranks if key in held[rank])) for key, use in uses.items()]

    def current(self) -> Iterable[tuple[Tensor, tuple[int, ...]]]:
        """Return the current (maybe sharded) tensors with their ranks; no ranks if unused."""
        return ((table[name], ranks) for ((table, name), *_), ranks in self.owned)

    def remove_unowned(self) -> None:
        """Remove the tensors that this rank does not hold from the model, and free their memory."""
        gone: set[int] = set()
        for uses, ranks in self.owned:
            if ranks and self.rank not in ranks:
                table, name = uses[0]
                _replace(uses, torch.empty(table[name].shape, dtype=table[name].dtype, device="meta"))
                gone.add(id(table[name]))
        for parent, child in module_slots(self.model):
            module = getattr(parent, child)
            if module is not None and any(id(tensor) in gone for tensor in _tensors([module])):
                self.dropped.append((parent, child, module))
                setattr(parent, child, Placeholder())

    def restore_modules(self) -> None:
        """Restore the removed modules without their values, which `fetch` gets."""
        for parent, child, module in self.dropped:
            setattr(parent, child, module)
        self.dropped = []
        self.source = {id(tensor): next(iter(ranks), 0) for tensor, ranks in self.current()}

    def fetch(self, tensor: Tensor) -> Tensor | None:
        """Return a whole tensor of the rejoined model in the first of all processes, None in the others.

        Collective: every process calls it, for all tensors in the same order.
        """
        source = self.source[id(tensor)]
        whole = full_tensor(tensor) if self.rank == source else None
        if dist.get_process_group_ranks(self.group)[0] != 0:
            return None  # a replica, or the other shards of the same tensors
        if source == 0:
            return whole
        if whole is not None:
            dist.send(whole.contiguous(), group=self.group, group_dst=0)
        if self.rank:
            return None
        received = torch.empty_like(tensor, device=self.device)
        dist.recv(received, group=self.group, group_src=source)
        return received

    @property
    def device(self) -> torch.device:
        """Return the device of the tensors of this rank."""
        own = (tensor for tensor in _tensors([self.model]) if not tensor.is_meta)
        return next(own).device


def _replace(uses: list[TensorSlot], tensor: Tensor) -> None:
    """Set `tensor` at every position in `uses`, as a parameter if the previous value is a parameter."""
    table, name = uses[0]
    before = table[name]
    new = nn.Parameter(tensor, before.requires_grad) if isinstance(before, nn.Parameter) else tensor
    for table, name in uses:
        table[name] = new


def _tensors(modules: Iterable[nn.Module]) -> Iterable[Tensor]:
    return itertools.chain.from_iterable((*module.parameters(), *module.buffers()) for module in modules)
