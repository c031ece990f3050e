"""Recurrences with context parallelism: processes exchange states instead of tokens.

The state after a run of tokens is an affine function of the state S before it:

    S' = M S + R        R: the state after the run from an empty state
                        M: the product of its decays, or with the delta rule of (1 - b_t k_t k_t^T) exp(g_t)

Every process computes M and R of its runs, and one all-gather sends them to all processes. Each run then
begins with the state that follows from the runs before it; an encoder also goes through the runs backwards.
The message has D (Dv + 1) numbers per head and run, with the delta rule D (Dv + D), whatever the length.
Another all-gather carries the tokens at the edges of runs that the short convolutions read. Each all-gather
depends on the one before it, so that all processes go through them in the same order backwards too.
"""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from polyformer.attention.functional.key_exchange import anchored, gather
from polyformer.attention.mechanisms.recurrence.fused_scan import Scan
from polyformer.attention.mechanisms.recurrence.scan import ScanInputs
from polyformer.core.ops.layers import depthwise_convolution
from polyformer.core.sequence.context import Context, Run, SequenceShard


def spread_scan(tokens: ScanInputs, context: Context, scan: Scan, earlier: Tensor | None) -> Tensor:
    """Return the outputs [B, H, T, Dv] of this process's tokens, in both directions if not causal.

    tokens: without `starts`, which follow from the documents of the whole sequence. earlier: the result of
    the all-gather before, if any.
    """
    shard = context.shard
    assert shard is not None
    rows = len(tokens.v)
    forward = dataclasses.replace(tokens, starts=_starts(context, shard, rows, False))
    y, gathered = _in_direction(forward, shard, scan, False, earlier)
    if context.causal:
        return y
    backward = dataclasses.replace(tokens, starts=_starts(context, shard, rows, True))
    back, _ = _in_direction(backward, shard, scan, True, gathered)
    y = y + back
    if not tokens.erases:  # the token itself counts once
        tokens = tokens.by_heads()
        y = y - (tokens.q * tokens.k).sum(-1, keepdim=True) * tokens.v
    return y


def _starts(context: Context, shard: SequenceShard, rows: int, backwards: bool) -> Tensor | None:
    """Return whether a document starts at each token of this process, [B, T], seen from either side."""
    doc = None if context.whole is None else context.whole.kv_doc
    if doc is None:
        return None
    doc = doc.expand(rows, -1)
    edge = (doc[:, :-1] != doc[:, 1:]) if doc.shape[1] else doc.bool()
    none = edge.new_zeros(rows, min(1, doc.shape[1]))
    return shard.take(torch.cat([edge, none] if backwards else [none, edge], 1))


