"""Projections of a sequence of n positions to k rows: by a matrix, by pooling, or by a convolution.

Each token has the column of its position; padding has no column. Wang et al. 2020 (Linformer), section 4.
"""

import dataclasses
import math
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyformer.attention.functional.isolation import is_readable
from polyformer.attention.functional.key_exchange import gather
from polyformer.core.errors import InputError
from polyformer.core.ops.autograd import at_least_float32
from polyformer.core.ops.linear import linear
from polyformer.core.sequence.context import Context, SequenceShard


@dataclasses.dataclass(frozen=True, eq=False)
class KeyColumns:
    """The columns of the keys of a call.

    Args:
        used: the number of columns up to the column of the last token.
        index: [B or 1, Tk], the column of every key, 0 for padding; None if each key's column is its slot.
        valid: [B, Tk], False where a key is padding; None if there is no padding.
        shard: the keys of this process under context parallelism; `first` is then the column of its first key
            and `whole` has the columns of all keys.
    """

    used: int
    index: Tensor | None = None
    valid: Tensor | None = None
    shard: SequenceShard | None = None
    first: int = 0
    whole: "KeyColumns | None" = None
    memo: dict[int, tuple[Tensor, Tensor | None]] = dataclasses.field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, context: Context, most: int, device: torch.device) -> Self:
        """Return the columns of a context; raises `InputError` for tokens beyond the `most` columns."""
        whole, shard = context.whole, context.shard
        if whole is None or shard is None:
            return context.once(("columns", most), lambda: cls._read(context, most))
        return context.once(
            ("columns", most), lambda: cls._read(whole, most)._for_shard(shard.key_shard, device)
        )

    @classmethod
    def _read(cls, context: Context, most: int) -> Self:
        index, valid = context.kv_pos, context.kv_valid
        index = index.unsqueeze(0) if index is not None and index.dim() == 1 else index
        if index is not None and valid is not None:
            index = index.masked_fill(~valid, 0)
        if torch.compiler.is_compiling():  # values cannot be read while tracing: count padding too
            _check(context.kv_len, most)
            return cls(context.kv_len if index is None else most, index, valid)
        table = valid if index is None else index
        if table is None:
            _check(context.kv_len, most)
            return cls(context.kv_len)
        slots = torch.arange(context.kv_len, device=table.device)
        column = slots if index is None else index
        real = torch.ones_like(table, dtype=torch.bool) if valid is None else valid
        used = int(torch.where(real, column, 0).max()) + 1
        _check(used, most)
        in_place = bool(((column == slots) | ~real).all())
        return cls(used, None if in_place else index, valid)

    def _for_shard(self, shard: SequenceShard, device: torch.device) -> Self:
        """Return the columns of this process's keys, out of the columns `self` of all keys."""
        index = shard.slots(device).unsqueeze(0) if self.index is None else shard.take(self.index)
        valid = None if self.valid is None else shard.take(self.valid)
        if not index.numel():
            return type(self)(1, index, valid, shard, 0, self)
        if index.is_meta:  # values cannot be read: assume tokens in consecutive columns
            return type(self)(index.shape[1], index, valid, shard, 0, self)
        real = torch.ones_like(index, dtype=torch.bool) if valid is None else valid
        first = int(torch.where(real, index, self.used - 1).min())
        used = int(torch.where(real, index, first).max()) + 1
        return type(self)(used, torch.where(real, index, first), valid, shard, first, self)

    def scatter(self, x: Tensor, step: int = 1) -> Tensor:
        """Return tokens x [B, H, Tk, D] scattered to their columns, [B, H, N, D], with zeros elsewhere.

        The first column is `start(step)`, and N is a multiple of `step`.
        """
        if self.valid is not None:
            x = x.masked_fill(~self.valid[:, None, :, None], 0)
        start = self.start(step)
        # Up to the end of the last token's window.
        length = -(-self.used // step) * step - start
        if self.index is None:
            x = x[:, :, : self.used]
            return F.pad(x, (0, 0, 0, length - self.used)) if length > self.used else x
        index = (self.index - start)[:, None, :, None].expand(x.shape)
        return x.new_zeros(*x.shape[:2], length, x.shape[3]).scatter_add(2, index, x)

    def start(self, step: int) -> int:
        """Return the first column of `scatter`: the start of the first token's window of `step` columns."""
        return self.first // step * step

    def total(self, rows: Tensor, step: int | None = None) -> Tensor:
        """Return the sums [B, H, R, D] over the keys of all processes, given the `rows` of this process.

        `step`: the rows belong to windows of `step` columns; None if they belong to all columns.
        """
        return rows if self.shard is None else self._gather_rows(rows, step, 0.0).sum(0)

    def maximum(self, rows: Tensor, step: int) -> Tensor:
        """Return the maxima over the keys of all processes, otherwise like `total`."""
        return rows if self.shard is None else self._gather_rows(rows, step, -torch.inf).amax(0)

    def _gather_rows(self, rows: Tensor, step: int | None, empty: float) -> Tensor:
        assert self.shard is not None
        assert self.whole is not None
        if step is not None:
            # Empty rows for the windows of other processes, so that all have equal shapes.
            before = self.start(step) // step
            after = -(-self.whole.used // step) - before - rows.shape[2]
            rows = F.pad(rows, (0, 0, before, after), value=empty)
        return gather(at_least_float32(rows), self.shard, "sums of keys")  # under autocast rows are rounded

    def tokens(self, step: int, device: torch.device) -> Tensor:
        """Return the number of tokens in each column, [B or 1, N]."""
        table = self.valid if self.valid is not None else self.index
        if table is None:
            return (torch.arange(-(-self.used // step) * step, device=device) < self.used).long().unsqueeze(0)
        ones = torch.ones_like(table, dtype=torch.long)[:, None, :, None]
        return self.scatter(ones, step)[:, 0, :, 0]

    def windows(self, step: int, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """Return the number of tokens in each window of `step` columns, and which windows have any.

        Both are [B or 1, N / step]; the second is None if all windows have tokens.
        """
        if self.whole is not None:
            return self.whole.windows(step, device)
        if step in self.memo:
            return self.memo[step]
        counts = self.tokens(step, device).unflatten(1, (-1, step)).sum(2)
        if torch.compiler.is_compiling() or counts.is_meta:
            return counts, counts > 0
        self.memo[step] = counts, None if bool((counts > 0).all()) else counts > 0
        return self.memo[step]

    def matrix(self, length: int, most: int, device: torch.device) -> Tensor:
        """Return a mask [B or 1, most, Tk] that is True where a non-padding token has the column."""
        slots = torch.arange(length, device=device).unsqueeze(0)
        column = slots if self.index is None else self.index
        column_mask = column.unsqueeze(1) == torch.arange(most, device=device).view(1, -1, 1)
        return column_mask if self.valid is None else column_mask & self.valid.unsqueeze(1)


def _check(tokens: int, most: int) -> None:
    if tokens > most:
        raise InputError(
            f"input: position {tokens - 1} is beyond the max_length {most} of the projections; "
            "shorten the input, or build the mechanism with a greater max_length"
        )


class LengthProjection(nn.Module):
    """A projection of x [B, H, Tk, D] to rows [B, H, R, D], R <= k, with a mask of the rows that have tokens.

    The mask is [B or 1, R], None for all. `length`: n, the maximum number of positions. `heads`: the number
    of projections, one per head or 1 for all heads.
    """

    def __init__(self, length: int, k: int, heads: int, width: int):
        super().__init__()
        self.length, self.k, self.step = length, k, length // k

    def forward(self, x: Tensor, columns: KeyColumns) -> tuple[Tensor, Tensor | None]:
        """Return the rows of the columns that have tokens, and which rows have tokens (None for all)."""
        raise NotImplementedError

    def definition(self, x: Tensor, columns: KeyColumns) -> tuple[Tensor, Tensor | None]:
        """Return the same result by its equation, over all n columns and k rows."""
        raise NotImplementedError

    def windows(self, x: Tensor, columns: KeyColumns) -> Tensor:
        """Return the tokens in windows of columns, [B, H, R, n / k, D]."""
        return columns.scatter(x, self.step).unflatten(2, (-1, self.step))

    def members(self, x: Tensor, columns: KeyColumns) -> Tensor:
        """Return a mask [B or 1, k, Tk] that is True where the non-padding token is in the row's window."""
        column_mask = columns.matrix(x.shape[2], self.length, x.device)
        return column_mask.unflatten(1, (self.k, self.step)).any(2)


class LinearProjection(LengthProjection):
    """A matrix E [k, n]: x' = E x, drawn with variance 1 / n so that a full input keeps its scale."""

    def __init__(self, length: int, k: int, heads: int, width: int):
        super().__init__(length, k, heads, width)
        self.weight = nn.Parameter(torch.empty(heads, k, length).normal_(0.0, 1 / math.sqrt(length)))

    def forward(self, x: Tensor, columns: KeyColumns) -> tuple[Tensor, Tensor | None]:
        """Return E x, restricted to the columns that have tokens."""
        x = columns.scatter(x)
        weight = self.weight[:, :, columns.first : columns.first + x.shape[2]].to(x.dtype)
        if len(weight) > 1:
            return columns.total(weight @ x), None
        # All heads share E: [B, n, H D] needs a single product per row.
        x = x.transpose(1, 2)
        heads = x.shape[2]
        rows = _project_rows(weight[0], x.flatten(2))  # one product for all heads
        return columns.total(rows.unflatten(2, (heads, -1)).transpose(1, 2)), None

    def definition(self, x: Tensor, columns: KeyColumns) -> tuple[Tensor, Tensor | None]:
        """Return E C x over all columns, where C [B or 1, n, T] is 1 where token t has the column."""
        column_mask = columns.matrix(x.shape[2], self.length, x.device).to(x.dtype).expand(len(x), -1, -1)
        weight = self.weight.to(x.dtype).expand(x.shape[1], -1, -1)
        return torch.einsum("hkn,bnt,bhtd->bhkd", weight, column_mask, x), None


def _project_rows(weight: Tensor, x: Tensor) -> Tensor:
    """Return weight [k, n] @ x [B, n, P], [B, k, P]."""
    if not is_readable(x):  # a tracer would unroll the loop over the batch
        return weight @ x
    return torch.stack([linear(weight, row.T) for row in x])


class MeanProjection(LengthProjection):
    """The mean of the non-padding tokens in each window of n / k columns."""

    def forward(self, x: Tensor, columns: KeyColumns) -> tuple[Tensor, Tensor | None]:
        """Return the sums over windows divided by their number of tokens."""
        counts, seen = columns.windows(self.step, x.device)
        sums = columns.total(self.windows(x, columns).sum(3), self.step)
        return sums / counts.clamp_min(1)[:, None, :, None], seen

    def definition(self, x: Tensor, columns: KeyColumns) -> tuple[Tensor, Tensor | None]:
        """Return the mean of the tokens in each window."""
        inside = self.members(x, columns).to(x.dtype).unsqueeze(1)
        counts = inside.sum(3, keepdim=True)
        return inside @ x / counts.clamp_min(1), counts[:, 0, :, 0] > 0


class MaxProjection(LengthProjection):
    """The maximum of the non-padding tokens in each window of n / k columns, for each of the D dimensions."""

    def forward(self, x: Tensor, columns: KeyColumns) -> tuple[Tensor, Tensor | None]:
        """Return the maxima over windows, with padding as -inf, and zeros for windows without tokens."""
        counts, seen = columns.windows(self.step, x.device)
        empty = (columns.tokens(self.step, x.device) == 0).unflatten(1, (-1, self.step))
        top = self.windows(x, columns).masked_fill(empty[:, None, :, :, None], -torch.inf).amax(3)
        top = columns.maximum(top, self.step)
        return top.masked_fill((counts == 0)[:, None, :, None], 0.0), seen

    def definition(self, x: Tensor, columns: KeyColumns) -> tuple[Tensor, Tensor | None]:
        """Return the maximum of the tokens in each window."""
        inside = self.members(x, columns)
        rows = [x.masked_fill(~window[:, None, :, None], -torch.inf).amax(2) for window in inside.unbind(1)]
        seen = inside.any(2)
        return torch.stack(rows, 2).masked_fill(~seen[:, None, :, None], 0.0), seen


class ConvolutionProjection(LengthProjection):
    """A convolution over positions with kernel size and stride n / k, from D to D channels, without bias."""

    def __init__(self, length: int, k: int, heads: int, width: int):
        super().__init__(length, k, heads, width)
        deviation = 1 / math.sqrt(width * self.step)
        self.weight = nn.Parameter(torch.empty(heads, self.step, width, width).normal_(0.0, deviation))

    def forward(self, x: Tensor, columns: KeyColumns) -> tuple[Tensor, Tensor | None]:
        """Return the convolution as one matrix product of flattened windows and the flattened kernel."""
        # [B, H, R, step D] @ [H or 1, step D, D]
        rows = self.windows(x, columns).flatten(3) @ self.weight.flatten(1, 2).to(x.dtype)
        return columns.total(rows, self.step), columns.windows(self.step, x.device)[1]

    def definition(self, x: Tensor, columns: KeyColumns) -> tuple[Tensor, Tensor | None]:
        """Return sum_s x_(r step + s) W_s for every row r."""
        column_mask = columns.matrix(x.shape[2], self.length, x.device).to(x.dtype).unsqueeze(1)
        windows = (column_mask @ x).unflatten(2, (-1, self.step))  # [B, H, k, step, D]
        kernel = self.weight.to(x.dtype).expand(x.shape[1], -1, -1, -1)
        return torch.einsum("bhksd,hsde->bhke", windows, kernel), self.members(x, columns).any(2)


PROJECTIONS: dict[str, type[LengthProjection]] = {
    "linear": LinearProjection,
    "mean": MeanProjection,
    "max": MaxProjection,
    "convolution": ConvolutionProjection,
}
