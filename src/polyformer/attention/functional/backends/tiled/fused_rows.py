"""Rows of a layout by torch's fused kernel for CPUs, which divides a call among all threads.

The loop over tiles starts twenty operations per tile from Python, and its threads wait for Python's lock.
Here consecutive rows with equally many keys are one call: the queries of M rows are a batch of M matrices,
with the keys of each row gathered and its mask added to the scores. The loop has the backward pass, so these
calls serve inference only.

Which way is faster depends on the processor. The kernel took 0.3 to 0.6 of the loop's time on an Intel Xeon
with AVX-512 and 1.4 to 1.7 times as long on an AMD EPYC (Zen 4), so the machine at hand is measured.
"""

import dataclasses
import itertools
from collections.abc import Hashable, Iterator

import torch
from torch import Tensor

from polyformer.attention.functional.backends.tiled.tiles import slots
from polyformer.attention.functional.request import Request
from polyformer.attention.patterns.base import Pattern
from polyformer.attention.patterns.layout import Row, count
from polyformer.core.config import Config
from polyformer.core.ops.cpu import CPU
from polyformer.core.ranges import NonNegativeFloat
from polyformer.core.sequence.context import Context

QUERIES = 256, 128
"""Queries of a row: the larger number, unless its rows compute many more masked scores."""

LEAST = 512
"""The least number of queries of a call; fewer give the threads too little work."""

MASKS = 2
"""The most mask entries for each number of the queries."""

GATHERED = 1 << 21
"""The most numbers of the keys gathered for a call of several rows: more would leave the caches."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowPrices(Config):
    """Time of a score in the loop over tiles relative to the fused kernel; with 0 the kernel is not used."""

    own: NonNegativeFloat = 0.0  # each query head has a key head of its own
    grouped: NonNegativeFloat = 0.0  # several query heads share a key head

    def of(self, request: Request) -> float:
        """Return the ratio for the heads of a request."""
        return self.own if request.groups == 1 else self.grouped


@dataclasses.dataclass(frozen=True, eq=False)
class RowRun:
    """Consecutive rows with equally many queries and keys.

    keys: [M * keys], the key slots of each row. mask: [M or 1, 1, queries, keys], 0 for allowed pairs and
    minus infinity for others; None without masked pairs.
    """

    start: int
    stop: int
    rows: int
    keys: Tensor
    mask: Tensor | None

    def parts(self, key_numbers: int) -> "Iterator[RowRun]":
        """Yield runs of fewer rows, as many as `GATHERED` allows; key_numbers: of a key slot of all heads."""
        width, queries = len(self.keys) // self.rows, (self.stop - self.start) // self.rows
        step = max(1, GATHERED // (width * key_numbers))
        for first in range(0, self.rows, step):
            last = min(first + step, self.rows)
            mask = self.mask if self.mask is None or len(self.mask) == 1 else self.mask[first:last]
            keys, start = self.keys[first * width : last * width], self.start + first * queries
            yield RowRun(start, self.start + last * queries, last - first, keys, mask)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Return outputs [H, Tq, D] and log-sum-exps [H, Tq] of the queries of the run.

        q: [H, T, D]. k, v: [1 or H, Tk, D], one key head for all heads, or one for each.
        """
        rows, heads, width = self.rows, len(q), len(self.keys) // self.rows
        queries = q[:, self.start : self.stop].unflatten(1, (rows, -1)).transpose(0, 1)
        keys, values = (
            x.index_select(1, self.keys).unflatten(1, (rows, width)).transpose(0, 1).expand(-1, heads, -1, -1)
            for x in (k, v)
        )
        mask = None if self.mask is None else self.mask.expand(rows, -1, -1, -1)
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        out, lse = kernel(queries, keys, values, 0.0, False, attn_mask=mask, scale=scale)
        return out.transpose(0, 1).flatten(1, 2), lse.transpose(0, 1).flatten(1, 2)


