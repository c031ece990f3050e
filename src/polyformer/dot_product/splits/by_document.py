"""Packed documents that see themselves whole: each in a call of its own, so that torch needs no mask.

A row of documents costs the sum of the squares of their lengths, and nothing is computed across them.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from polyformer.dot_product.request import Request
from polyformer.dot_product.splits.base import Result, Split
from polyformer.patterns.implied import Causal, implied
from polyformer.sequence.context import Context

WORTH_A_CALL = 32
"""Tokens that a document has on average from which on a call of its own pays."""


@dataclasses.dataclass(frozen=True, eq=False)
class ByDocument(Split):
    """Every document in a call of its own, put side by side again."""

    name: ClassVar[str] = "by document"

    def join(self, outs: Sequence[Tensor], lses: Sequence[Tensor | None]) -> Result:
        """out = [out_1 .. out_n], along the tokens."""
        known = [lse for lse in lses if lse is not None]  # some backends give it unasked
        return torch.cat(list(outs), 2), torch.cat(known, 2) if len(known) == len(outs) else None

    def label(self, indices: Sequence[int]) -> str:
        """How many documents, of how many tokens."""
        lengths = sorted(self.requests[index].context.q_len for index in indices)
        tokens = f"{lengths[0]}" if lengths[0] == lengths[-1] else f"{lengths[0]} to {lengths[-1]}"
        return f"{len(lengths)} document{'s' * (len(lengths) > 1)} of {tokens} tokens"


def by_document(request: Request) -> ByDocument | None:
    """The call document by document, where they alone (and time) limit who sees whom; else None."""
    lengths = document_lengths(request)
    if lengths is None:
        return None
    causal = request.context.causal
    requests = []
    for q, k, v in zip(*(x.split(lengths, 2) for x in (request.q, request.k, request.v))):
        context = Context(q.shape[2], q.shape[2], causal=causal)
        pattern = Causal() if causal else None
        requests.append(dataclasses.replace(request, q=q, k=k, v=v, context=context, pattern=pattern))
    return ByDocument(tuple(requests))


def document_lengths(request: Request) -> list[int] | None:
    """The lengths of the documents, where calls of their own are exact and pay; else None."""
    context = request.context
    if context.q_doc is None or request.q.shape[0] != 1 or request.q.is_cuda or context.offset:
        return None
    if request.score_mod is not None or request.relative is not None or context.kv_valid is not None:
        return None
    if context.q_len != context.kv_len or request.pattern != implied(context):
        return None
    lengths = context.once("lengths of documents", lambda: _lengths(context.q_doc, context.kv_doc))
    return lengths if lengths and len(lengths) * WORTH_A_CALL <= context.q_len else None


def _lengths(q_doc: Tensor | None, kv_doc: Tensor | None) -> list[int]:
    """Of the documents in turn; none where queries and keys are not the same tokens."""
    assert q_doc is not None
    assert kv_doc is not None
    if not torch.equal(q_doc, kv_doc):
        return []
    return q_doc[0].unique_consecutive(return_counts=True)[1].tolist()
