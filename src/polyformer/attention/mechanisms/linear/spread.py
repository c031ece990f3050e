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

from polyformer.attention.functional.spread.exchange import anchored, gather
from polyformer.attention.mechanisms.linear.documents import causal_documents, one_document, spans
from polyformer.attention.mechanisms.linear.inputs import Inputs
from polyformer.attention.mechanisms.linear.sums import Sums, no_sums
from polyformer.attention.mechanisms.linear.weights import bounded, finite_top
from polyformer.core.sequence.context import Context
from polyformer.core.sequence.sequence_shards import Run, SequenceShard


@dataclasses.dataclass(frozen=True, eq=False)
class Summed:
    """The sums over the keys of a run, with the heads of all rows in one dimension N.

    decay: [N], the sum of the log decays before its tokens. slots: the run. document: [B], the document of
    the keys; None if there is only one document, and for a run without tokens.
    """

    sums: Sums
    decay: Tensor
    slots: Run
    document: Tensor | None

    def of_row(self, row: int, heads: slice) -> "Summed":
        """Return the sums of one batch row with the heads `heads`."""
        document = None if self.document is None else self.document[row : row + 1]
        return Summed(Sums(*(x[heads] for x in self.sums)), self.decay[heads], self.slots, document)


def spread_attention(inputs: Inputs, context: Context) -> Tensor:
    """Return output [B, H, T, Dv] of this process's queries; `inputs` has this process's keys."""
    share = context.shard
    assert share is not None
    if share.source is not None:
        return _attend_to_source(inputs, share)
    # Without causality earlier runs also need the document at the beginning of a run.
    both = context.kv_doc is not None and not inputs.causal
    parts, last = [], 0
    for start, stop in share.local_runs:
        first, last = last, last + stop - start
        doc = None if context.kv_doc is None else context.kv_doc[:, first:last]
        parts.append((inputs.tokens(slice(first, last)), doc, (start, stop)))
    own = [
        _packed(*summed(part, doc, leads)) for part, doc, _ in parts for leads in (False, True)[: 1 + both]
    ]
    gathered = gather(torch.stack(own), share, "sums of keys")
    edges = [(run, leads) for runs in share.runs for run in runs for leads in (False, True)[: 1 + both]]
    everybody = [
        Summed(*_unpacked(sums, parts[0][0]), run, _edge(context, run, leads))
        for (run, leads), sums in zip(edges, gathered.flatten(0, 1))
    ]
    outs = [_attend(part, doc, run, everybody) for part, doc, run in parts]
    return anchored(torch.cat(outs, 2), gathered)


def _attend_to_source(inputs: Inputs, share: SequenceShard) -> Tensor:
    """Return the output of this process's queries over a source distributed over the processes."""
    gathered = gather(_packed(*summed(inputs, None, False)), share, "sums of keys")
    everybody = [Summed(*_unpacked(sums, inputs), (0, 0), None) for sums in gathered]
    fresh = no_sums(inputs.weight[..., 0].numel(), inputs.v.shape[3], inputs.kernel)
    return anchored(read(inputs, joined(fresh, everybody, None)), gathered)


def _attend(part: Inputs, doc: Tensor | None, run: Run, everybody: Sequence[Summed]) -> Tensor:
    """Return the output of the queries of a run, in documents `doc` [B, T]."""
    if not part.q.shape[2]:
        return torch.zeros_like(part.v)
    fresh = no_sums(part.weight[..., 0].numel(), part.v.shape[3], part.kernel)
    if part.causal:
        before = sorted((s for s in everybody if s.slots[1] <= run[0]), key=lambda s: -s.slots[0])
        past = joined(fresh, before, None if doc is None else doc[:, 0])
        return (one_document(part, past) if doc is None else causal_documents(part, doc, 0, past))[0]
    others = [s for s in everybody if s.slots != run]
    if doc is None:
        own = next(s for s in everybody if s.slots == run)
        return read(part, joined(own.sums, others, None))
    rows = []
    for row, numbers in enumerate(doc.tolist()):
        outs = []
        for start, stop in spans(numbers):
            document = part.part(row, slice(start, stop), slice(start, stop), 0)
            if start and stop < len(numbers):  # the whole document is inside the run
                outs.append(one_document(document, fresh)[0])
                continue
            heads = slice(row * part.q.shape[1], (row + 1) * part.q.shape[1])
            theirs = [s.of_row(row, heads) for s in others]
            own, _ = summed(document, None, False)
            outs.append(read(document, joined(own, theirs, doc[row : row + 1, start])))
        rows.append(torch.cat(outs, 2))
    return torch.cat(rows)