def row_runs(request: Request, pattern: Pattern, most_scores: float) -> list[RowRun] | None:
    """Return the runs of a call in inference, the same pattern for all heads; None if the tiles are better.

    most_scores: the number of scores of a head for which the kernel takes as long as the tiles.
    """
    q, context = request.q, request.context
    if request.score_mod is not None or request.relative is not None or request.dropout:
        return None
    if not q.is_cpu or q.shape[2] < LEAST or q.shape[3] != request.v.shape[3]:
        return None
    plan = RunPlan(pattern, context, q.shape[:2], torch.promote_types(q.dtype, torch.float32))
    return context.once(plan.key, lambda: plan.runs(MASKS * q.numel() // len(q), most_scores))


@dataclasses.dataclass(frozen=True, eq=False)
class RunPlan:
    """The division of a call of B batch rows and H heads into runs; size: (B, H)."""

    pattern: Pattern
    context: Context
    size: torch.Size
    dtype: torch.dtype

    @property
    def key(self) -> Hashable:
        """The key by which the context stores the runs for all layers."""
        return "runs", self.pattern, self.size, self.dtype

    def runs(self, most_masked: float, most_scores: float) -> list[RowRun] | None:
        """Return the runs; None if they have more mask entries or scores, or if a query sees no key.

        The context keeps the first answer, since its layers have the same shapes.
        """
        several = (self._runs(queries, most_masked, most_scores) for queries in QUERIES)
        return next((runs for runs in several if runs is not None), None)

    def _runs(self, queries: int, most_masked: float, most_scores: float) -> list[RowRun] | None:
        """Return the runs of rows of at most `queries` queries."""
        rows = self.pattern.layout(self.context, queries)
        areas = [(row.stop - row.start) * count(row.keys.some) for row in rows]
        masked = sum(area for row, area in zip(rows, areas) if row.keys.some != row.keys.full)
        if masked > most_masked or sum(areas) > most_scores or not all(areas):
            return None
        runs = []
        for _, group in itertools.groupby(rows, lambda row: (row.stop - row.start, count(row.keys.some))):
            if (run := self._run(list(group))) is None:
                return None
            runs.append(run)
        return runs

    def _run(self, rows: list[Row]) -> RowRun | None:
        """Return the run of consecutive rows; None if a query sees no key, or batch rows or heads differ."""
        mask = None
        if any(row.keys.some != row.keys.full for row in rows):
            same = self.pattern.structure.by_distance and len({_relative_keys(row) for row in rows}) == 1
            masks = [self._mask(row) for row in (rows[:1] if same else rows)]
            # The kernel returns NaN for a query without keys.
            if any(mask.dim() > 2 or not bool(mask.any(1).all()) for mask in masks):
                return None
            hidden = ~torch.stack(masks).unsqueeze(1)
            mask = torch.zeros(hidden.shape, dtype=self.dtype).masked_fill_(hidden, -torch.inf)
        keys = torch.cat([slots(row.keys.some, CPU) for row in rows])
        return RowRun(rows[0].start, rows[-1].stop, len(rows), keys, mask)

    def _mask(self, row: Row) -> Tensor:
        """Return the mask [queries, keys] of a row, with more axes if batch rows or heads differ."""
        b, h = (
            torch.arange(number).view(shape) for number, shape in zip(self.size, ((-1, 1, 1, 1), (-1, 1, 1)))
        )
        q_idx = torch.arange(row.start, row.stop).view(-1, 1)
        allowed = self.pattern.mask(self.context, b, h, q_idx, slots(row.keys.some, CPU))
        return allowed.view(allowed.shape[-2:]) if allowed.shape[:-2].numel() == 1 else allowed


def _relative_keys(row: Row) -> tuple[tuple[int, int], ...]:
    return tuple((start - row.start, stop - row.start) for start, stop in row.keys.some)


def forward(
    runs: list[RowRun], inputs: tuple[Tensor, Tensor, Tensor], scale: float, out: Tensor, lse: Tensor
) -> None:
    """Write the output [B, H, Tq, D] and the log-sum-exp [B, H, Tq, 1] of q [B, H, Tq, D], k and v."""
    q, k, v = inputs
    groups = q.shape[1] // k.shape[1]
    # A key head is expanded to the query heads of its group: a view only if it is a single key head.
    step = k.shape[1] if groups == 1 else 1
    parts = [part for run in runs for part in run.parts(step * k.shape[3])]
    for run, row, head in itertools.product(parts, range(len(q)), range(0, k.shape[1], step)):
        heads, queries = slice(head * groups, (head + step) * groups), slice(run.start, run.stop)
        own = slice(head, head + step)
        value, total = run.forward(q[row, heads], k[row, own], v[row, own], scale)
        out[row, heads, queries], lse[row, heads, queries, 0] = value, total
