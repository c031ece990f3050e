"""Contexts for context parallelism: the tokens of one process, or a run of queries and keys."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from polyformer.core.errors import InputError, quote, unknown
from polyformer.core.sequence.context import Context, SequenceShard

STRATEGIES = "auto", "needed", "ring", "all"
"""How keys reach the processes that hold the queries that need them."""

GROUPS_IN_USE: "list[ContextParallel]" = []
"""The context parallelism in use, in any thread; empty in ordinary runs, which ask nothing else."""


def shard_sequence(whole: Context, shard: SequenceShard, device: torch.device) -> Context:
    """Return the part of `whole`, a self-attention context, for the process of `shard`.

    Its tables contain the process's tokens, as queries and new keys. Distances, positions of keys and
    `relations` are still indexed by the slots of the whole sequence.
    """
    if whole.q_len != whole.kv_len or whole.offset:
        raise InputError(
            f"context: expected a sequence that attends to itself, got {whole.q_len} queries and "
            f"{whole.kv_len} keys; a state cannot be sharded over processes"
        )
    changes = whole.mapped(shard.take, shard.take)
    slots = shard.slots(device)
    positions = {side: slots for side in ("q_pos", "kv_pos") if side not in changes}
    if whole.relations is not None:  # a row for each query of this process, with all slots
        changes["relations"] = shard.take(whole.relations, 1)
    lengths = {"q_len": shard.length, "kv_len": shard.length, "q_start": None}
    return dataclasses.replace(whole, **lengths, **changes, **positions, memo={}, shard=shard, whole=whole)


def shard_source(whole: Context, shard: SequenceShard, source: SequenceShard) -> Context:
    """Return the part of `whole`, a cross-attention context, for one process.

    It has `shard` of the queries and `source` of the keys.
    """
    lengths = {"q_len": shard.length, "kv_len": source.length}
    both, changes = shard.with_source(source), whole.mapped(shard.take, source.take)
    return dataclasses.replace(whole, **lengths, **changes, memo={}, shard=both, whole=whole)


def slice_context(
    whole: Context, queries: tuple[int, int], keys: tuple[int, int], device: torch.device
) -> Context:
    """Return the context of a run of queries and of keys; slots count from the first key."""
    changes = whole.mapped(lambda x: x[..., slice(*queries)], lambda x: x[..., slice(*keys)])
    for side, run in (("q_pos", queries), ("kv_pos", keys)):
        if side not in changes and keys[0]:
            changes[side] = torch.arange(*run, device=device)
    if whole.relations is not None:
        changes["relations"] = changes["relations"][:, slice(*queries)]
    lengths = {"q_len": queries[1] - queries[0], "kv_len": keys[1] - keys[0]}
    return dataclasses.replace(whole, **lengths, **changes, q_start=queries[0] - keys[0], memo={})


@dataclasses.dataclass(frozen=True)
class ContextParallel:
    """A group of processes over which models shard the sequences that they read.

    group: a torch process group. rank: this process in the group. processes: the size of the group.
    strategy: as in `SequenceShard`.
    """

    group: Any
    rank: int
    processes: int
    strategy: str = "auto"


_context_parallel: contextvars.ContextVar[ContextParallel | None] = contextvars.ContextVar(
    "context_parallel", default=None
)


def current_context_parallel() -> ContextParallel | None:
    """Return the active context parallelism, or None.

    None also in a traced graph: a model compiled as a whole reads whole sequences in every process.
    """
    return None if torch.compiler.is_compiling() else _context_parallel.get()


@contextlib.contextmanager
def use_context_parallel(over: ContextParallel) -> Iterator[None]:
    """Make models called inside shard the sequences that they read."""
    token = _context_parallel.set(over)
    GROUPS_IN_USE.append(over)
    try:
        yield
    finally:
        GROUPS_IN_USE.remove(over)
        _context_parallel.reset(token)


def gather_sequence(local: torch.Tensor, slots: torch.Tensor | None) -> torch.Tensor:
    """Return the table [..., T] of a whole sequence from the parts of all processes, without gradient.

    local: [..., t], for the tokens that the model outputs here. slots: [t], the slots of these tokens,
    `output.slots`; None if they are all slots. Every process of the group must call this.
    """
    over = current_context_parallel()
    if slots is None or over is None:
        return local
    length = torch.tensor([len(slots)], device=local.device)
    torch.distributed.all_reduce(length, group=over.group)
    whole = local.new_zeros(*local.shape[:-1], int(length))
    whole[..., slots] = local
    torch.distributed.all_reduce(whole, group=over.group)
    return whole


def context_parallel(group: Any = None, strategy: str = "auto") -> AbstractContextManager[None]:
    """Return a context in which a model shards its sequences over processes: context parallelism.

    All processes call the model with the same, whole inputs. Each computes its part of the tokens; their keys
    and values, or sums of them, are sent to the processes that need them. `output.loss` is the loss of the
    whole sequence in all processes; hidden states and logits cover the tokens of the process, listed in
    `output.slots`. Average the gradients over the processes, as in data parallelism: their mean is the
    gradient.

    group: a torch process group, by default all processes. strategy: how keys reach queries: "needed" (an
    all-to-all of the keys in the pattern's layout), "ring", "all" (an all-gather), or "auto".
    """
    import torch.distributed as dist

    if strategy not in STRATEGIES:
        raise unknown("strategy", strategy, STRATEGIES)
    if not dist.is_initialized():
        raise InputError(
            "context_parallel: expected several processes; call torch.distributed.init_process_group first"
        )
    try:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
    except (ValueError, AttributeError, TypeError) as error:
        raise InputError(f"group: expected a process group or None, got {quote(group)}") from error
    return use_context_parallel(ContextParallel(group, rank, size, strategy))
