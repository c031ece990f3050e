"""Which processes of a pipeline hold which tensors of a model, and how the first gets those of others."""

import itertools
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from polyformer.model import Transformer
from polyformer.parallel.shard import full
from polyformer.parallel.stages import Absent, needed, places

Use = tuple[dict[str, Any], str]
"""Where a tensor stands: the parameters or the buffers of a module, and its name there."""


class Holders:
    """Parameters and buffers of `model`, which has all as yet, by the ranks that will hold them.

    layers: of each rank of `group` the runs of layers that it has.
    """

    def __init__(self, model: Transformer, layers: list[list[range]], group: dist.ProcessGroup):
        self.model, self.group, self.rank = model, group, dist.get_rank(group)
        self.dropped: list[tuple[nn.Module, str, nn.Module]] = []
        self.source: dict[int, int] = {}  # of each tensor of the rejoined model, by its id
        held = [{id(tensor) for tensor in _tensors(needed(model, own))} for own in layers]
        uses: dict[int, list[Use]] = {}
        for module in model.modules():
            for table in (module._parameters, module._buffers):
                for name, tensor in table.items():
                    if tensor is not None:
                        uses.setdefault(id(tensor), []).append((table, name))
        ranks = range(len(layers))
        self.held = [(use, tuple(rank for rank in ranks if key in held[rank])) for key, use in uses.items()]

    def now(self) -> Iterable[tuple[Tensor, tuple[int, ...]]]:
        """The tensors as they are now, some of them divided since, and the ranks that hold each; none for
        what no stage needs."""
        return ((table[name], ranks) for ((table, name), *_), ranks in self.held)

    def drop(self) -> None:
        """Take what this rank does not hold out of the model, and its numbers out of memory."""
        gone: set[int] = set()
        for uses, ranks in self.held:
            if ranks and self.rank not in ranks:
                table, name = uses[0]
                _put(uses, torch.empty(table[name].shape, dtype=table[name].dtype, device="meta"))
                gone.add(id(table[name]))
        for parent, child in places(self.model):
            module = getattr(parent, child)
            if module is not None and any(id(tensor) in gone for tensor in _tensors([module])):
                self.dropped.append((parent, child, module))
                setattr(parent, child, Absent())

    def rejoin(self) -> None:
        """Put back the modules that were taken out, without their numbers, which `fetch` gets."""
        for parent, child, module in self.dropped:
            setattr(parent, child, module)
        self.dropped = []
        self.source = {id(tensor): next(iter(ranks), 0) for tensor, ranks in self.now()}

    def fetch(self, tensor: Tensor) -> Tensor | None:
        """All of a tensor of the model, which is rejoined, in the first of all processes; None in the others.
        Every process calls it, for all tensors in the same order."""
        source = self.source[id(tensor)]
        whole = full(tensor) if self.rank == source else None
        if dist.get_process_group_ranks(self.group)[0] != 0:
            return None  # a copy, or those that have other parts of the first ones' tensors
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
        """Where the tensors of this rank are."""
        own = (tensor for tensor in _tensors([self.model]) if not tensor.is_meta)
        return next(own).device


def _put(uses: list[Use], tensor: Tensor) -> None:
    """`tensor` wherever a parameter or buffer stood, as what that was."""
    table, name = uses[0]
    before = table[name]
    new = nn.Parameter(tensor, before.requires_grad) if isinstance(before, nn.Parameter) else tensor
    for table, name in uses:
        table[name] = new


def _tensors(modules: Iterable[nn.Module]) -> Iterable[Tensor]:
    return itertools.chain.from_iterable((*module.parameters(), *module.buffers()) for module in modules)
