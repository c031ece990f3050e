"""Recurrences over a matrix-valued state, token by token and in chunks.

    S_t = exp(g_t) S_(t-1) + k_t v_t^T                                           y_t = S_t^T q_t
    S_t = exp(g_t) S_(t-1) + b_t k_t (v_t - exp(g_t) S_(t-1)^T k_t)^T            with the delta rule

S [D, Dv] maps keys to values. exp(g_t) scales it by a number, or every row by its own; the delta rule
replaces the share b_t of the value that is stored at key k_t. A token that starts a document reads and keeps
nothing of earlier ones.

In a chunk after the state S, with F_i the sum of g up to token i of the chunk, token i writes a value u_i:

    S_i = exp(F_i) S + sum_(j <= i) exp(F_i - F_j) k_j u_j^T
    u_i + b_i sum_(j < i) (k_i . exp(F_i - F_j) k_j) u_j = b_i (v_i - S^T (exp(F_i) k_i))

This is a triangular system (the WY form of products of Householder matrices); without b, u_i = v_i. Outputs
and the next state follow from it by matrix products, so only the state passes from chunk to chunk. All
exponents are at most 0, so decays never overflow. A chunk of all tokens is the parallel form.

If decays are numbers, heads that share queries and keys share their products, and the matrices of a group are
multiplied as a single one (`_scan_by_groups`).

Yang et al. 2024 (GLA), section 4; Yang et al. 2024 (DeltaNet), section 3.2; Yang et al. 2025 (Gated
DeltaNet), section 3.3. Cost per token and head: 2 D Dv products, C (D + Dv) in a chunk of C tokens, and as
many again for the triangular system with b.
"""

import dataclasses
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.attention.functional.isolation import for_heads

CHUNK = 32
"""Tokens of a chunk, a power of 2. With 64 the pairs and their triangular system cost twice as much."""

GPU_CHUNK = 128
"""The same on a GPU, where launching the kernels of a chunk takes longer than its products."""

SEGMENT = 512
"""Tokens of the chunks that a CPU computes together: their tables fit a core's cache."""


@dataclasses.dataclass(frozen=True)
class ScanInputs:
    """The tokens of a recurrence. H heads share no state.

    Args:
        q, k: [B, G, T, D], each of the G groups for H / G heads.
        v: [B, H, T, Dv].
        decay: g, [B, H, T, 1] for a number per head or [B, H, T, D]; None for no decay.
        erase: b, [B, H, T, 1]; None without the delta rule.
        starts: [B, T], whether a token starts a document; None for a single document.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor | None = None
    erase: Tensor | None = None
    starts: Tensor | None = None

    @property
    def erases(self) -> bool:
        """Return whether a token erases a part of the state that depends on its key."""
        return self.erase is not None

    def by_heads(self) -> "ScanInputs":
        """Return the tokens with the queries and keys of every head."""
        q, k = (for_heads(x, self.v.shape[1]) for x in (self.q, self.k))
        return dataclasses.replace(self, q=q, k=k)

    def reversed(self) -> "ScanInputs":
        """Return the tokens in the opposite order: a document starts at its last token."""
        starts = self.starts
        if starts is not None:
            # The token after the last token of a document starts the next document.
            starts = F.pad(starts[:, 1:], (0, 1), value=True).flip(1)
        tokens = {name: x.flip(2) for name, x in self.tables().items()}
        return dataclasses.replace(self, **tokens, starts=starts)

    def split(self, length: int) -> "list[ScanInputs]":
        """Return runs of at most `length` tokens."""
        tokens = {name: x.split(length, 2) for name, x in self.tables().items()}
        if self.starts is not None:
            tokens["starts"] = self.starts.split(length, 1)
        count = len(tokens["q"])
        return [
            dataclasses.replace(self, **{name: x[run] for name, x in tokens.items()}) for run in range(count)
        ]

    def padded(self, count: int) -> "ScanInputs":
        """Return the tokens with `count` more at the end that write and erase nothing."""
        if not count:
            return self
        tokens = {name: F.pad(x, (0, 0, 0, count)) for name, x in self.tables().items()}
        starts = None if self.starts is None else F.pad(self.starts, (0, count))
        return dataclasses.replace(self, **tokens, starts=starts)

    def tables(self) -> dict[str, Tensor]:
        """Return the tables [B, H, T, ...] by name."""
        return {name: x for name, x in vars(self).items() if x is not None and name != "starts"}


def recurrence(tokens: ScanInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return y [B, H, T, Dv] and the last state [B, H, D, Dv], token by token: the definition."""
    outputs, tokens = [], tokens.by_heads()
    for t in range(tokens.q.shape[2]):
        if tokens.starts is not None:
            state = state * ~tokens.starts[:, t].view(-1, 1, 1, 1)
        if tokens.decay is not None:
            state = state * tokens.decay[:, :, t].exp().unsqueeze(-1)
        k = tokens.k[:, :, t].unsqueeze(-1)
        value = tokens.v[:, :, t].unsqueeze(-2)
        if tokens.erase is not None:
            value = tokens.erase[:, :, t].unsqueeze(-1) * (value - k.mT @ state)
        state = state + k * value
        outputs.append(tokens.q[:, :, t].unsqueeze(-2) @ state)
    return torch.cat(outputs, 2), state


