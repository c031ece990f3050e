"""Linear attention with context parallelism: processes exchange sums of keys instead of keys.

Every process sums the keys of its runs of slots, and one all-gather distributes the sums to all processes. A
causal run continues from the sums of all runs before it; otherwise a query reads the sums of all runs. The
message has M (Dv + 1) numbers per head and run, independent of the sequence length. With documents the sums
cover only the document at the end of a run, and without causality also the document at its beginning: no
other document reaches beyond a run.
"""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from polyformer.attention.functional.key_exchange import anchored, gather
from polyformer.attention.mechanisms.linear.passes import attend_causal_documents, attend_document, spans
from polyformer.attention.mechanisms.linear.sums import (
    LinearInputs,
    Sums,
    append_one,
    divide,
    empty_sums,
    finite_top,
)
from polyformer.core.sequence.context import Context, Run, SequenceShard


@dataclasses.dataclass(frozen=True, eq=False)
class RunSums:
    """The sums over the keys of a run, with the heads of all rows in one dimension N.

    decay: [N], the sum of the log decays before its tokens. slots: the run. document: [B], the document of
    the keys; None if there is only one document, and for a run without tokens.
    """

    sums: Sums
    decay: Tensor
    slots: Run
    document: Tensor | None

    def select_row(self, row: int, heads: slice) -> "RunSums":
        """Return the sums of one batch row with the heads `heads`."""
        document = None if self.document is None else self.document[row : row + 1]
        return RunSums(Sums(*(x[heads] for x in self.sums)), self.decay[heads], self.slots, document)


def context_parallel_attention(inputs: LinearInputs, context: Context) -> Tensor:
    """Return output [B, H, T, Dv] of this process's queries; `inputs` has this process's keys."""
    shard = context.shard
    assert shard is not None
    if shard.source is not None:
        return _attend_to_source(inputs, shard)
    # Without causality earlier runs also need the document at the beginning of a run.
    both = context.kv_doc is not None and not inputs.causal
    parts, last = [], 0
    for start, stop in shard.local_runs:
        first, last = last, last + stop - start
        doc = None if context.kv_doc is None else context.kv_doc[:, first:last]
        parts.append((inputs.tokens(slice(first, last)), doc, (start, stop)))
    own = [
        _pack(*document_sums(part, doc, leads))
        for part, doc, _ in parts
        for leads in (False, True)[: 1 + both]
    ]
    # One all-gather, of a size that does not depend on the number of tokens.
    gathered = gather(torch.stack(own), shard, "sums of keys")
    # In the order of the gathered sums: process, run, end or beginning.
    edges = [(run, leads) for runs in shard.runs for run in runs for leads in (False, True)[: 1 + both]]
    all_runs = [
        RunSums(*_unpack(sums, parts[0][0]), run, _edge_document(context, run, leads))
        for (run, leads), sums in zip(edges, gathered.flatten(0, 1))
    ]
    outs = [_attend_run(part, doc, run, all_runs) for part, doc, run in parts]
    return anchored(torch.cat(outs, 2), gathered)


def _attend_to_source(inputs: LinearInputs, shard: SequenceShard) -> Tensor:
    """Return the output of this process's queries over a source distributed over the processes."""
    gathered = gather(_pack(*document_sums(inputs, None, False)), shard, "sums of keys")
    all_runs = [RunSums(*_unpack(sums, inputs), (0, 0), None) for sums in gathered]
    fresh = empty_sums(inputs.weight[..., 0].numel(), inputs.v.shape[3], inputs.kernel)
    return anchored(read_sums(inputs, combine_sums(fresh, all_runs, None)), gathered)


def _attend_run(part: LinearInputs, doc: Tensor | None, run: Run, all_runs: Sequence[RunSums]) -> Tensor:
    """Return the output of the queries of a run, in documents `doc` [B, T]."""
    if not part.q.shape[2]:
        return torch.zeros_like(part.v)
    fresh = empty_sums(part.weight[..., 0].numel(), part.v.shape[3], part.kernel)
    if part.causal:
        before = sorted((s for s in all_runs if s.slots[1] <= run[0]), key=lambda s: -s.slots[0])
        past = combine_sums(fresh, before, None if doc is None else doc[:, 0])
        return (attend_document(part, past) if doc is None else attend_causal_documents(part, doc, 0, past))[
            0
        ]
    others = [s for s in all_runs if s.slots != run]
    if doc is None:
        own = next(s for s in all_runs if s.slots == run)
        return read_sums(part, combine_sums(own.sums, others, None))
    rows = []
    for row, numbers in enumerate(doc.tolist()):
        outs = []
        for start, stop in spans(numbers):
            document = part.part(row, slice(start, stop), slice(start, stop), 0)
            if start and stop < len(numbers):  # the whole document is inside the run
                outs.append(attend_document(document, fresh)[0])
                continue
            heads = slice(row * part.q.shape[1], (row + 1) * part.q.shape[1])
            theirs = [s.select_row(row, heads) for s in others]
            own, _ = document_sums(document, None, False)
            outs.append(read_sums(document, combine_sums(own, theirs, doc[row : row + 1, start])))
        rows.append(torch.cat(outs, 2))
    return torch.cat(rows)


