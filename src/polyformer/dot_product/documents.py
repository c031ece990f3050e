"""Packed documents that see themselves whole: each in a call of its own, so that torch needs no mask.

A row of documents costs the sum of the squares of their lengths, and nothing is computed across them.
"""

import dataclasses

import torch
from torch import Tensor

from polyformer.dot_product.arrange import Run
from polyformer.dot_product.request import Request
from polyformer.patterns.implied import Causal, implied
from polyformer.sequence.context import Context

WORTH_A_CALL = 32
"""Tokens that a document has on average from which on a call of its own pays."""


def by_document(request: Request) -> list[int] | None:
    """The lengths of the documents, where they alone (and time) limit who sees whom; else None."""
    context = request.context
    if context.q_doc is None or request.q.shape[0] != 1 or request.q.is_cuda or context.offset:
        return None
    if request.score_mod is not None or request.relative is not None or context.kv_valid is not None:
        return None
    if context.q_len != context.kv_len or request.pattern != implied(context):
        return None
    lengths = context.once("lengths of documents", lambda: _lengths(context.q_doc, context.kv_doc))
    return lengths if lengths and len(lengths) * WORTH_A_CALL <= context.q_len else None


def run_by_document(lengths: list[int], request: Request, run: Run) -> tuple[Tensor, Tensor | None]:
    """Every document in a call of its own, side by side again."""
    causal = request.context.causal
    outs, sums = [], []
    for q, k, v in zip(*(one.split(lengths, 2) for one in (request.q, request.k, request.v))):
        context = Context(q.shape[2], q.shape[2], causal=causal)
        own = dataclasses.replace(
            request, q=q, k=k, v=v, context=context, pattern=Causal() if causal else None
        )
        out, lse = run(own)
        outs.append(out)
        sums += [] if lse is None else [lse]  # some backends give it unasked
    return torch.cat(outs, 2), torch.cat(sums, 2) if len(sums) == len(outs) else None


def _lengths(q_doc: Tensor | None, kv_doc: Tensor | None) -> list[int]:
    """Of the documents in turn; none where queries and keys are not the same tokens."""
    assert q_doc is not None
    assert kv_doc is not None
    if not torch.equal(q_doc, kv_doc):
        return []
    return q_doc[0].unique_consecutive(return_counts=True)[1].tolist()