def _in_direction(
    tokens: ScanInputs, shard: SequenceShard, scan: Scan, backwards: bool, earlier: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the outputs [B, H, T, Dv] of a scan through the whole sequence, and what was gathered for it."""
    parts = [_part(tokens, run, backwards) for run in _places(shard.local_runs)]
    own = torch.stack([summary(part, scan) for part in parts])
    gathered = gather(own if earlier is None else anchored(own, earlier), shard, "states")
    runs = [run for runs in shard.runs for run in runs]
    order = sorted(range(len(runs)), key=runs.__getitem__, reverse=backwards)
    summaries, outs = gathered.flatten(0, 1), []
    for part, run in zip(parts, shard.local_runs):
        before = order[: order.index(runs.index(run))]
        state = combine([summaries[index] for index in before], part)
        y = scan(part, state)[0] if part.v.shape[2] else part.v.flatten(2, -2)
        outs.append(y.flip(2) if backwards else y)
    return anchored(torch.cat(outs, 2), gathered), gathered


def _places(runs: Sequence[Run]) -> list[Run]:
    """Return where each run of slots is among the tokens of a process."""
    places, last = [], 0
    for start, stop in runs:
        places.append((last, last + stop - start))
        last += stop - start
    return places


def _part(tokens: ScanInputs, run: Run, backwards: bool) -> ScanInputs:
    """Return the tokens of a run, in the order of the scan."""

    def cut(x: Tensor, dim: int) -> Tensor:
        x = x.narrow(dim, run[0], run[1] - run[0])
        return x.flip(dim) if backwards else x

    tables = {name: cut(x, 2) for name, x in tokens.tables().items()}
    starts = None if tokens.starts is None else cut(tokens.starts, 1)
    return dataclasses.replace(tokens, **tables, starts=starts)


def summary(part: ScanInputs, scan: Scan) -> Tensor:
    """Return R and what is left of the state before a run, [B, H, D, Dv + 1], or M in place of the last
    column with the delta rule, [B, H, D, Dv + D]."""
    size = part.k.shape[-1]
    # The state after no tokens, which still depends on them, so that every process has a graph.
    keys, values = (x[:, :, :0].flatten(2, -2) for x in (part.by_heads().k, part.v))
    empty = keys.mT @ values
    if part.erases:
        # M is the state after the run from the unit matrix, without values.
        unit = torch.eye(size, dtype=empty.dtype, device=empty.device).expand(*empty.shape[:2], -1, -1)
        values = torch.cat([part.v, part.v.new_zeros(*part.v.shape[:-1], size)], -1)
        state = torch.cat([empty, unit], -1)
        return scan(dataclasses.replace(part, v=values), state)[1] if part.v.shape[2] else state
    kept = empty.new_ones(*empty.shape[:3], 1)
    if not part.v.shape[2]:
        return torch.cat([empty, kept], -1)
    if part.decay is not None:
        kept = kept * part.decay.sum(2).exp().unsqueeze(-1)
    if part.starts is not None:
        kept = kept.masked_fill(part.starts.any(1).view(-1, 1, 1, 1), 0)
    return torch.cat([scan(part, empty)[1], kept], -1)


def combine(summaries: Sequence[Tensor], part: ScanInputs) -> Tensor:
    """Return the state after runs with these summaries, from an empty state: [B, H, D, Dv]."""
    width = part.v.shape[-1]
    state = part.v.new_zeros(*part.v.shape[:2], part.k.shape[-1], width)
    for each in summaries:
        result, left = each[..., :width], each[..., width:]
        state = result + (left @ state if part.erases else left * state)
    return state


def spread_convolution(x: Tensor, taps: Tensor, context: Context) -> tuple[Tensor, Tensor]:
    """Return the short convolution of this process's tokens x [B, T, C], and what was gathered for it.

    taps: [w, C].
    """
    shard, whole, reach = context.shard, context.whole, len(taps) - 1
    assert shard is not None
    assert whole is not None
    # Tokens at the beginning and at the end of every run, [P, R, 2 w - 2, B, C]; zeros in shorter runs.
    edges = torch.stack([_edges(x[:, start:stop], reach) for start, stop in _places(shard.local_runs)])
    gathered = gather(edges, shard, "edges of runs")
    runs = [run for runs in shard.runs for run in runs]
    table = dict(zip(runs, gathered.flatten(0, 1)))
    outs = []
    for (start, stop), (first, last) in zip(shard.local_runs, _places(shard.local_runs)):
        if start == stop:
            outs.append(x[:, first:last])
            continue
        begin = max(start - reach, 0)
        end = stop if context.causal else min(stop + reach, whole.kv_len)
        before = [_at(slot, table, reach) for slot in range(begin, start)]
        after = [_at(slot, table, reach) for slot in range(stop, end)]
        wide = torch.cat([*before, x[:, first:last], *after], 1)
        valid, doc = (None if y is None else y[:, begin:end] for y in (whole.kv_valid, whole.kv_doc))
        y, _, _ = depthwise_convolution(wide, taps, context.causal, valid, doc)
        outs.append(y[:, start - begin : stop - begin])
    return anchored(torch.cat(outs, 1), gathered), gathered


def _edges(x: Tensor, reach: int) -> Tensor:
    """Return the first and the last `reach` tokens of x [B, T, C] with zeros for missing ones, by token."""
    count = min(reach, x.shape[1])
    missing = x.new_zeros(len(x), reach - count, x.shape[2])
    parts = [x[:, :count], missing, missing, x[:, x.shape[1] - count :]]
    return torch.cat(parts, 1).transpose(0, 1)


def _at(slot: int, table: dict[Run, Tensor], reach: int) -> Tensor:
    """Return the token [B, 1, C] at a slot near an edge of its run."""
    start, stop = next(run for run in table if run[0] <= slot < run[1])
    place = slot - start if slot - start < reach else 2 * reach - (stop - slot)
    return table[start, stop][place].unsqueeze(1)
