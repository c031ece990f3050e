"""Contexts of sequences that are spread over processes: one process's tokens; a run of queries and keys."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from polyformer.core.errors import InputError, unknown
from polyformer.sequence.context import Context
from polyformer.sequence.shares import Share

WAYS = "auto", "needed", "ring", "all"
"""How keys come to the processes whose queries need them."""

TABLES = "pos", "doc", "segment", "marked"
"""What is said of queries (`q_pos`) and of keys (`kv_pos`) alike."""


def spread(whole: Context, share: Share, device: torch.device) -> Context:
    """`whole`, the context of a sequence and itself, as the process of `share` has it.

    Its tables are those of the process's own tokens, its queries and new keys. Distances, positions of keys
    and `relations` go on to be asked for by the slots of the whole sequence.
    """
    if whole.q_len != whole.kv_len or whole.offset:
        raise InputError(
            f"context: expected a sequence that attends to itself, got {whole.q_len} queries and "
            f"{whole.kv_len} keys; a state cannot be spread over processes"
        )
    changes = {}
    for name in TABLES:
        for side in ("q", "kv"):
            table = getattr(whole, f"{side}_{name}")
            changes[f"{side}_{name}"] = None if table is None else share.take(table)
    slots = share.slots(device)
    for side in ("q_pos", "kv_pos"):
        changes[side] = slots if changes[side] is None else changes[side]
    changes["kv_valid"] = None if whole.kv_valid is None else share.take(whole.kv_valid)
    changes["relations"] = None if whole.relations is None else share.take(whole.relations, 1)
    lengths = {"q_len": share.length, "kv_len": share.length, "q_start": None}
    return dataclasses.replace(whole, **lengths, **changes, memo={}, share=share, whole=whole)


def spread_source(whole: Context, share: Share, source: Share) -> Context:
    """`whole`, the context of queries over all of a source, as the process has it: `share` of the queries and
    `source` of the keys."""
    return dataclasses.replace(
        whole,
        q_len=share.length,
        kv_len=source.length,
        kv_valid=None if whole.kv_valid is None else source.take(whole.kv_valid),
        memo={},
        share=share.reading(source),
        whole=whole,
    )


def cut(whole: Context, queries: tuple[int, int], keys: tuple[int, int], device: torch.device) -> Context:
    """The context of a run of queries and a run of keys of `whole`, whose slots count from the first key."""
    changes = {}
    for side, (start, stop) in (("q", queries), ("kv", keys)):
        for name in TABLES:
            table = getattr(whole, f"{side}_{name}")
            changes[f"{side}_{name}"] = None if table is None else table[..., start:stop]
        if changes[f"{side}_pos"] is None and keys[0]:
            changes[f"{side}_pos"] = torch.arange(start, stop, device=device)
    for name in ("kv_valid", "relations"):
        table = getattr(whole, name)
        changes[name] = None if table is None else table[..., keys[0] : keys[1]]
    if changes["relations"] is not None:
        changes["relations"] = changes["relations"][:, queries[0] : queries[1]]
    lengths = {"q_len": queries[1] - queries[0], "kv_len": keys[1] - keys[0]}
    return dataclasses.replace(whole, **lengths, **changes, q_start=queries[0] - keys[0], memo={})


@dataclasses.dataclass(frozen=True)
class Spreading:
    """A group of processes over which models spread the sequences that they read.

    group: a torch process group. rank: this process in it. processes: how many it has. way: as in `Share`.
    """

    group: Any
    rank: int
    processes: int
    way: str = "auto"


_spreading: contextvars.ContextVar[Spreading | None] = contextvars.ContextVar("spreading", default=None)


def current_spreading() -> Spreading | None:
    """How models spread what they read, here and now; None where they do not, and in a traced graph: a whole
    model that is compiled reads whole sequences in every process."""
    return None if torch.compiler.is_compiling() else _spreading.get()


@contextlib.contextmanager
def spreading(over: Spreading) -> Iterator[None]:
    """Models called inside spread the sequences that they read."""
    token = _spreading.set(over)
    try:
        yield
    finally:
        _spreading.reset(token)


def whole_table(own: torch.Tensor, slots: torch.Tensor | None) -> torch.Tensor:
    """[..., T] of a whole sequence from each process's part of it: numbers that have no gradient.

    own: [..., t] of the tokens that are a model's output here. slots: [t], which they are, `output.slots`;
    None where they are all. Every process of the group calls it.
    """
    over = current_spreading()
    if slots is None or over is None:
        return own
    length = torch.tensor([len(slots)], device=own.device)
    torch.distributed.all_reduce(length, group=over.group)
    whole = own.new_zeros(*own.shape[:-1], int(length))
    whole[..., slots] = own
    torch.distributed.all_reduce(whole, group=over.group)
    return whole


def spread_over(group: Any = None, way: str = "auto") -> AbstractContextManager[None]:
    """Inside, a model spreads the sequences that it reads over the processes of a group: context parallelism.

    All processes call it with the same, whole inputs; each computes its part of the tokens, whose keys and
    values, or sums of them, go to those that need them. `output.loss` is that of the whole sequence in all
    processes; hidden states and logits are those of the process's own tokens, which `output.slots` names.
    Gradients are to be averaged over the processes, as data parallelism does: their mean is the gradient.

    group: a torch process group, by default all processes. way: how keys come to queries: "needed" (an
    all-to-all of what the pattern's layout names), "ring", "all" (an all-gather), or "auto".
    """
    import torch.distributed as dist

    if way not in WAYS:
        raise unknown("way", way, WAYS)
    return spreading(Spreading(group, dist.get_rank(group), dist.get_world_size(group), way))
