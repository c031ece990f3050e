"""A convolution over the tokens of a text with a number per channel and offset."""

import torch
import torch.nn.functional as F
from torch import Tensor


def depthwise_convolution(
    x: Tensor,
    taps: Tensor,
    causal: bool,
    valid: Tensor | None = None,
    doc: Tensor | None = None,
    past: Tensor | None = None,
    past_doc: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return y [B, T, E] of x [B, T, E], and the last w - 1 tokens with their documents, for the next call.

        y_t = sum_o taps_o x_(t + o)        o from 1 - w to 0, or from -(w - 1) // 2 to w // 2 if not causal

    taps: [w, E]. Tokens beyond the text, padding and other documents count as zeros. valid: [B, T], False for
    padding. doc: [B, T], documents. past: the tokens before x, at most w - 1, and their documents `past_doc`;
    None for document 0.
    """
    width, length = len(taps), x.shape[1]
    if valid is not None:
        x = x.masked_fill(~valid.bool().unsqueeze(-1), 0)
    if doc is not None:
        doc = doc.expand(len(x), -1)
    before = 0 if past is None else past.shape[1]
    if past is not None and doc is not None:
        doc = torch.cat([doc.new_zeros(len(x), before) if past_doc is None else past_doc, doc], 1)
    # A causal convolution reads only backwards; otherwise it is centred.
    left = width - 1 if causal else (width - 1) // 2
    earlier = x[:, :0] if past is None else past.to(x.dtype)
    padded = torch.cat([F.pad(earlier, (0, 0, left - before, 0)), x], 1)
    if not causal:
        padded = F.pad(padded, (0, 0, 0, width - 1 - left))
    # Numbers beyond the text do not matter: `padded` is zero there.
    numbers = None if doc is None else F.pad(doc, (left - before, width - 1 - left))
    # A sum over w shifted copies.
    y = None
    for tap in range(width):
        neighbours = padded[:, tap : tap + length]
        if doc is not None and numbers is not None:
            same = numbers[:, tap : tap + length] == doc[:, before:]
            neighbours = neighbours.masked_fill(~same.unsqueeze(-1), 0)
        y = neighbours * taps[tap] if y is None else y.addcmul_(neighbours, taps[tap])
    assert y is not None
    kept = min(width - 1, before + length)
    tokens = padded[:, left + length - kept : left + length]
    return y, tokens, None if doc is None else doc[:, before + length - kept :]
