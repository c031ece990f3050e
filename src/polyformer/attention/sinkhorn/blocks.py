"""Which token stands in which block: tables of integers for the queries and keys of a call.

Blocks begin with their document and have `size` of its real tokens, so that padding, wherever it lies, and
other documents of the row change nothing. The blocks of a row are numbered through; R is the number of
batch rows that differ, 1 where all are alike. Cost: a few integers a token.
"""

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from polyformer.attention.sinkhorn.balancing import filled_mass
from polyformer.core.errors import InputError
from polyformer.sequence.context import Context
from polyformer.sequence.documents import take_tokens, token_ranks


@dataclasses.dataclass(frozen=True, eq=False)
class Blocks:
    """N blocks of all keys, and A blocks that the queries stand in: those are asked.

    Args:
        index: [R, N, size], the slots of each block's tokens, Tk where it has none.
        column: [R, N], a block's number in its document.
        home: [R, N], the number of its document's first block; -1 of a block without tokens.
        asked: [R, A], the numbers of the asked blocks.
        there: [R, A], whether there is such a block.
        begins: [R, A], whether its first token is new: not yet in the state.
        some_begin: whether any does.
        queries: [R, A, size], the queries of each asked block, Tq where there is none.
        back: [R, Tq], where a query stands in the flattened `queries`; A size for padding.
        length: Tk.
        whole: whether all keys are new; all blocks are asked then.
    """

    index: Tensor
    column: Tensor
    home: Tensor
    asked: Tensor
    there: Tensor
    begins: Tensor
    some_begin: bool
    queries: Tensor
    back: Tensor
    length: int
    whole: bool

    @property
    def filled(self) -> Tensor:
        """Whether a block has a token at each place, [R, N, size]."""
        return self.index < self.length

    @property
    def own(self) -> Tensor:
        """`index` of the asked blocks, [R, A, size]."""
        return self.of_asked(self.index).masked_fill(~self.there.unsqueeze(2), self.length)

    def of_tokens(self) -> Tensor:
        """The number of each query's block, [R, Tq]; -1 for padding."""
        number = self.asked.gather(1, (self.back // self.index.shape[2]).clamp(max=self.asked.shape[1] - 1))
        return number.masked_fill(self.back >= self.asked.shape[1] * self.index.shape[2], -1)

    def tokens(self) -> Tensor:
        """Which keys start <= j < stop each block has, [R, N, 2]; none: 0, 0."""
        most = self.index.masked_fill(~self.filled, -1).amax(2)
        return torch.stack([self.index.amin(2), most + 1], 2) * (most >= 0).unsqueeze(2)

    def of_asked(self, table: Tensor) -> Tensor:
        """A table [R, N, ...] for the asked blocks, [R, A, ...]."""
        rows = torch.arange(len(table), device=table.device).unsqueeze(1)
        return table[rows, self.asked]

    def sources(self, causal: bool) -> Tensor:
        """Whether block j may stand in the place of asked block i, [R, A, N]."""
        home = self.of_asked(self.home).unsqueeze(2)
        same = (home == self.home.unsqueeze(1)) & (home >= 0) & self.there.unsqueeze(2)
        if not causal:
            return same
        return same & (torch.arange(self.home.shape[1], device=home.device) < self.asked.unsqueeze(2))


def blocks_of(context: Context, size: int, fresh: int, device: torch.device) -> Blocks:
    """The blocks of a call whose last `fresh` keys are new."""
    real, rank, _ = token_ranks(context, device)
    rows, length = real.shape
    number = (real & (rank % size == 0)).cumsum(1) - 1
    count = _most(context, number, size)
    slots = torch.arange(length, device=device).expand(rows, -1)
    at = torch.where(real, number * size + rank % size, count * size)
    index = _placed(slots, at, count * size, length).view(rows, count, size)
    first = index[:, :, 0].clamp(max=length - 1)
    exists = index[:, :, 0] < length
    column = rank.gather(1, first) // size * exists
    home = (number.gather(1, first) - column).masked_fill(~exists, -1)

    queries = slice(context.offset, context.offset + context.q_len)
    own_real, own_number = real[:, queries], number[:, queries]
    whole = fresh == length
    first_asked = torch.where(own_real, own_number, count).amin(1, keepdim=True)
    first_asked = torch.where((first_asked == count) | whole, 0, first_asked)
    most = count if whole else _most_asked(context, own_number, own_real, first_asked, count, size)
    asked = first_asked + torch.arange(most, device=device)
    there = asked < count
    asked = asked.clamp(max=count - 1)
    there = there & exists.gather(1, asked)
    begins = there & (first.gather(1, asked) >= length - fresh)
    back = torch.where(own_real, at[:, queries] - first_asked * size, most * size)
    numbers = torch.arange(context.q_len, device=device).expand(rows, -1)
    placed = _placed(numbers, back, most * size, context.q_len).view(rows, most, size)
    some = _some_begin(context, begins, size, fresh)
    return Blocks(index, column, home, asked, there, begins, some, placed, back, length, whole)


def in_blocks(x: Tensor, index: Tensor) -> Tensor:
    """The tokens [R, A, size] of x [B, H, T, D] as [B, H, A, size, D], zeros for an index of T."""
    length = x.shape[2]
    blocks = take_tokens(x, index.flatten(1).clamp(max=length - 1)).unflatten(2, index.shape[1:])
    return blocks.masked_fill((index == length)[:, None, :, :, None], 0.0)


def unblocked(x: Tensor, back: Tensor) -> Tensor:
    """Blocks [B, H, A, size, D] of queries as [B, H, Tq, D], zeros for padding."""
    return take_tokens(F.pad(x.flatten(2, 3), (0, 0, 0, 1)), back)


def mixed(s: Tensor, k: Tensor, v: Tensor, filled: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values [B, H, N, size, D] sorted by s [B, H, A, N], and the log of m [B, H, A, size].

    `filled`, [R, 1, N, size, 1], is 1 where a block has a token and 0 where not. m = s filled, by which what
    a place has is divided; see `filled_mass` for empty places.
    """
    mass, log_mass = filled_mass((s @ filled.flatten(3)).unsqueeze(4))
    k, v = ((s @ x.flatten(3)).unflatten(3, x.shape[3:]) / mass for x in (k, v))
    return k, v, log_mass.squeeze(4)


def _placed(values: Tensor, at: Tensor, count: int, fill: int) -> Tensor:
    """[R, count], `values` [R, T] at their places `at`, those at `count` left out; `fill` elsewhere."""
    table = torch.full((len(at), count + 1), fill, dtype=torch.long, device=at.device)
    return table.scatter(1, at, values)[:, :count]


def _most(context: Context, number: Tensor, size: int) -> int:
    """The most blocks of a row, or a bound of it."""
    if context.kv_doc is None:
        return -(-context.kv_len // size)
    return context.kv_len if torch.compiler.is_compiling() else max(1, int(number[:, -1].max()) + 1)


def _most_asked(context: Context, number: Tensor, real: Tensor, first: Tensor, count: int, size: int) -> int:
    """The most blocks that a row's queries stand in, or a bound of it."""
    if context.kv_doc is None:
        return min(count, (context.q_len + size - 2) // size + 1)
    if torch.compiler.is_compiling():
        return min(count, context.q_len)
    return max(1, int(torch.where(real, number - first + 1, 0).max()))


def _some_begin(context: Context, begins: Tensor, size: int, fresh: int) -> bool:
    if context.kv_doc is None and context.kv_valid is None:
        return -(-context.kv_len // size) > -(-(context.kv_len - fresh) // size)
    return torch.compiler.is_compiling() or bool(begins.any())


def check_count(blocks: Blocks, context: Context, size: int, most: int) -> None:
    """Raises `InputError` where a document has more than `most` blocks; in a graph, which cannot look at how
    long packed documents are before it runs, a `RuntimeError` with the same words."""
    message = (
        f"input: a text has more than the {most * size} tokens that the sorting network was made for; "
        "cut it, or make the mechanism with a greater max_length"
    )
    count = blocks.column.shape[1]
    if count <= most:
        return
    if torch.compiler.is_compiling() and context.kv_doc is not None:
        torch.ops.aten._assert_async.msg(blocks.column.max() < most, message)
    elif context.bare or torch.compiler.is_compiling() or int(blocks.column.max()) >= most:
        raise InputError(message)