def summed(inputs: Inputs, documents: Tensor | None, leads: bool) -> tuple[Sums, Tensor]:
    """Return the sums over the keys of the document at the end of these tokens, and their decay [N].

    The decay is the total log decay of all tokens. `leads`: sum over the document at their beginning instead,
    without keys if it is also the document at the end.
    """
    weight, decay = inputs.weight, inputs.decay
    if documents is not None and documents.shape[1]:
        first, last = documents[:, :1], documents[:, -1:]
        others = (documents != first) | (first == last) if leads else documents != last
        weight = weight.masked_fill(others.unsqueeze(1), -torch.inf)
    k, v, weight = (x.flatten(0, 1) for x in (inputs.k, inputs.v, weight))
    phi, scale = inputs.kernel.features(k)
    weight, total = weight + scale, weight.new_zeros(len(k))
    if decay is not None:
        decay = decay.flatten(0, 1)
        total = decay.sum(-1)
        weight = weight + total.unsqueeze(-1) - decay.cumsum(-1)
    none = weight.new_full((len(k), 1), -torch.inf)
    top = torch.cat([weight.detach(), none], 1).amax(1)
    share = (weight - finite_top(top).unsqueeze(-1)).exp()
    numerators = (v * share.unsqueeze(-1)).mT @ phi
    denominators = (share.unsqueeze(1) @ phi).squeeze(1)
    return Sums(numerators, denominators, top, share.detach().sum(-1)), total


def joined(own: Sums, others: Sequence[Summed], document: Tensor | None) -> Sums:
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
    numerators = sum(sums.numerators * share.view(-1, 1, 1) for (sums, _), share in zip(parts, kept))
    denominators = sum(sums.denominators * share.unsqueeze(-1) for (sums, _), share in zip(parts, kept))
    mass = sum(sums.mass * share.detach() for (sums, _), share in zip(parts, kept))
    assert isinstance(numerators, Tensor)
    assert isinstance(denominators, Tensor)
    assert isinstance(mass, Tensor)
    return Sums(numerators, denominators, top, mass)


def read(inputs: Inputs, sums: Sums) -> Tensor:
    """Return y = S phi(q) / (z . phi(q)) of every query, [B, H, T, Dv]."""
    phi, _ = inputs.kernel.values(inputs.q.flatten(0, 1))
    total = (phi @ sums.denominators.unsqueeze(-1)).squeeze(-1)
    total = bounded(total, sums.mass.unsqueeze(-1), inputs.kernel.least)
    out = phi @ sums.numerators.mT / total.unsqueeze(-1)
    return out.unflatten(0, inputs.q.shape[:2])


def numbers(heads: int, width: int, features: int) -> int:
    """Return the number of elements that `_packed` concatenates for all heads of a text."""
    return heads * (features * (width + 1) + 3)


def _packed(sums: Sums, decay: Tensor) -> Tensor:
    """Concatenate the sums and the decay in one tensor [N, Dv M + M + 3]."""
    numbers = torch.stack([sums.top, sums.mass, decay], 1)
    return torch.cat([sums.numerators.flatten(1), sums.denominators, numbers], 1)


def _unpacked(packed: Tensor, inputs: Inputs) -> tuple[Sums, Tensor]:
    """Return the arguments of `_packed`."""
    values, width = inputs.v.shape[3], inputs.kernel.width
    numerators, denominators, numbers = packed.split([values * width, width, 3], 1)
    top, mass = numbers[:, 0].detach(), numbers[:, 1].detach()
    return Sums(numerators.unflatten(1, (values, width)), denominators, top, mass), numbers[:, 2]


def _edge(context: Context, run: Run, leads: bool) -> Tensor | None:
    """Return the document of each row at the end (or, for `leads`, at the beginning) of a run."""
    documents = None if context.whole is None else context.whole.kv_doc
    if documents is None or run[0] == run[1]:
        return None
    return documents[:, run[0] if leads else run[1] - 1]
