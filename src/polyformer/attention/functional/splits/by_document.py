"""Packed documents without further masking: a separate call for each document, so that torch needs no mask.

A row of documents costs the sum of the squares of their lengths; no scores between documents are computed.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from polyformer.attention.functional.request import Request
from polyformer.attention.functional.splits.base import Result, Split
from polyformer.attention.patterns.implied import Causal, implied
from polyformer.core.sequence.context import Context

WORTH_A_CALL = 32
"""Average number of tokens per document from which on a separate call is faster."""


@dataclasses.dataclass(frozen=True, eq=False)
class ByDocument(Split):
    """A separate call for each document; the results are concatenated."""

    name: ClassVar[str] = "by document"

    def join(self, outs: Sequence[Tensor], lses: Sequence[Tensor | None]) -> Result:
        """Return out = [out_1 .. out_n], concatenated along the tokens."""
        known = [lse for lse in lses if lse is not None]  # some backends always return it
        return torch.cat(list(outs), 2), torch.cat(known, 2) if len(known) == len(outs) else None

    def label(self, indices: Sequence[int]) -> str:
        """Return the number of documents and their lengths."""
        lengths = sorted(self.requests[index].context.q_len for index in indices)
        tokens = f"{lengths[0]}" if lengths[0] == lengths[-1] else f"{lengths[0]} to {lengths[-1]}"
        return f"{len(lengths)} document{'s' * (len(lengths) > 1)} of {tokens} tokens"


def by_document(request: Request) -> ByDocument | None:
    """Return the call split by document if documents (and causality) are the only limits; else None."""
    lengths = document_lengths(request)
    if lengths is None:
        return None
    causal = request.context.causal
    requests = []
    # Inside a document only causality is left, which torch computes without a mask.
    for q, k, v in zip(*(x.split(lengths, 2) for x in (request.q, request.k, request.v))):
        context = Context(q.shape[2], q.shape[2], causal=causal)
        pattern = Causal() if causal else None
        requests.append(dataclasses.replace(request, q=q, k=k, v=v, context=context, pattern=pattern))
    return ByDocument(tuple(requests))


def document_lengths(request: Request) -> list[int] | None:
    """Return the lengths of the documents if separate calls are exact and faster; else None."""
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
    """Return the lengths of the documents in turn; empty if queries and keys are not the same tokens."""
    assert q_doc is not None
    assert kv_doc is not None
    if not torch.equal(q_doc, kv_doc):
        return []
    return q_doc[0].unique_consecutive(return_counts=True)[1].tolist()