def chunked_scan(tokens: ScanInputs, state: Tensor, size: int | None = None) -> tuple[Tensor, Tensor]:
    """Return the same as `recurrence`, in chunks of `size` tokens, a power of 2."""
    if tokens.q.shape[2] == 1:
        return recurrence(tokens, state)
    per_head = tokens.decay is None or tokens.decay.shape[-1] == 1
    return by_segments(_scan_by_groups if per_head else _scan_by_channels, tokens, state, size)


def by_segments(
    scan: Callable[..., tuple[Tensor, Tensor]], tokens: ScanInputs, state: Tensor, size: int | None
) -> tuple[Tensor, Tensor]:
    """Return the outputs and the last state, by `scan` of whole chunks of `size` tokens, a power of 2."""
    outputs, size = [], size or (CHUNK if tokens.q.is_cpu else GPU_CHUNK)
    for segment in tokens.split(max(size, SEGMENT)) if tokens.q.is_cpu else [tokens]:
        # Few tokens need no more than the next power of 2.
        count = segment.q.shape[2]
        short = min(size, 1 << (count - 1).bit_length())
        y, state = scan(segment.padded(-count % short), state, short)
        outputs.append(y[:, :, :count])
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2), state


def _scan_by_groups(tokens: ScanInputs, state: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the outputs and the next state of T tokens, T a multiple of `size`, for decays per head.

    u = (1 + A)^-1 b (v - exp(F) k S)        A_ij = b_i (k_i . k_j) exp(F_i - F_j) for j < i
    y = exp(F) q S + P u                     P_ij = (q_i . k_j) exp(F_i - F_j) for j <= i
    S' = exp(F_C) S + k^T (exp(F_C - F) u)
    """
    groups, (batch, heads) = tokens.q.shape[1], tokens.v.shape[:2]
    q, k = (x.unflatten(2, (-1, size)) for x in (tokens.q, tokens.k))  # [B, G, n, C, D]
    v, decay, erase = (  # [B, G, h, n, C, ...]
        None if x is None else x.unflatten(2, (-1, size)).unflatten(1, (groups, -1))
        for x in (tokens.v, tokens.decay, tokens.erase)
    )
    assert v is not None
    allowed, read, write = allowed_pairs(tokens.starts, size, v)
    weights, kept = allowed.to(v.dtype), None if read is None else read[..., -1:, :]
    if decay is not None:
        sums = decay.cumsum(4)
        total = sums[..., -1:, :]
        # Masked before the exponential, which may overflow for later keys.
        weights = (sums - sums.mT).masked_fill(~allowed, -torch.inf).exp()
        read, write = _product(sums.exp(), read), _product((total - sums).exp(), write)
        kept = _product(total.exp(), kept)
    readers, inverse, rates = q, None, None
    if erase is not None:
        inverse = unit_inverse(erase * weights * (k @ k.mT).unsqueeze(2))
        readers, rates, v = torch.cat([q, k], 3), _product(erase, read), erase * v
    pairs = weights * (q @ k.mT).unsqueeze(2)
    tables = readers, k, pairs, inverse, v, rates, read, write, kept
    chunks = [[None] * v.shape[3] if x is None else x.unbind(-3) for x in tables]
    # The states of a group side by side are a single matrix: [B, G, D, h, Dv].
    state, outputs = state.unflatten(1, (groups, -1)).movedim(2, 3), []
    for both, key, pair, solve, u, rate, share, late, stays in zip(*chunks):
        held = (both @ state.flatten(3)).unflatten(3, state.shape[3:]).movedim(3, 2)  # [B, G, h, 2 C, Dv]
        if solve is not None:
            u = solve @ (u - rate * held[..., size:, :])
        outputs.append(pair @ u + _product(held[..., :size, :], share))
        added = (key.mT @ _product(u, late).movedim(2, 3).flatten(3)).unflatten(3, state.shape[3:])
        state = added + state if stays is None else torch.addcmul(added, state, stays.movedim(2, 3))
    y = torch.stack(outputs, 3).view(batch, heads, -1, v.shape[-1])
    return y, state.movedim(3, 2).flatten(1, 2)


def _scan_by_channels(tokens: ScanInputs, state: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the outputs and the next state of T tokens, T a multiple of `size`, for decays per channel."""
    parts = []
    for chunk in Chunks.of(tokens.by_heads(), size).each():
        # u = v - erased S; y = q S + pairs u; S' = kept S + k^T u
        value = chunk.value if chunk.erased is None else chunk.value - chunk.erased @ state
        parts.append(chunk.query @ state + chunk.pairs @ value)
        state = torch.addcmul(chunk.key.mT @ value, state, chunk.kept)
    return torch.cat(parts, 2), state


def allowed_pairs(starts: Tensor | None, size: int, v: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the pairs j <= i of a document in chunks of C tokens, and whether tokens are in its parts.

    starts: see `ScanInputs`. v: [..., n, C, Dv], the values. Returns pairs that broadcast to [..., n, C, C],
    the tokens of the document of the state before the chunk, and of the document of its last token, both
    [..., n, C, 1] and None for a single document.
    """
    allowed = torch.ones(size, size, dtype=torch.bool, device=v.device).tril()
    if starts is None:
        return allowed, None, None
    # Documents of a chunk, counted from 0, the document of the token before the chunk.
    document = starts.unflatten(1, (-1, size)).long().cumsum(2).unsqueeze(-1)
    document = document.view(len(starts), *[1] * (v.dim() - 4), *document.shape[1:])
    return allowed & (document == document.mT), document == 0, document == document[..., -1:, :]


def unit_inverse(a: Tensor) -> Tensor:
    """Return (1 + A)^-1 for the strict lower triangle A of a [..., C, C]; the rest is not read."""
    unit = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device).expand_as(a)
    return torch.linalg.solve_triangular(a, unit, upper=False, unitriangular=True)


def _product(x: Tensor, y: Tensor | None) -> Tensor:
    """Return x y, or x without y."""
    return x if y is None else x * y


@dataclasses.dataclass(frozen=True)
class Chunks:
    """All n chunks of C tokens, before the state is known: [B, H, n, C, ...].

    Args:
        query: the queries that read the state before their chunk, [.., C, D].
        pairs: the weights of the values in the chunk, [.., C, C].
        key: the keys of the values in the state after the chunk, [.., C, D].
        value: v, or the solution of the triangular system for an empty state, [.., C, Dv].
        erased: what the values lose for each key of the state, [.., C, D]; None without `erase`.
        kept: what the chunk leaves of the state before it, [.., D, 1].
    """

    query: Tensor
    pairs: Tensor
    key: Tensor
    value: Tensor
    erased: Tensor | None
    kept: Tensor

    @staticmethod
    def of(tokens: ScanInputs, size: int) -> "Chunks":
        """Return the chunks of T tokens, T a multiple of `size`."""
        assert tokens.decay is not None
        q, k, v, decay = (x.unflatten(2, (-1, size)) for x in (tokens.q, tokens.k, tokens.v, tokens.decay))
        sums = decay.cumsum(3)
        allowed, first, last = allowed_pairs(tokens.starts, size, v)
        from_state, total = sums.exp(), sums[:, :, :, -1:]
        query, before, key = q * from_state, k * from_state, k * (total - sums).exp()
        kept = total.exp().mT
        if first is not None and last is not None:
            query, before, key = query * first, before * first, key * last
            kept = first[:, :, :, -1:] * kept
        pairs = products_by_halves(q, k, sums).masked_fill(~allowed, 0)
        erased = None
        if tokens.erase is not None:
            # u + A u = b (v - before S)
            erase = tokens.erase.unflatten(2, (-1, size))
            inverse = unit_inverse(erase * products_by_halves(k, k, sums).masked_fill(~allowed, 0))
            v, erased = inverse @ (erase * v), inverse @ (erase * before)
        return Chunks(query, pairs, key, v, erased, kept)

    def each(self) -> "Iterator[Chunks]":
        """Yield the tables of every chunk in turn, [B, H, C, ...]."""
        tables = {name: x.unbind(2) for name, x in vars(self).items() if x is not None}
        for chunk in range(self.query.shape[2]):
            yield dataclasses.replace(self, **{name: x[chunk] for name, x in tables.items()})


def products_by_halves(a: Tensor, b: Tensor, sums: Tensor) -> Tensor:
    """Return sum_d a_id b_jd exp(F_id - F_jd) [.., C, C] for j <= i and 0 for later j; C a power of 2.

    The later half of a block meets the earlier half in a product of matrices, a_i exp(F_i - F_m) times
    b_j exp(F_m - F_j) with m the last token of the earlier half: no exponent is above 0. Blocks double from
    single tokens to the chunk.
    """
    blocks = (a * b).sum(-1)[..., None, None]  # [.., C / s, s, s] for blocks of s tokens
    half = 1
    while half < a.shape[-2]:
        later, earlier, gaps = (x.unflatten(-2, (-1, 2, half)) for x in (a, b, sums))
        middle = gaps[..., 0, -1:, :]
        queries = later[..., 1, :, :] * (gaps[..., 1, :, :] - middle).exp()
        keys = earlier[..., 0, :, :] * (middle - gaps[..., 0, :, :]).exp()
        across = queries @ keys.mT
        first, second = blocks[..., ::2, :, :], blocks[..., 1::2, :, :]
        rows = torch.cat([first, torch.zeros_like(first)], -1), torch.cat([across, second], -1)
        blocks, half = torch.cat(rows, -2), 2 * half
    return blocks.squeeze(-3)
