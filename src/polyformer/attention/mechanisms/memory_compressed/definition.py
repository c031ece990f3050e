"""The equation of memory-compressed attention, slot by slot, the reference for tests of the fast form.

    k'_s = sum_t k_(s stride + t) W_k^t        t = 0 .. kernel - 1, and v' likewise, in every document
    y = softmax(q k'^T / sqrt(D)) v'

A causal query attends to the slots that end at or before it, and to the document's first token, which is not
convolved. Otherwise the last slots of a document treat missing tokens as zeros. The terms of a position
scheme are added to scores and values (`pair_terms`), with each slot at the position of its last token.
"""

import dataclasses
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.attention.functional.documents import documents_of_row
from polyformer.attention.mechanisms.base import Heads
from polyformer.attention.mechanisms.pair_terms import PairTerms, add_terms, weighted_values
from polyformer.core.ops.softmax import softmax
from polyformer.core.sequence.context import Context


@dataclasses.dataclass(frozen=True)
class SlotWindow:
    """The tokens of a slot, or a single token that is not convolved."""

    tokens: list[int]
    unconvolved: bool = False


def definition(
    heads: Heads,
    kernels: tuple[Tensor, Tensor],
    stride: int,
    context: Context,
    terms: PairTerms | None,
) -> Tensor:
    """Return the attention output [B, H, Tq, D].

    Args:
        heads: as many for keys as for queries.
        kernels: [H, kernel, D, D], for keys and for values.
        stride: the number of tokens between the starts of consecutive slots.
        context: describes the queries and keys.
        terms: the terms of a position scheme, None for none.
    """
    q, k, v = heads
    size, rows = kernels[0].shape[1], []
    for b in range(len(q)):
        slots = [
            slot for tokens in documents_of_row(context, b) for slot in _slots(tokens, size, stride, context)
        ]
        # [Tq, S]
        attended = [[_attends(context, b, i, slot) for slot in slots] for i in range(q.shape[2])]
        allowed = torch.tensor(attended, dtype=torch.bool, device=q.device).view(q.shape[2], len(slots))
        keys, values = (
            torch.stack([_convolve(x[b], kernel, slot) for slot in slots], 1) if slots else x[b][:, :0]
            for x, kernel in zip((k, v), kernels)
        )
        # A slot has the position of its last token.
        places = torch.tensor([slot.tokens[-1] for slot in slots], dtype=torch.long, device=q.device)
        rows.append((keys, values, allowed, places))
    most = max(len(places) for *_, places in rows)  # pad rows with masked slots
    columns = list(zip(*rows))
    keys, values = (
        torch.stack([F.pad(x, (0, 0, 0, most - x.shape[1])) for x in part]) for part in columns[:2]
    )
    allowed, places = (torch.stack([F.pad(x, (0, most - x.shape[-1])) for x in part]) for part in columns[2:])
    scores = add_terms(q @ keys.mT / math.sqrt(q.shape[3]), q, keys, terms, places)
    weights, _ = softmax(scores, allowed.unsqueeze(1))
    return weighted_values(weights, values, terms, places)


def _slots(tokens: list[int], size: int, stride: int, context: Context) -> list[SlotWindow]:
    """Return the slots of a document's tokens."""
    slots = [SlotWindow(tokens[start : start + size]) for start in range(0, len(tokens), stride)]
    if not context.causal:
        return slots
    # An incomplete window at the end is not visible to any causal query.
    return [SlotWindow(tokens[:1], unconvolved=True), *(slot for slot in slots if len(slot.tokens) == size)]


def _convolve(x: Tensor, kernel: Tensor, slot: SlotWindow) -> Tensor:
    """Return sum_t x_t W^t [H, D] over the slot's tokens of x [H, T, D]."""
    if slot.unconvolved:
        return x[:, slot.tokens[0]]
    terms = [
        torch.einsum("hd,hde->he", x[:, token], kernel[:, t].to(x.dtype))
        for t, token in enumerate(slot.tokens)
    ]
    return torch.stack(terms).sum(0)


def _attends(context: Context, b: int, query: int, slot: SlotWindow) -> bool:
    """Return whether the slot is in the query's document and, in the causal form, complete."""
    last = slot.tokens[-1]
    own, other = context.q_doc, context.kv_doc
    same = own is None or other is None or bool(own[b, query] == other[b, last])
    return same and (not context.causal or last <= query + context.offset)
