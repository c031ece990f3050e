"""Exact attention over the keys of a layout, a run of queries at a time: any pattern, any device, both ways."""

import torch
from torch import Tensor

from polyformer.core.patterns import Full
from polyformer.core.request import Request
from polyformer.core.softmax import softmax

BLOCK = 128


def refuses(request: Request, return_lse: bool) -> str | None:
    """Why this backend cannot take the request; it takes all."""
    return None


def run(request: Request) -> tuple[Tensor, Tensor]:
    """Output [B, H, Tq, Dv] and log-sum-exp [B, H, Tq]."""
    pattern, context = request.pattern or Full(), request.context
    k = request.k.repeat_interleave(request.groups, dim=1)
    v = request.v.repeat_interleave(request.groups, dim=1)
    b = torch.arange(k.shape[0], device=k.device).view(-1, 1, 1, 1)
    h = torch.arange(k.shape[1], device=k.device).view(1, -1, 1, 1)
    outs, lses = [], []
    for row in pattern.layout(context, BLOCK):
        kv = torch.cat([torch.arange(*one, device=k.device) for one in row.keys.some] or [torch.arange(0, device=k.device)])
        q_idx = torch.arange(row.start, row.stop, device=k.device).view(-1, 1)
        scores = request.q[:, :, row.start : row.stop] @ k[:, :, kv].transpose(-1, -2) * request.scale
        if request.score_mod is not None:
            scores = request.score_mod(scores, b, h, q_idx, kv)
        p, lse = softmax(scores, pattern.allows(context, b, h, q_idx, kv))
        outs.append(torch.dropout(p, request.dropout, True) @ v[:, :, kv])
        lses.append(lse)
    return torch.cat(outs, 2), torch.cat(lses, 2)
