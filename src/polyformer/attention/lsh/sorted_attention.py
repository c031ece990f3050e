"""Attention over windows in a sorted order, forward and backward, without any tensor of T x T.

    y_i = sum_j p_ij v_j        p_ij = softmax over every j that i sees in some round, of q_i . k_j * scale

A key that is seen in several rounds counts once: in the first of them. (Kitaev et al. 2020, equation 5,
subtract log c from the score of a key seen in c rounds, which comes to the same.) `itself` says whether a
token sees itself; without, it does when it sees nothing else. Padding gives zeros.

Each round gathers its tokens in sorted order; blocks of them look at their own block and those that their
windows reach into, with an exact mask from the spots. The rounds are joined by their log-sum-exp. The
backward pass computes the weights again. Cost: the scores of R T m pairs, and at most as many again that the
mask leaves out (twice that where there is a future); memory beside inputs and output: R T whole numbers.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from polyformer.attention.lsh.sorted_window import Windows
from polyformer.ops.precision import as_written
from polyformer.ops.workers import spread
from polyformer.sequence.context import Context

LEAST_BLOCK, MOST_BLOCK = 32, 128
"""Tokens of a block: windows decide, between these."""

TOGETHER = {"cpu": 1 << 17, "cuda": 1 << 26}
"""Scores computed at once; on a CPU, what a cache holds."""

JOINED = {"cpu": 1 << 12, "cuda": 1 << 21}
"""Short heads are laid end to end, up to so many tokens."""

AWAY = 1e30
"""What the score of a key loses that is not seen: more than any score has."""

EXACT = 1 << 22
"""Spots up to here, and their halves, are exact in float32."""

LOG2E, LN2 = math.log2(math.e), math.log(2)


@torch.compiler.disable(reason="windows are walked in Python")
def sorted_attention(
    q: Tensor, k: Tensor, v: Tensor, windows: Windows, context: Context, scale: float, itself: bool = True
) -> Tensor:
    """q, k [B, H, T, D] and v [B, H, T, Dv] of the same tokens -> [B, H, T, Dv]."""
    order, spots = _end_to_end(windows, q)
    bands = Bands(windows, order.shape[-1], itself, q)
    shape = len(order), order.shape[-1], -1
    rows = (x.reshape(shape) for x in (q, k, v))
    out, lse = _Attention.apply(bands, scale, order, spots, *rows)  # type: ignore[misc]
    out, lse = out.view(v.shape), lse.view(v.shape[:3])
    if not itself:
        out = torch.where((lse == -torch.inf).unsqueeze(-1), v, out)
    if context.kv_valid is None:
        return out
    return out.masked_fill(~context.kv_valid[:, None, :, None], 0)


def _end_to_end(windows: Windows, like: Tensor) -> tuple[Tensor, Tensor]:
    """Order and spots [N, R, L] of rows of one or more heads each, whose spots are too far apart to meet."""
    order, spots = (x.flatten(0, 1) for x in (windows.order, windows.spots))
    heads, rounds, length = order.shape
    threads = 1 if like.is_cuda else torch.get_num_threads()
    most = max(1, min(JOINED[_kind(like)] // length, heads // threads))
    group = max(one for one in range(1, most + 1) if heads % one == 0)
    number = torch.arange(group, device=order.device).view(1, group, 1, 1)
    last = int(spots.max()) + windows.size
    spots = spots.unflatten(0, (-1, group)) + number * last
    order = order.unflatten(0, (-1, group)) + number * length
    precise = like.dtype if group * last < EXACT else torch.float64
    order, spots = (x.transpose(1, 2).reshape(-1, rounds, group * length) for x in (order, spots))
    return order, spots.to(precise)


def _kind(x: Tensor) -> str:
    return "cuda" if x.is_cuda else "cpu"


class Bands:
    """Windows as bands of blocks: a block of queries, and `width` keys from `back` blocks before it on.

    A query sees a key if |spot of query - spot of key - middle| <= reach.
    """

    def __init__(self, windows: Windows, length: int, itself: bool, like: Tensor):
        self.length, self.itself = length, itself
        self.block = min(max(windows.size, LEAST_BLOCK), MOST_BLOCK, length)
        self.count = -(-length // self.block)
        self.back = min(-(-(windows.size - 1) // self.block), self.count - 1)
        self.ahead = 0 if windows.causal else self.back
        self.blocks = self.back + 1 + self.ahead
        self.width = self.blocks * self.block
        self.middle = (windows.size - 1) / 2 if windows.causal else 0.0
        self.reach = (windows.size - 1) / 2 if windows.causal else windows.size - 1.0
        self.step = max(1, TOGETHER[_kind(like)] // (self.block * self.width))

    @property
    def steps(self) -> Iterator[tuple[int, int]]:
        """Runs of blocks that are computed together."""
        return itertools.pairwise([*range(0, self.count, self.step), self.count])

    def of_queries(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """x [..., L, D] in sorted order as blocks [..., count, block, D]."""
        short = self.count * self.block - self.length
        x = torch.nn.functional.pad(x, (0, 0, 0, short), value=fill) if short else x
        return x.unflatten(-2, (self.count, self.block))

    def of_keys(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """x [..., L, D] in sorted order as the keys of each block, [..., count, width, D]: they overlap."""
        short = self.count * self.block - self.length
        around = self.back * self.block, self.ahead * self.block + short
        x = torch.nn.functional.pad(x, (0, 0, *around), value=fill)
        return x.unfold(-2, self.width, self.block).transpose(-1, -2)

    def room(self, x: Tensor) -> Tensor:
        """Zeros [blocks, block, D] for what the keys of each block get."""
        return x.new_zeros(self.back + self.count + self.ahead, self.block, x.shape[-1])

    def give(self, room: Tensor, start: int, values: Tensor) -> None:
        """Adds values [n, width, D] of the keys of the blocks from `start` on."""
        for i, part in enumerate(values.split(self.block, 1)):
            room[start + i : start + i + len(part)] += part

    def given(self, room: Tensor) -> Tensor:
        """[L, D] in sorted order."""
        return room[self.back :].flatten(0, 1)[: self.length]


class Round:
    """One round of one row: its tokens in sorted order, and who of them sees whom."""

    def __init__(self, bands: Bands, number: int, order: Tensor, spots: Tensor):
        self.bands, self.order = bands, order[number]
        self.place = torch.empty_like(self.order)
        self.place[self.order] = torch.arange(bands.length, device=order.device)
        own = spots[: number + 1].index_select(1, self.order).unsqueeze(-1)
        self.of_queries = bands.of_queries(own - bands.middle, fill=4 * AWAY)
        self.of_keys = bands.of_keys(own, fill=-4 * AWAY).mT

    def queries(self, x: Tensor) -> Tensor:
        """x [L, D] as blocks of queries."""
        return self.bands.of_queries(x.index_select(0, self.order))

    def keys(self, x: Tensor) -> Tensor:
        """x [L, D] as the keys of each block."""
        return self.bands.of_keys(x.index_select(0, self.order))

    def unsorted(self, x: Tensor) -> Tensor:
        """Blocks [count, block, D] of queries as [L, D] in the order of slots."""
        return x.flatten(0, 1).index_select(0, self.place)

    def scores(self, q: Tensor, k: Tensor, start: int, stop: int) -> Tensor:
        """Scores [n, block, width] of the blocks start..stop; far below 0 where a key is not seen.

        That are keys outside the window, and those that an earlier round has shown.
        """
        scores = torch.bmm(q[start:stop], k[start:stop].mT)
        *earlier, own = range(len(self.of_queries))
        for one in (own, *earlier):
            away = (self.of_queries[one, start:stop] - self.of_keys[one, start:stop]).abs_()
            # Comparisons that write numbers are vectorised, those that write bools and fills by them are not.
            away = away.gt_(self.bands.reach) if one == own else away.le_(self.bands.reach)
            scores.sub_(away, alpha=AWAY)
        if not self.bands.itself:
            scores.diagonal(self.bands.back * self.bands.block, 1, 2).fill_(-AWAY)
        return scores


class _Attention(torch.autograd.Function):
    """(order, spots [N, R, L], q, k [N, L, D], v [N, L, Dv]) -> out [N, L, Dv] and log-sum-exp [N, L]."""

    @staticmethod
    @as_written
    def forward(
        ctx: Any, bands: Bands, scale: float, order: Tensor, spots: Tensor, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        out, lse = torch.empty_like(v), q.new_empty(q.shape[:2])

        def work(rows: Sequence[int]) -> None:
            for n in rows:
                rounds = (Round(bands, r, order[n], spots[n]) for r in range(order.shape[1]))
                out[n], lse[n] = _forward(rounds, q[n] * (scale * LOG2E), k[n], v[n])

        _spread(work, q)
        ctx.bands, ctx.scale = bands, scale
        ctx.save_for_backward(order, spots, q, k, v, out, lse)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    @as_written
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        order, spots, q, k, v, out, lse = ctx.saved_tensors
        grads = tuple(torch.empty_like(x) for x in (q, k, v))
        shift = (grad * out).sum(-1, keepdim=True)
        lse = lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1) * LOG2E

        def work(rows: Sequence[int]) -> None:
            for n in rows:
                rounds = (Round(ctx.bands, r, order[n], spots[n]) for r in range(order.shape[1]))
                found = _backward(rounds, q[n] * (ctx.scale * LOG2E), k[n], v[n], grad[n], shift[n], lse[n])
                for whole, one, factor in zip(grads, found, (ctx.scale, LN2, 1.0)):
                    torch.mul(one, factor, out=whole[n])

        _spread(work, q)
        return None, None, None, None, *grads


def _spread(work: Any, q: Tensor) -> None:
    rows = range(len(q))
    if q.is_cuda:
        work(rows)
    else:
        spread(work, rows)


def _forward(rounds: Iterator[Round], q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Output [L, Dv] and log-sum-exp [L] of one row, q scaled for powers of 2; rounds join as they come."""
    top, total, value = q.new_full((len(q), 1), -AWAY / 2), q.new_zeros(len(q), 1), torch.zeros_like(v)
    for round in rounds:
        queries, keys, values = round.queries(q), round.keys(k), round.keys(v)
        peak, mass = (q.new_empty(*queries.shape[:2], 1) for _ in range(2))
        seen = v.new_empty(*queries.shape[:2], v.shape[1])
        for start, stop in round.bands.steps:
            weights = round.scores(queries, keys, start, stop)
            # Where nothing is seen, the peak stays above what is left of the scores.
            torch.amax(weights, -1, keepdim=True, out=peak[start:stop]).clamp_(min=-AWAY / 2)
            weights.sub_(peak[start:stop]).exp2_()
            torch.sum(weights, -1, keepdim=True, out=mass[start:stop])
            torch.bmm(weights, values[start:stop], out=seen[start:stop])
        peak, mass, seen = (round.unsorted(x) for x in (peak, mass, seen))
        highest = torch.maximum(top, peak)
        fade, share = torch.exp2(top - highest), torch.exp2(peak - highest)
        total, value = total * fade + mass * share, value.mul_(fade).addcmul_(seen, share)
        top = highest
    lse = ((top + total.log2()) * LN2).masked_fill_(total == 0, -torch.inf)
    return value / total.clamp_min(torch.finfo(q.dtype).tiny), lse.squeeze(-1)


def _backward(
    rounds: Iterator[Round], q: Tensor, k: Tensor, v: Tensor, grad: Tensor, shift: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What q, k and v of one row get, but for factors; d score = p (d p - shift)."""
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    for round in rounds:
        bands = round.bands
        queries, keys, values = round.queries(q), round.keys(k), round.keys(v)
        grads, shifts, sums = (round.queries(x) for x in (grad, shift, lse))
        of_queries, of_keys, of_values = torch.empty_like(queries), bands.room(k), bands.room(v)
        for start, stop in bands.steps:
            weights = round.scores(queries, keys, start, stop).sub_(sums[start:stop]).exp2_()
            bands.give(of_values, start, torch.bmm(weights.mT, grads[start:stop]))
            slopes = (
                torch.bmm(grads[start:stop], values[start:stop].mT).sub_(shifts[start:stop]).mul_(weights)
            )
            bands.give(of_keys, start, torch.bmm(slopes.mT, queries[start:stop]))
            torch.bmm(slopes, keys[start:stop], out=of_queries[start:stop])
        dq += round.unsorted(of_queries)
        dk += bands.given(of_keys).index_select(0, round.place)
        dv += bands.given(of_values).index_select(0, round.place)
    return dq, dk, dv