def document_sums(inputs: LinearInputs, documents: Tensor | None, leads: bool) -> tuple[Sums, Tensor]:
    """Return the sums over the keys of the document at the end of these tokens, and their decay [N].

    The decay is the total log decay of all tokens. `leads`: sum over the document at their beginning instead,
    without keys if it is also the document at the end.
    """
    weight, decay = inputs.weight, inputs.decay
    if documents is not None and documents.shape[1]:
        first, last = documents[:, :1], documents[:, -1:]
        others = (documents != first) | (first == last) if leads else documents != last
        weight = weight.masked_fill(others.unsqueeze(1), -torch.inf)
    k, v, weight = (x.flatten(0, 1) for x in (inputs.k, append_one(inputs.v), weight))
    phi, scale = inputs.kernel.features(k)
    weight, total = weight + scale, weight.new_zeros(len(k))
    if decay is not None:
        decay = decay.flatten(0, 1)
        total = decay.sum(-1)
        # Decayed from token j to the end of the run.
        weight = weight + total.unsqueeze(-1) - decay.cumsum(-1)
    none = weight.new_full((len(k), 1), -torch.inf)
    top = torch.cat([weight.detach(), none], 1).amax(1)
    share = (weight - finite_top(top).unsqueeze(-1)).exp()
    return Sums((v * share.unsqueeze(-1)).mT @ phi, top, share.detach().sum(-1)), total


def combine_sums(own: Sums, others: Sequence[RunSums], document: Tensor | None) -> Sums:
    """Return `own` plus the sums of `others` that are of the same document [B].

    Causal runs must be sorted from the nearest: each is decayed by the decays of all runs after it.
    """
    parts, after = [(own, torch.zeros_like(own.top))], torch.zeros_like(own.top)
    for other in others:
        shift = after
        if document is not None and other.document is not None:
            same = (other.document == document).repeat_interleave(len(after) // len(document))
            shift = after.masked_fill(~same, -torch.inf)
        parts.append((other.sums, shift))
        after = after + other.decay
    # Sums are relative to their tops: rescale all to the greatest before adding.
    top = torch.stack([sums.top + shift.detach() for sums, shift in parts]).amax(0)
    kept = [(sums.top + shift - finite_top(top)).exp() for sums, shift in parts]
    table = sum(sums.table * share.view(-1, 1, 1) for (sums, _), share in zip(parts, kept))
    mass = sum(sums.mass * share.detach() for (sums, _), share in zip(parts, kept))
    assert isinstance(table, Tensor)
    assert isinstance(mass, Tensor)
    return Sums(table, top, mass)


def read_sums(inputs: LinearInputs, sums: Sums) -> Tensor:
    """Return y = n / t for [n, t] = S phi(q) of every query, [B, H, T, Dv]."""
    phi, _ = inputs.kernel.values(inputs.q.flatten(0, 1))
    out = divide(phi @ sums.table.mT, sums.mass.unsqueeze(-1), inputs.kernel.least)
    return out.unflatten(0, inputs.q.shape[:2])


def packed_size(heads: int, width: int, features: int) -> int:
    """Return the number of elements that `_pack` concatenates for all heads of a text."""
    return heads * (features * (width + 1) + 3)


def _pack(sums: Sums, decay: Tensor) -> Tensor:
    """Concatenate the sums and the decay in one tensor [N, (Dv + 1) M + 3]."""
    numbers = torch.stack([sums.top, sums.mass, decay], 1)
    return torch.cat([sums.table.flatten(1), numbers], 1)


def _unpack(packed: Tensor, inputs: LinearInputs) -> tuple[Sums, Tensor]:
    """Return the arguments of `_pack`."""
    shape = inputs.v.shape[3] + 1, inputs.kernel.width
    table, numbers = packed[:, :-3].unflatten(1, shape), packed[:, -3:]
    return Sums(table, numbers[:, 0].detach(), numbers[:, 1].detach()), numbers[:, 2]


def _edge_document(context: Context, run: Run, leads: bool) -> Tensor | None:
    """Return the document of each row at the end (or, for `leads`, at the beginning) of a run."""
    documents = None if context.whole is None else context.whole.kv_doc
    if documents is None or run[0] == run[1]:
        return None
    return documents[:, run[0] if leads else run[1] - 1]
