"""Ranks of tokens in their documents; only non-padding tokens count, so padding changes nothing."""

import torch
from torch import Tensor

from polyformer.core.sequence.context import Context


def token_ranks(context: Context, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return for all keys [R, Tk]: not padding; non-padding tokens before it in its document; document.

    R is 1 if all rows are alike.
    """

    def make() -> tuple[Tensor, Tensor, Tensor]:
        real, doc = context.kv_valid, context.kv_doc
        if real is None:
            rows = 1 if doc is None else len(doc)
            real = torch.ones(rows, context.kv_len, dtype=torch.bool, device=device)
        if doc is None:
            doc = torch.zeros_like(real, dtype=torch.long)
        before = real.long().cumsum(1) - real.long()
        starts = torch.ones_like(doc, dtype=torch.bool)
        starts[:, 1:] = doc[:, 1:] != doc[:, :-1]
        first = torch.where(starts, before, 0).cummax(1).values
        return real.expand(doc.shape), before - first, doc

    return context.once("ranks", make)


def documents_of_row(context: Context, b: int) -> list[list[int]]:
    """Return the slots of each document's non-padding tokens in row b, for reference implementations."""
    documents: dict[int, list[int]] = {}
    for token in range(context.kv_len):
        if context.kv_valid is None or context.kv_valid[b, token]:
            number = 0 if context.kv_doc is None else int(context.kv_doc[b, token])
            documents.setdefault(number, []).append(token)
    return list(documents.values())


def take_tokens(x: Tensor, index: Tensor) -> Tensor:
    """Return the tokens [R, N] of x [B, H, J, D] as [B, H, N, D]."""
    if len(index) == 1:
        return x.index_select(2, index[0])
    return x.gather(2, index[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))
