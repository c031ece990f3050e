"""Linear attention with one document in each row, and with several documents, one after another."""

import torch
from torch import Tensor

from polyformer.attention.mechanisms.linear.causal import CausalAttention
from polyformer.attention.mechanisms.linear.definition import LinearInputs
from polyformer.attention.mechanisms.linear.noncausal import NoncausalAttention
from polyformer.attention.mechanisms.linear.sums import (
    Sums,
    WeightedHeads,
    append_one,
    empty_sums,
    recurrent_step,
)
from polyformer.core.host_values import on_host


def attend_document(inputs: LinearInputs, past: Sums) -> tuple[Tensor, Sums]:
    """Return output [B, H, Tq, Dv] and the next sums, for one document per row after the sums `past`."""
    rows, heads, queries = inputs.q.shape[:3]
    last = inputs.offset + queries
    keep = slice(0, last) if inputs.causal else slice(None)
    k, v, weight = (x[:, :, keep].flatten(0, 1) for x in (inputs.k, append_one(inputs.v), inputs.weight))
    decay = None if inputs.decay is None else inputs.decay[:, :, keep].flatten(0, 1)
    q = inputs.q.flatten(0, 1)
    if not inputs.causal:
        out = NoncausalAttention.apply(inputs.kernel, q, k, v, weight)
    elif queries == last == 1:
        out, past = recurrent_step(inputs.kernel, WeightedHeads(q, k, v, weight, decay), past)
    else:
        # Keys before the first query get queries of zeros, so that both have the same length; their outputs
        # are dropped.
        q = torch.nn.functional.pad(q, (0, 0, inputs.offset, 0))
        graph = torch.is_grad_enabled()
        tensors = *WeightedHeads(q, k, v, weight, decay), *past
        out, *after = CausalAttention.apply(inputs.kernel, graph, *tensors)
        out, past = out[:, inputs.offset :], Sums(*after)
    return out.unflatten(0, (rows, heads)), past


def attend_causal_documents(
    inputs: LinearInputs, documents: Tensor, before: int, past: Sums
) -> tuple[Tensor, Sums]:
    """Return the output of queries that attend only to their own document, and the next sums.

    documents: [B, before + T], of all keys; `before` of them are in the past. The sums `past` are used in
    rows that start with the document of the last past key.
    """
    rows, heads, queries = inputs.q.shape[:3]
    continues = documents.new_ones(rows, dtype=torch.bool)
    if before:
        continues = documents[:, before - 1] == documents[:, before]
    width = inputs.v.shape[3]
    fresh = empty_sums(rows * heads, width, inputs.kernel)
    same = continues.repeat_interleave(heads)
    # Rows that start with a new document start with empty sums.
    past = Sums(*(torch.where(same.view(-1, *[1] * (x.dim() - 1)), x, y) for x, y in zip(past, fresh)))
    if inputs.k.shape[2] == 1:
        return attend_document(inputs, past)
    row_outputs, row_sums = [], []
    for row, numbers in enumerate(on_host(documents)[:, before:].tolist()):
        sums = Sums(*(x[row * heads : (row + 1) * heads] for x in past))
        outputs = []
        for index, (start, stop) in enumerate(spans(numbers)):
            first, last = (min(max(edge - inputs.offset, 0), queries) for edge in (start, stop))
            if first == last:
                continue
            offset = max(inputs.offset - start, 0)
            # Only the first document of a row continues the past.
            if index:
                sums = empty_sums(heads, width, inputs.kernel)
            part = inputs.part(row, slice(first, last), slice(start, stop), offset)
            out, sums = attend_document(part, sums)
            outputs.append(out)
        row_outputs.append(torch.cat(outputs, 2))
        row_sums.append(sums)
    return torch.cat(row_outputs), Sums(*(torch.cat(x) for x in zip(*row_sums)))


def attend_noncausal_documents(inputs: LinearInputs, q_doc: Tensor, kv_doc: Tensor, past: Sums) -> Tensor:
    """Return the output of queries that attend to their whole document: q_doc [B, Tq], kv_doc [B, T]."""
    outputs = []
    for row, (of_queries, of_keys) in enumerate(zip(on_host(q_doc).tolist(), on_host(kv_doc).tolist())):
        keys = {of_keys[start]: slice(start, stop) for start, stop in spans(of_keys)}
        parts = [
            inputs.part(row, slice(start, stop), keys.get(of_queries[start], slice(0, 0)), 0)
            for start, stop in spans(of_queries)
        ]
        outputs.append(torch.cat([attend_document(part, past)[0] for part in parts], 2))
    return torch.cat(outputs)


def spans(numbers: list[int]) -> list[tuple[int, int]]:
    """Return the start and stop of each run of equal numbers."""
    edges = [i for i in range(1, len(numbers)) if numbers[i] != numbers[i - 1]]
    return list(zip([0, *edges], [*edges, len(numbers)]))
