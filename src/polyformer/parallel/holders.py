"""Which processes of a pipeline hold which tensors of a model, and how the first gets those of others."""

import itertools
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from polyformer.model import Transformer
from polyformer.parallel.stages import Absent, needed, places

Use = tuple[dict[str, Any], str]
"""Where a tensor stands: the parameters or the buffers of a module, and its name there."""


class Holders:
    """Parameters and buffers of `model`, whole as yet, by the ranks that will hold them.

    layers: of each rank of `group` the runs of layers that it has.
    """

    def __init__(self, model: Transformer, layers: list[list[range]], group: dist.ProcessGroup):
        self.model, self.group, self.rank = model, group, dist.get_rank(group)
        self.dropped: list[tuple[nn.Module, str, nn.Module]] = []
        held = [{id(tensor) for tensor in _tensors(needed(model, own))} for own in layers]
        self.ranks: dict[int, tuple[int, ...]] = {}
        self.uses: dict[int, list[Use]] = {}
        for module in model.modules():
            for table in (module._parameters, module._buffers):
                for name, tensor in table.items():
                    if tensor is not None:
                        self.uses.setdefault(id(tensor), []).append((table, name))
                        ranks = tuple(rank for rank in range(len(layers)) if id(tensor) in held[rank])
                        self.ranks[id(tensor)] = ranks

    def of(self, tensor: Tensor) -> tuple[int, ...]:
        """The ranks that hold `tensor`, one of the model's; none for what no stage needs."""
        return self.ranks[id(tensor)]

    def drop(self) -> None:
        """Take what this rank does not hold out of the model, and its numbers out of memory."""
        for key, ranks in list(self.ranks.items()):
            if ranks and self.rank not in ranks:
                table, name = self.uses[key][0]
                empty = _put(self.uses[key], torch.empty_like(table[name], device="meta"))
                self.ranks[id(empty)] = self.ranks.pop(key)
        for parent, child in places(self.model):
            module = getattr(parent, child)
            if module is not None and any(tensor.is_meta for tensor in _tensors([module])):
                self.dropped.append((parent, child, module))
                setattr(parent, child, Absent())

    def rejoin(self) -> None:
        """Put back the modules that were taken out, without their numbers, which `fetch` gets."""
        for parent, child, module in self.dropped:
            setattr(parent, child, module)
        self.dropped = []

    def fetch(self, tensor: Tensor) -> Tensor | None:
        """The numbers of a tensor of the model, which is rejoined, in the first rank; None in the others.
        Every rank calls it, for all tensors in the same order."""
        ranks = self.of(tensor)
        if not ranks or ranks[0] == 0:
            return tensor if self.rank == 0 else None
        if self.rank == ranks[0]:
            dist.send(tensor.detach().contiguous(), group=self.group, group_dst=0)
        if self.rank:
            return None
        received = torch.empty_like(tensor, device=self.device)
        dist.recv(received, group=self.group, group_src=ranks[0])
        return received

    @property
    def device(self) -> torch.device:
        """Where the tensors of this rank are."""
        own = (tensor for tensor in _tensors([self.model]) if not tensor.is_meta)
        return next(own).device


def _put(uses: list[Use], tensor: Tensor) -> Tensor:
    """`tensor` wherever a parameter or buffer stood, as what that was; returns it as that."""
    table, name = uses[0]
    before = table[name]
    new = nn.Parameter(tensor, before.requires_grad) if isinstance(before, nn.Parameter) else tensor
    for table, name in uses:
        table[name] = new
    return new


def _tensors(modules: Iterable[nn.Module]) -> Iterable[Tensor]:
    return itertools.chain.from_iterable((*module.parameters(), *module.buffers()) for module in modules)
