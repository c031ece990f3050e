"""Context-parallel `attend`: keys are sent to the queries, and the parts are joined by log-sum-exp.

There are three methods; the first is the reference:

    all      every process receives all keys: an all-gather
    needed   every process receives the keys that the layout lists for its queries: an all-to-all
    ring     the keys of every process pass from process to process, overlapped with computation

If a layout lists few keys, `needed` sends the least. If it lists most keys, `ring` sends little more, waits
less, and has the keys of only three processes in memory instead of all; in return it recomputes the parts in
the backward pass.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from polyformer.attention.functional.context_parallel.exchange import anchored, exchange
from polyformer.attention.functional.context_parallel.needs import Needs, find_needs
from polyformer.attention.functional.context_parallel.parts import (
    Compute,
    keys_at,
    nothing_seen,
    numbered,
    part_request,
)
from polyformer.attention.functional.context_parallel.ring import refuses_ring, run_ring
from polyformer.attention.functional.request import Request
from polyformer.attention.functional.splits.by_residue_class import join_by_lse
from polyformer.core.errors import InputError


def run_exchanged(request: Request, needs: Needs, compute: Compute) -> tuple[Tensor, Tensor]:
    """Exchange the keys; return output [B, H, T, Dv] and log-sum-exp [B, H, T] of the process's queries."""
    rank, width = needs.shard.rank, request.k.shape[3]
    kv = exchange(request.k, request.v, needs)
    results = []
    for first, part in numbered(needs.parts[rank]):
        outs, lses = [], []
        for span in part.spans():
            here = keys_at(kv, needs.keys[rank], span)
            out, lse = compute(part_request(request, first, part, span, here[..., :width], here[..., width:]))
            outs.append(out)
            lses.append(lse)
        # The runs of keys are parts of one softmax.
        joined = join_by_lse(outs, lses) if outs else nothing_seen(request, part.queries[1] - part.queries[0])
        results.append(joined)
    out, lse = in_order(results or [nothing_seen(request, 0)])
    return anchored(out, kv), lse


def in_order(results: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return the concatenated runs of queries: outputs [B, H, T, Dv] and log-sum-exps [B, H, T].

    The memory of the outputs is ordered by token, as the following layer reads all heads of a token.
    """
    if len(results) == 1:
        return results[0]
    outs, lses = zip(*results)
    return torch.cat([out.transpose(1, 2) for out in outs], 1).transpose(1, 2), torch.cat(lses, 2)


STRATEGIES = {"all": run_exchanged, "needed": run_exchanged, "ring": run_ring}

WORTH_A_RING = 0.5
"""Fraction of the keys of other processes that the queries need, from which on `auto` uses a ring."""


def choose_strategy(request: Request) -> tuple[Needs, str, str]:
    """Return the needs of the processes, the method of the exchange and the reason for it.

    The result is the same in every process. Raises `InputError` for a ring if the call does not allow it.
    """
    context, pattern = request.context, request.pattern
    shard, whole = context.shard, context.whole
    assert shard is not None
    assert whole is not None

    def needs() -> Needs:
        return find_needs(pattern, whole, shard, every=shard.strategy == "all")

    # A function may read values that change, so its needs are computed in every call.
    static = pattern is None or pattern.is_static()
    needed = whole.once(("needs", pattern, shard), needs) if static else needs()
    refused = refuses_ring(request)
    if shard.strategy == "ring" and refused:
        raise InputError(f"strategy: 'ring' cannot run this call: {refused}; use 'needed' or 'auto'")
    if shard.strategy != "auto":
        return needed, shard.strategy, "requested"
    part = needed.part_needed()
    if part < WORTH_A_RING:
        return needed, "needed", f"the layout lists {part:.0%} of the keys of others"
    if refused or len(shard.runs) < 3:
        return needed, "needed", refused or "with two processes a ring holds all keys at once too"
    return needed, "ring", f"the layout lists {part:.0%} of the keys of others: no process holds them all"
