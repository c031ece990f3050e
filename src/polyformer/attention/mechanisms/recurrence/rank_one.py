"""Recurrences with a state that changes by a diagonal and a free matrix of rank one.

    S_t = diag(exp(g_t)) S_(t-1) - e_t (p_t^T S_(t-1)) + k_t v_t^T        y_t = S_t^T q_t

A token reads the state at the key p_t, before the decay, and subtracts the value that it has read along e_t.
The delta rule of `scan` has p = exp(g) k, e = b k and the value b v. Here all three keys are free.

In a chunk after the state S, with F_i the sum of g up to token i, token i reads a value u_i:

    u_i + sum_(j < i) (p_i . exp(F_(i-1) - F_j) e_j) u_j = S^T (exp(F_(i-1)) p_i)
                                                           + sum_(j < i) (p_i . exp(F_(i-1) - F_j) k_j) v_j
    S_i = exp(F_i) S + sum_(j <= i) exp(F_i - F_j) (k_j v_j^T - e_j u_j^T)

F_(i-1) = F_i - g_i, so the products are as in `scan` for the key exp(-g_i) p_i. This needs a bound on the
decay of a single token, which RWKV-7 has: exp(-g) is at most 1.84.

Peng et al. 2025 (RWKV-7), equations 15 to 17. Cost as with decays per channel in `scan`, with twice the
products in a chunk.
"""

import dataclasses

import torch
from torch import Tensor

from polyformer.attention.functional.isolation import for_heads
from polyformer.attention.mechanisms.recurrence.scan import (
    ScanInputs,
    allowed_pairs,
    by_segments,
    products_by_halves,
    unit_inverse,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankOneInputs(ScanInputs):
    """The tokens of a recurrence with free keys; g is [B, H, T, D], and there is no b.

    Args:
        reader, eraser: p and e, [B, G, T, D].
    """

    reader: Tensor
    eraser: Tensor

    @property
    def erases(self) -> bool:
        """Return whether a token erases a part of the state that depends on its key: True."""
        return True

    def by_heads(self) -> "RankOneInputs":
        """Return the tokens with the queries and keys of every head."""
        names = "q", "k", "reader", "eraser"
        keys = {name: for_heads(getattr(self, name), self.v.shape[1]) for name in names}
        return dataclasses.replace(self, **keys)


def rank_one_recurrence(tokens: ScanInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return y [B, H, T, Dv] and the last state [B, H, D, Dv], token by token: the definition."""
    outputs, tokens = [], tokens.by_heads()
    assert isinstance(tokens, RankOneInputs)
    assert tokens.decay is not None
    for t in range(tokens.q.shape[2]):
        if tokens.starts is not None:
            state = state * ~tokens.starts[:, t].view(-1, 1, 1, 1)
        k, reader, eraser, decay = (
            x[:, :, t].unsqueeze(-1) for x in (tokens.k, tokens.reader, tokens.eraser, tokens.decay)
        )
        value = tokens.v[:, :, t].unsqueeze(-2)
        state = decay.exp() * state - eraser * (reader.mT @ state) + k * value
        outputs.append(tokens.q[:, :, t].unsqueeze(-2) @ state)
    return torch.cat(outputs, 2), state


def rank_one_scan(tokens: ScanInputs, state: Tensor, size: int | None = None) -> tuple[Tensor, Tensor]:
    """Return the same as `rank_one_recurrence`, in chunks of `size` tokens, a power of 2."""
    if tokens.q.shape[2] == 1:
        return rank_one_recurrence(tokens, state)
    return by_segments(_in_chunks, tokens.by_heads(), state, size)


def _in_chunks(tokens: RankOneInputs, state: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the outputs and the next state of T tokens, T a multiple of `size`.

    u = (1 + P_pe)^-1 (P_pk v + exp(F - g) p S)
    y = exp(F) q S + P_qk v - P_qe u        S' = exp(F_C) S + k^T v - e^T u        k, e decayed to token C
    """
    assert tokens.decay is not None
    tables = tokens.q, tokens.k, tokens.v, tokens.decay, tokens.reader, tokens.eraser
    q, k, v, decay, reader, eraser = (x.unflatten(2, (-1, size)) for x in tables)
    sums = decay.cumsum(3)
    allowed, first, last = allowed_pairs(tokens.starts, size, v)
    from_state, total = sums.exp(), sums[:, :, :, -1:]
    reader = reader * (-decay).exp()
    to_state, kept = (total - sums).exp(), total.exp().mT
    if first is not None and last is not None:
        from_state, to_state, kept = from_state * first, to_state * last, first[:, :, :, -1:] * kept
    # The pairs of both queries, q and p, and of both keys, k and e: [2, 2, B, H, n, C, C].
    pairs = products_by_halves(
        torch.stack([q, reader]).unsqueeze(1), torch.stack([k, eraser]), sums
    ).masked_fill(~allowed, 0)
    (pairs_k, pairs_e), (reads_k, reads_e) = pairs
    inverse = unit_inverse(reads_e)
    solved = inverse @ torch.cat([reads_k.tril(-1) @ v, reader * from_state], -1)
    value, key = solved.split([v.shape[-1], q.shape[-1]], -1)  # u = value + key S
    query = q * from_state - pairs_e @ key
    own = pairs_k @ v - pairs_e @ value
    added = (k * to_state).mT @ v - (eraser * to_state).mT @ value
    # S' = (kept - e^T key) S + added
    change = torch.diag_embed(kept.squeeze(-1)) - (eraser * to_state).mT @ key
    outputs = []
    for share, near, matrix, more in zip(*(x.unbind(2) for x in (query, own, change, added))):
        outputs.append(near + share @ state)
        state = matrix @ state + more
    return torch.cat(outputs, 2), state
